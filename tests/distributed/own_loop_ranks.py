"""Rank script of test_own_loop: custom training loops with their own process group."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pantheraml import stability
from pantheraml.base.errors import ConfigError, NonFiniteError
from pantheraml.parallel.data import wrap
from pantheraml.parallel.process_group import World
from pantheraml.specs.multi_gpu import MultiGPUConfig

STEPS, ROWS = 4, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(trained: nn.Module, step: int, ranks: int, rank: int) -> Tensor:
    """Loss of this rank's rows of a global batch."""
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    loss: Tensor = (trained(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    return loss


def manager(clipping: str = "adagc", **bad_steps: Any) -> stability.NumericalStabilityManager:
    settings = {"clipping": clipping, "clip_warmup_steps": 1, "clip_growth": 0.5, "clip_zscore": 1e-3}
    return stability.create_training_wrapper(
        stability.GradientClippingConfig(**settings),
        stability.NaNHandlingConfig(**bad_steps),
        stability.PyTorchDebuggingConfig(debug=True),
    )


def weights(trained: nn.Module) -> list[float]:
    flat: list[float] = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()]).tolist()
    return flat


def clipped(kind: str, ranks: int, rank: int) -> list[float]:
    wrapper, trained = manager(kind), model()
    wrapped = wrapper.wrap_model_for_multi_gpu(trained) if ranks > 1 else trained
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for step in range(STEPS):
        result = wrapper(wrapped, loss_of(wrapped, step, ranks, rank), optimizer)
        assert result.groups is not None
        assert math.isclose(math.hypot(*(norms["grad_norm"] for norms in result.groups.values())), result.grad_norm)
    return weights(trained)


def with_nan(how: str, rank: int) -> dict[str, Any]:
    """Steps in the second of which only rank 1 computes NaN."""
    wrapper, trained = manager(on_nonfinite="skip"), model()
    wrapped = wrapper.wrap_model_for_multi_gpu(trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    results = []
    for step in range(3):
        loss = loss_of(wrapped, step, 2, rank)
        if rank == 1 and step == 1:
            # a NaN loss without backward leaves the gradients unchanged
            loss = loss * math.nan if how == "gradient" else loss + torch.tensor(math.nan)
        results.append({**asdict(wrapper(wrapped, loss, optimizer)), "groups": None})
    wrapper.synchronize_gpus()
    return {
        "results": results,
        "weights": weights(trained),
        "state": wrapper.state_dict(),
        "status": wrapper.get_multi_gpu_status(),
        "batch": wrapper.get_optimal_batch_size(8),
    }


def stopped(rank: int) -> str:
    wrapper, trained = manager(), model()
    wrapped = wrapper.wrap_model_for_multi_gpu(trained)
    loss = loss_of(wrapped, 0, 2, rank) * (math.nan if rank == 1 else 1.0)
    try:
        wrapper(wrapped, loss, torch.optim.SGD(trained.parameters(), lr=0.1))
    except NonFiniteError as err:
        return err.what
    return "not stopped"


def unwrapped(enabled: bool, rank: int) -> str:
    """An unwrapped model with several ranks."""
    wrapper = stability.create_training_wrapper(
        performance_config=stability.PerformanceOptimizationConfig(enable_multi_gpu=enabled),
        nan_config=stability.NaNHandlingConfig(on_nonfinite="skip"),
    )
    trained = model()
    loss = loss_of(trained, 0, 2, rank) * (math.nan if rank == 1 else 1.0)
    try:
        return wrapper(trained, loss, torch.optim.SGD(trained.parameters(), lr=0.1)).action
    except ConfigError as err:
        return err.what


class Checkpointed(nn.Module):
    """Model with reentrant checkpointing, as transformers sets it up."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)


def ddp_options(**settings: Any) -> list[Any]:
    config = stability.PerformanceOptimizationConfig(**settings)
    wrapped = stability.NumericalStabilityManager(performance_config=config).wrap_model_for_multi_gpu(Checkpointed())
    if not isinstance(wrapped, DistributedDataParallel):
        return []
    return [wrapped.static_graph, wrapped.find_unused_parameters, wrapped.bucket_bytes_cap]


def config_options(**settings: Any) -> list[bool]:
    """DDP options from a run's `parallel` section: gradients as bucket views, buffers broadcast in every pass."""
    rank, trained = dist.get_rank(), model()
    trained.register_buffer("own", torch.zeros(1))
    wrapped = wrap(trained, World(rank=rank, size=2, device=torch.device("cpu")), MultiGPUConfig(**settings))
    assert isinstance(wrapped, DistributedDataParallel)
    trained.get_buffer("own").fill_(rank + 1)
    wrapped(torch.ones(1, 4)).sum().backward()
    return [wrapped.gradient_as_bucket_view, bool(trained.get_buffer("own") == 1)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        found = {
            "clipped": {kind: clipped(kind, 2, rank) for kind in ("global_norm", "zclip", "adagc")},
            "gradient": with_nan("gradient", rank),
            "loss": with_nan("loss", rank),
            "stopped": stopped(rank),
            "unwrapped": [unwrapped(True, rank), unwrapped(False, rank)],
            "ddp": [
                ddp_options(),
                ddp_options(multi_gpu_static_graph=False, multi_gpu_bucket_cap_mb=3),
                ddp_options(multi_gpu_find_unused_parameters=True),
                ddp_options(multi_gpu_mode="none"),
            ],
            "config": [
                config_options(),
                config_options(gradient_as_bucket_view=False),
                config_options(broadcast_buffers=False),
            ],
        }
        Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

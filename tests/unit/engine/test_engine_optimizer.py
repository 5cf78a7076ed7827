from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pantheraml.engine.optim.adamw import SMALLEST_8BIT, LeanAdamW
from pantheraml.engine.optim.optimizer import build_optimizer, clip, load_optimizer_tensors, optimizer_tensors
from pantheraml.parallel.local_shards import local_squared_norm
from pantheraml.specs.train import TrainSettings


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 8)).to(dtype)


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    x, y = torch.randn(64, 96, generator=generator).to(dtype), torch.randn(64, 8, generator=generator)
    losses = []
    for _ in range(steps):
        loss = (module(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_weight_decay_spares_biases_and_norms() -> None:
    module = model()
    optimizer = build_optimizer(named(module), TrainSettings(weight_decay=0.1))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in module.parameters() if p.ndim == 2}
    assert all(group["betas"] == (0.9, 0.999) for group in optimizer.param_groups)


EVERY_KIND = [
    (optimizer, dtype)
    for optimizer in ("adamw", "adamw_bf16", "adamw8bit")
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("kind", "dtype"), EVERY_KIND)
def test_state_survives_a_checkpoint_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    settings = TrainSettings.model_validate({"optimizer": kind, "learning_rate": 1e-2})
    straight = model(dtype=dtype)
    optimizer = build_optimizer(named(straight), settings)
    train(straight, optimizer, 5)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, named(straight)).items()}
    resumed = model(seed=9, dtype=dtype)
    resumed.load_state_dict(straight.state_dict())
    again = build_optimizer(named(resumed), settings)
    load_optimizer_tensors(again, named(resumed), saved)
    assert train(straight, optimizer, 5) == train(resumed, again, 5)
    pairs = zip(straight.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("kind", "dtype"), EVERY_KIND)
def test_every_kind_trains_like_float32_adam(kind: str, dtype: torch.dtype) -> None:
    settings = {"learning_rate": 3e-3}
    exact, ours = model(), model(dtype=dtype)
    reference = train(exact, build_optimizer(named(exact), TrainSettings.model_validate(settings)), 150)
    losses = train(
        ours, build_optimizer(named(ours), TrainSettings.model_validate({**settings, "optimizer": kind})), 150
    )
    assert losses[-1] < 0.2 * losses[0]
    assert abs(losses[-1] - reference[-1]) < 0.02 * losses[0]


def test_8bit_states_take_a_quarter_of_the_memory() -> None:
    module = model()
    optimizer = build_optimizer(named(module), TrainSettings(optimizer="adamw8bit"))
    train(module, optimizer, 1)
    large, small = module[0].weight, module[0].bias
    assert small.numel() < SMALLEST_8BIT <= large.numel()
    state = sum(t.numel() * t.element_size() for t in optimizer.state[large].values())
    assert state < 0.27 * (2 * 4 * large.numel())
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32


def test_stochastic_rounding_depends_on_the_seed() -> None:
    ends = []
    for seed in (0, 0, 1):
        module = model(dtype=torch.bfloat16)
        train(module, build_optimizer(named(module), TrainSettings(seed=seed)), 3)
        ends.append(module[0].weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


class Largest(TorchDispatchMode):
    """Records the largest tensor created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in before:
                self.values = max(self.values, leaf.numel())
        return out


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16", "adamw8bit"])
def test_step_allocates_at_most_one_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheraml.kernels.adamw.reference.CHUNK", 512)
    parameter = nn.Parameter(torch.zeros(100, 100, dtype=torch.bfloat16))
    optimizer = build_optimizer([("p", parameter)], TrainSettings.model_validate({"optimizer": kind}))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Largest() as largest:
        optimizer.step()
    assert 0 < largest.values <= 512


def norm_of(module: nn.Module) -> torch.Tensor:
    return local_squared_norm(named(module), named(module), ranks=1).sqrt()


def test_clipping_scales_to_the_limit_and_zero_means_none() -> None:
    module = model()
    optimizer = build_optimizer(named(module), TrainSettings())
    module(torch.ones(2, 96)).square().sum().backward()
    before = norm_of(module)
    clip(optimizer, named(module), before.item(), 0.0)
    assert norm_of(module) == before
    clip(optimizer, named(module), before.item(), 0.5)
    torch.testing.assert_close(norm_of(module).float(), torch.tensor(0.5), rtol=1e-4, atol=0)


def test_clipping_without_gradients_does_nothing() -> None:
    """As on a pipeline stage without adapters, where the norm comes from the other stages."""
    module = model()
    clip(build_optimizer(named(module), TrainSettings()), named(module), 2.0, 0.5)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_clipping_in_the_step_equals_clipping_before_it() -> None:
    """LeanAdamW, which clips inside the step, must match torch's AdamW on gradients clipped beforehand."""
    before, inside = model(), model()
    theirs = build_optimizer(named(before), TrainSettings())
    ours = LeanAdamW(inside.parameters(), lr=2e-4, betas=(0.9, 0.999), eps=1e-8, moments="fp32", seed=0)
    for scale in (1.0, 30.0, 0.01):
        for module, optimizer in ((before, theirs), (inside, ours)):
            optimizer.zero_grad()
            (scale * module(torch.ones(2, 96)).square().sum()).backward()
            clip(optimizer, named(module), norm_of(module).item(), 0.5)
            optimizer.step()
    for a, b in zip(before.parameters(), inside.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_norm_of_bf16_gradients_is_summed_in_float32() -> None:
    module = model(dtype=torch.bfloat16)
    module(torch.ones(2, 96, dtype=torch.bfloat16)).square().sum().backward()
    exact = torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(norm_of(module).double(), exact, rtol=1e-6, atol=0)

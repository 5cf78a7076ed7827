"""Rank script of test_aggregation: all cases on three ranks of one process group, compared with one process.

A case runs DDP over uneven batch shares, and again without DDP on the same samples. It returns plain numbers, written
to one file per rank for the test to check.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.base.errors import DriftError
from pantheraml.engine.step.loss import LossModel
from pantheraml.parallel import aggregate
from pantheraml.parallel.consistency import check_replicas
from pantheraml.parallel.data import without_sync, wrap
from pantheraml.parallel.process_group import World
from pantheraml.parallel.shard_batch import AdaptiveShares, shards, split, weighted_shares
from pantheraml.specs.aggregation import parse_method
from tests.distributed.aggregation_runs import train_all

SAMPLES = 10
SHARES = [2, 3, 5]
WEIGHTS = [1.0, 4.0, 0.5]
BAD_RANK = 1
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    bucket_cap_mb: float = 0.01
    """Small, so that even a toy model has several DDP buckets."""
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True


def make_model(*, lora: bool = False) -> LossModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=97, num_key_value_heads=2))
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return LossModel(model)


def sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(97, (1, 5 + index % 7), generator=generator)


def target_tokens(ids: Sequence[int]) -> int:
    return sum(sample(int(index)).shape[1] - 1 for index in ids)


def loss_sum(module: nn.Module, index: int) -> Tensor:
    tokens = sample(index)
    positions = torch.arange(tokens.shape[1] - 1)[None]
    loss: Tensor = module(tokens[:, :-1], positions, tokens[:, 1:])
    return loss


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def summed_gradients(model: LossModel, ids: Sequence[int]) -> Gradients:
    """Summed gradients in a single process."""
    names, parameters = zip(*named(model), strict=True)
    total = torch.stack([loss_sum(model, int(index)) for index in ids]).sum()
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def difference(found: Gradients, expected: Gradients) -> float:
    assert found.keys() == expected.keys()
    # unlike Python's max, torch's propagates NaN
    return float(
        torch.stack([(found[name] - expected[name]).norm() / expected[name].norm() for name in expected]).max()
    )


def own_gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in named(model) if p.grad is not None}


def backward(ddp: nn.Module, ids: Sequence[int], factor: float) -> float:
    """Backward of the summed loss, sample by sample; a rank without samples runs a dummy one to join collectives."""
    counted, ids = float(len(ids) > 0), ids if len(ids) else [0]
    total = 0.0
    for place, index in enumerate(ids):
        with nullcontext() if place == len(ids) - 1 else without_sync(ddp):
            loss = loss_sum(ddp, int(index)) * counted
            (loss * factor).backward()
        total += float(loss.detach())
    return total


@dataclass
class Step:
    gradients: Gradients
    left_out: tuple[int, ...]


def aggregated(world: World, model: LossModel, method: str, **options: Any) -> Step:
    """Run the backward passes of two steps (DDP rebuilds its buckets after the first); return the second result."""
    shares: list[int] = options.pop("shares", SHARES)
    settings = options.pop("settings", Settings())
    ddp = wrap(model, world, settings)
    finish = aggregate.attach(ddp, parse_method(method), **options)
    ids = np.arange(SAMPLES)
    mine = split(ids, shares)[world.rank]
    factor = world.size / target_tokens(ids)
    left_out: tuple[int, ...] = ()
    for _ in range(2):
        ddp.zero_grad(set_to_none=True)
        backward(ddp, mine, factor)
        left_out = finish(target_tokens=target_tokens(mine), factor=factor)
    return Step(own_gradients(model), left_out)


def rank_sums(model: LossModel, shares: Sequence[int] = SHARES) -> list[tuple[Gradients, int]]:
    """Summed gradient and token count of each rank, computed in one process."""
    parts = split(np.arange(SAMPLES), shares)
    return [(summed_gradients(model, ids), target_tokens(ids)) if len(ids) else ({}, 0) for ids in parts]


def weighted_mean(sums: Sequence[tuple[Gradients, int]], weights: Sequence[float]) -> Gradients:
    total = sum(weight * count for weight, (_, count) in zip(weights, sums, strict=True))
    names = next(gradients for gradients, _ in sums if gradients)
    return {
        name: sum(weight * g[name] for weight, (g, _) in zip(weights, sums, strict=True) if weight and g) / total
        for name in names
    }


def by_value(sums: Sequence[tuple[Gradients, int]], reduce: Callable[[np.ndarray], np.ndarray]) -> Gradients:
    """Apply `reduce` to the ranks' per-token gradients, with numpy."""
    here = [(gradients, count) for gradients, count in sums if count]
    return {
        name: torch.from_numpy(np.asarray(reduce(np.stack([(g[name] / count).numpy() for g, count in here]))))
        for name in here[0][0]
    }


def middle(rows: np.ndarray) -> np.ndarray:
    return np.median(rows, axis=0)


@contextmanager
def nan_on(world: World, model: nn.Module, ranks: Sequence[int]) -> Iterator[None]:
    """Put NaN into one value of the first layer, whose bucket is reduced last."""
    (parameter,) = (p for name, p in named(model) if name.endswith("layers.0.self_attn.q_proj.weight"))

    def poison(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = torch.nan
        return gradient

    handle = parameter.register_hook(poison) if world.rank in ranks else None
    yield
    if handle is not None:
        handle.remove()


# Aggregation ----------------------------------------------------------------------------------------------------------


def case_methods(world: World) -> dict[str, Any]:
    model = make_model()
    sums = rank_sums(model)
    expected = {
        "mean": weighted_mean(sums, [1, 1, 1]),
        "weighted": weighted_mean(sums, WEIGHTS),
        "weighted_mean": weighted_mean(sums, WEIGHTS),
        "median": by_value(sums, middle),
        "trimmed_mean": by_value(sums, middle),  # a trimmed mean of three values is the middle one
    }
    found = {}
    for method, gradients in expected.items():
        weights = WEIGHTS if method.startswith("weighted") else None
        for view in (True, False):
            settings = Settings(gradient_as_bucket_view=view)
            step = aggregated(world, make_model(), method, weights=weights, settings=settings)
            found[f"{method} {'view' if view else 'copy'}"] = difference(step.gradients, gradients)
    return found


def case_lora(world: World) -> dict[str, Any]:
    model = make_model(lora=True)
    sums = rank_sums(model)
    step = aggregated(world, model, "median")
    return {"difference": difference(step.gradients, by_value(sums, middle)), "left_out": step.left_out}


def case_rank_without_tokens(world: World) -> dict[str, Any]:
    shares = [4, 0, 6]
    sums = rank_sums(make_model(), shares)
    found = {}
    for method, expected in (
        ("median", by_value(sums, middle)),
        ("trimmed_mean", by_value(sums, lambda rows: rows.mean(axis=0))),
        ("mean", weighted_mean(sums, [1, 1, 1])),
    ):
        step = aggregated(world, make_model(), method, shares=shares, leave_out_nonfinite=True)
        found[method] = {"difference": difference(step.gradients, expected), "left_out": step.left_out}
    return found


def case_leave_out(world: World) -> dict[str, Any]:
    sums = rank_sums(make_model())
    sound = [pair for rank, pair in enumerate(sums) if rank != BAD_RANK]
    found = {}
    for method, expected in (
        ("mean", weighted_mean(sound, [1, 1])),
        ("weighted", weighted_mean(sound, [WEIGHTS[0], WEIGHTS[2]])),
        ("median", by_value(sound, middle)),
    ):
        model = make_model()
        weights = WEIGHTS if method == "weighted" else None
        with nan_on(world, model, [BAD_RANK]):
            step = aggregated(world, model, method, weights=weights, leave_out_nonfinite=True)
        found[method] = {"difference": difference(step.gradients, expected), "left_out": step.left_out}
    model = make_model()
    step = aggregated(world, model, "mean", leave_out_nonfinite=True)
    found["nobody"] = {"difference": difference(step.gradients, weighted_mean(sums, [1, 1, 1]))}
    found["nobody"]["left_out"] = step.left_out
    return found


def case_nonfinite_shows(world: World) -> dict[str, Any]:
    """A NaN must stay visible unless its rank is excluded."""
    found = {}
    for name, bad, leave_out in (("not configured", [BAD_RANK], False), ("all ranks", [0, 1, 2], True)):
        for method in ("mean", "median", "trimmed_mean"):
            model = make_model()
            with nan_on(world, model, bad):
                step = aggregated(world, model, method, leave_out_nonfinite=leave_out)
            nans = {name: int(g.isnan().sum()) for name, g in step.gradients.items() if not g.isfinite().all()}
            found[f"{method}, {name}"] = {"nans": nans, "left_out": step.left_out}
    return found


# Traffic --------------------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts collectives by name, and the bytes that each rank passes in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
            tensors = next(
                given[name] for name in ("input", "input_tensor", "tensors", "input_tensors") if name in given
            )
            flat = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
            self.calls.append((op._schema.name.removeprefix("c10d::"), sum(t.nbytes for t in flat)))
        return op(*args, **(kwargs or {}))


def case_traffic(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in ("mean", "weighted", "median"):
        for lora in (True, False):
            model = make_model(lora=lora)
            ddp = wrap(model, world, Settings(), constant_buffers=[name for name, _ in model.named_buffers()])
            weights = WEIGHTS if method == "weighted" else None
            finish = aggregate.attach(ddp, parse_method(method), weights=weights)
            for _ in range(3):  # DDP rebuilds its buckets before the second step
                ddp.zero_grad(set_to_none=True)
                with Traffic() as traffic:
                    backward(ddp, [0, 1, 2], 1.0)
                    finish(target_tokens=1, factor=1.0)
            trainable = sum(p.numel() * p.element_size() for _, p in named(model))
            found[f"{method} {'lora' if lora else 'full'}"] = {"calls": traffic.calls, "gradient_bytes": trainable}
    return found


# Shares ---------------------------------------------------------------------------------------------------------------


def case_adaptive(world: World) -> dict[str, Any]:
    """Rank 0 is eight times slower than the others: it gets fewer samples, and training still matches one process."""
    global_batch = 12
    model, alone = make_model(), make_model()
    ddp = wrap(model, world, Settings())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (model, alone)]
    adaptive = AdaptiveShares(world.size, global_batch=global_batch, window=2)
    found: dict[str, Any] = {"shares": [], "gradients": [], "losses": []}
    for step in range(6):
        ids = np.arange(global_batch) + step
        weights, total = adaptive.weights_at(step), target_tokens(ids)
        mine = [int(part[0]) for part in shards(ids, world.size, micro_batch=1, weights=weights)[world.rank]]
        loss = backward(ddp, mine, world.size / total)
        seconds = len(mine) * (8.0 if world.rank == 0 else 1.0)  # a real clock would also measure other load
        gathered = world.gather([loss, float(target_tokens(mine)), seconds])
        adaptive.observe(step, gathered[:, 1].tolist(), gathered[:, 2].tolist())
        expected = {name: gradient / total for name, gradient in summed_gradients(alone, ids).items()}
        with torch.no_grad():
            whole = sum(float(loss_sum(alone, int(index))) for index in ids)
        for name, parameter in named(alone):
            parameter.grad = expected[name]
        found["losses"].append(abs(float(gathered[:, 0].sum()) - whole) / whole)
        found["gradients"].append(difference(own_gradients(model), expected))
        found["shares"].append(weighted_shares(global_batch, weights))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    found["weights"] = difference(*({n: p.detach() for n, p in named(each)} for each in (model, alone)))
    return found


# Copies ---------------------------------------------------------------------------------------------------------------


def final_norm(model: LossModel) -> nn.Parameter:
    weight: nn.Parameter = model.model.model.norm.weight
    return weight


def flip_last_bit(model: LossModel, rank: int) -> None:
    if rank == 2:
        model.model.model.layers[1].mlp.up_proj.weight.data.view(torch.int32)[3, 5] ^= 1


def swap_two_values(model: LossModel, rank: int) -> None:
    final_norm(model).grad = torch.arange(32.0)
    if rank == 1:
        final_norm(model).grad[[4, 9]] = torch.tensor([9.0, 4.0])


def lose_a_gradient(model: LossModel, rank: int) -> None:
    if rank == 0:
        final_norm(model).grad = None


def differ_everywhere(model: LossModel, rank: int) -> None:
    final_norm(model).data.fill_(rank)


def add_a_parameter(model: LossModel, rank: int) -> None:
    if rank == 1:
        model.extra = nn.Parameter(torch.ones(2))


def verdict(
    world: World, change: Callable[[LossModel, int], None], group: dist.ProcessGroup | None = None
) -> str | None:
    """Result of the consistency check after `change`."""
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 2
    change(model, world.rank)
    gradients = [(name, parameter.grad) for name, parameter in named(model)]
    try:
        check_replicas(named(model), gradients, step=3, device=world.device, group=group)
    except DriftError as err:
        return err.what
    return None


def case_consistency(world: World) -> dict[str, Any]:
    pair = dist.new_group([0, 1])
    in_pair = world.rank in (0, 1)
    return {
        "same": verdict(world, lambda *_: None),
        "last bit": verdict(world, flip_last_bit),
        "swapped": verdict(world, swap_two_values),
        "missing": verdict(world, lose_a_gradient),
        "every rank": verdict(world, differ_everywhere),
        "other parameters": verdict(world, add_a_parameter),
        "outside the group": verdict(world, flip_last_bit, pair) if in_pair else None,
        "inside the group": verdict(world, swap_two_values, pair) if in_pair else None,
    }


CASES = {name.removeprefix("case_"): value for name, value in list(globals().items()) if name.startswith("case_")}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    results = {name: case(world) for name, case in CASES.items()}
    results["runs"] = train_all(world, Path(sys.argv[1]))
    Path(sys.argv[1], f"rank{world.rank}.json").write_text(json.dumps(results))
    gc.collect()  # a gloo group whose last reference is DDP's reducer may never shut down (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

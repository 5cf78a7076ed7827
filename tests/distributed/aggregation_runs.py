"""Full runs on three ranks with configured gradient aggregation, and the expected values from one process."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.env import set_for_this_process
from pantheraml.base.errors import DriftError
from pantheraml.base.event_stream import EventWriter
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.order import step_samples
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.engine.step.feed import StepBatches, read_batch
from pantheraml.engine.step.step import Stepper
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.layout import make_layout
from pantheraml.parallel.process_group import World
from pantheraml.parallel.shard_batch import Ids, shards
from pantheraml.specs.faults import fail_at
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model, open_data, train_rank
from tests import toy
from tests.harness import make_plan, make_run, merged, seed_with, silent

RANKS, BATCH, BAD_RANK = 3, 9, 1
BAD_ROW = 7
WEIGHTS = [3.0, 1.0, 0.5]
LEAVE_OUT = {"leave_out_nonfinite": True}

RUNS: Mapping[str, Mapping[str, Any]] = {
    "median": {"parallel": {"aggregation": "median"}},
    "weighted": {"parallel": {"aggregation": "weighted", "aggregation_weights": WEIGHTS}},
    "a fault that passes": {"parallel": LEAVE_OUT},
    "a fault that stays": {"parallel": LEAVE_OUT, "model": "poisoned"},
    # any loss above its mean is a spike, and weights do not change
    "spike": {
        "stability": {"spike_warmup_steps": 2, "spike_zscore": 1e-9},
        "train": {"learning_rate": 1e-12, "max_steps": 6},
    },
    "drift": {"parallel": {"check_every": 1}, "train": {"max_steps": 4}},
    # shares follow the measurements of ten steps
    "slow": {"parallel": {"batch_shares": "adaptive"}, "train": {"max_steps": 14}},
}

FAULTS = {"a fault that passes": fail_at(BAD_RANK, 1, "nan")}


def write_inputs(root: Path) -> None:
    """Write models and data, and create a folder for every run."""
    rows = toy.arithmetic(40)
    rows[BAD_ROW]["prompt"] += toy.RARE
    toy.write_jsonl(root / "data.jsonl", rows)
    toy.write_llama(root / "model")
    toy.write_poisoned_llama(root / "poisoned")
    for name, changes in RUNS.items():
        config = config_of(root, **changes)
        make_run(root / name, config, make_plan(config, world=RANKS, micro=2))


def config_of(root: Path, *, model: str = "model", **changes: Any) -> TrainConfig:
    """The bad sample is in the first step."""
    fixed = _fixed(root, model)
    made = TrainConfig.model_validate(merged(fixed, changes))
    train = made.train.model_copy(update={"seed": _seed(root)})
    return made.model_copy(update={"train": train})


def _fixed(root: Path, model: str) -> dict[str, Any]:
    return {
        "model": {"path": str(root / model)},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "packing": False, "cache_dir": str(root / "cache")},
        "method": {"kind": "lora", "rank": 4},
        "train": {"global_batch_size": BATCH, "max_steps": 2, "learning_rate": 1e-2},
    }


@functools.cache
def _seed(root: Path) -> int:
    return seed_with(TrainConfig.model_validate(_fixed(root, "model")), BAD_ROW, step=0)


# In every rank --------------------------------------------------------------------------------------------------------


def train_all(world: World, root: Path) -> dict[str, str | None]:
    """Errors that the runs ended with on this rank."""
    layout = make_layout(ParallelDims(replicate=world.size), "cpu")
    here = World(world.rank, world.size, world.device, dist.new_group(backend="gloo"), layout)
    ends: dict[str, str | None] = {}
    for name in RUNS:
        run = RunDir(root / name)
        set_for_this_process("PANTHERAML_FAULTS", FAULTS.get(name, ""))
        trouble = TROUBLE[name]() if name in TROUBLE and world.rank == BAD_RANK else nullcontext()
        with EventWriter(run.path, rank=world.rank) as events, trouble:
            try:
                emit = events if world.is_main else silent
                train_rank(run, run.config(), run.plan(), here, emit, StopFlag(run.stop_file))
                ends[name] = None
            except DriftError as err:
                ends[name] = err.what
    return ends


@contextmanager
def drifting() -> Iterator[None]:
    """Change one weight after the second optimizer step."""
    taken = [0]

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        taken[0] += 1
        if taken[0] == 2:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[0] += 1e-6

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def slowed() -> Iterator[None]:
    """Slow down every decoder layer, by far more than other load could."""
    begun = [0.0]

    def before_forward(module: nn.Module, args: Any) -> None:
        if isinstance(module, GradientCheckpointingLayer):
            begun[0] = time.perf_counter()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, GradientCheckpointingLayer):
            time.sleep(max(0.1, 20 * (time.perf_counter() - begun[0])))

    handles = [register_module_forward_pre_hook(before_forward), register_module_forward_hook(after_forward)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


TROUBLE = {"drift": drifting, "slow": slowed}
"""Faults of the bad rank."""


# In one process -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """One rank's share of a step."""

    samples: list[int]
    tokens: int
    loss: float
    """Loss per token, like the gradient."""
    gradient: Tensor


def shares_of(root: Path, name: str, step: int) -> list[Share]:
    """Compute the ranks' shares one after another in one process, with the initial weights of the run."""
    run = RunDir(root / name)
    config, (data, _) = run.config(), open_data(run)
    alone, plan = World(0, 1, torch.device("cpu")), make_plan(config, micro=2)
    stepper = Stepper(build_model(config, plan, alone, silent), config, alone, plan).setup()
    ids = step_samples(data.fingerprint, config.train.seed, len(data), BATCH, step - 1, None)
    return [share_of(stepper, data, part) for part in shards(ids, RANKS, micro_batch=2)]


def share_of(stepper: Stepper, data: TokenDataset, parts: list[Ids]) -> Share:
    samples = [int(sample) for part in parts for sample in part]
    tokens = int(data.target_tokens(torch.tensor(samples).numpy()).sum())
    batches = [read_batch(data, part, stepper.world) for part in parts]
    report = stepper.backward(StepBatches(parts[0], tokens, batches, parts), stop_requested=False)
    gradient = torch.cat([part.grad.flatten() for _, part in stepper.parts if part.grad is not None])
    stepper.clear_gradients()
    return Share(samples, tokens, report.numbers.loss, gradient)


def weighted_norm(shares: Sequence[Share], weights: Sequence[float]) -> float:
    masses = [share.tokens * weight for share, weight in zip(shares, weights, strict=True)]
    total = torch.stack([mass * share.gradient for mass, share in zip(masses, shares, strict=True)]).sum(0)
    return float(total.norm()) / sum(masses)


def median_norm(shares: Sequence[Share]) -> float:
    return float(torch.stack([share.gradient for share in shares]).median(dim=0).values.norm())


def poisoned_sample(root: Path) -> int:
    run = RunDir(root / "a fault that stays")
    data, _ = open_data(run)
    (token,) = load_tokenizer(run.config().model).encode(toy.RARE)
    (bad,) = [index for index in range(len(data)) if token in data.sequence(index).input_ids]
    return bad

"""Rank script of test_guard: every case for a given world size, in one process group."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.errors import DriftError
from pantheraml.base.event_stream import EventWriter
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.guard.decide import StepJudge
from pantheraml.engine.guard.incident import culprit, gather_evidence, investigate
from pantheraml.engine.guard.nan_origin import find_nan_operation
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.engine.step.feed import Feed, StepBatches
from pantheraml.engine.step.step import Stepper
from pantheraml.engine.trial import Trial, difference, trial
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.consistency import replica_groups
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model, train_rank
from tests import toy
from tests.distributed.layouts import layout_of
from tests.harness import make_plan, make_run, merged, silent

MODES = {
    "ddp x2": ParallelDims(replicate=2),
    "fsdp x2": ParallelDims(shard=2),
    "tp x2": ParallelDims(tensor=2),
    "pp x2": ParallelDims(pipeline=2),
    "fsdp 2 x tp 2": ParallelDims(shard=2, tensor=2),
    "cp x2": ParallelDims(context=2),
}
TWO = ("ddp x2", "fsdp x2", "tp x2", "pp x2")
STEPS = 3

# Each is set to clip strongly in every step after the first.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "value": {"clip_value": 1e-3},
    "norm": {},
    "adaptive": {"clip_weight_ratio": 1e-3},
    "percentile": {"clip_percentile": 5},
    "zclip": {"clip_zscore": 1e-3},
    "adagc": {"clip_growth": 0.5},
}
LEARNERS = ("zclip", "adagc")
CASES = [
    *((mode, kind) for mode in (*TWO, "fsdp 2 x tp 2") for kind in ("adaptive", "adagc")),
    # The rest use only values or the global norm, which other tests compare in every mode.
    *(("fsdp x2", kind) for kind in ("value", "norm", "percentile")),
    ("pp x2", "zclip"),
]


def config_of(root: Path, model: str = "qwen3", **changes: dict[str, Any]) -> TrainConfig:
    """The model has tied embeddings, which two pipeline stages hold."""
    base = {
        "model": {"path": str(root / model)},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "packing": False, "cache_dir": str(root / "cache")},
        "method": {"kind": "full"},
        "train": {"global_batch_size": 7, "max_steps": STEPS, "learning_rate": 1e-2, "max_grad_norm": 0.02},
    }
    return TrainConfig.model_validate(merged(base, changes))


def write_inputs(root: Path) -> None:
    rows = toy.arithmetic(40)
    rows[7]["prompt"] += toy.RARE
    toy.write_jsonl(root / "data.jsonl", rows)
    toy.write_qwen3(root / "qwen3")
    toy.write_llama(root / "llama")
    toy.write_poisoned_llama(root / "poisoned")


def dataset_of(config: TrainConfig) -> TokenDataset:
    return TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)


def clipped(kind: str, mode: str | None, root: Path, world: World) -> Trial:
    config = config_of(root, stability={"clipping": kind, "clip_warmup_steps": 1, **KINDS[kind]})
    dims = ParallelDims() if mode is None else MODES[mode]
    here = World(0, 1, world.device) if mode is None else replace(world, layout=layout_of(dims, "cpu"))
    plan = make_plan(config, dims=dims, micro=4)
    return trial(build_model(config, plan, here, silent), config, plan, here, dataset_of(config), steps=STEPS)


def guard_states(kind: str, mode: str, root: Path, world: World) -> list[dict[str, Any]]:
    """Guard state of every rank after two steps."""
    config = config_of(root, stability={"clipping": kind, "clip_warmup_steps": 1, **KINDS[kind]})
    dims = MODES[mode]
    here = replace(world, layout=layout_of(dims, "cpu"))
    plan = make_plan(config, dims=dims, micro=4)
    stepper = Stepper(build_model(config, plan, here, silent), config, here, plan).setup()
    with Feed(dataset_of(config), here, seed=0, global_batch=7, micro_batch=4, limit=None) as feed:
        for step in range(2):
            report = stepper.backward(feed.step(step), stop_requested=False)
            stepper.guard.policy.decide(report.numbers, loss_scale=None)
            stepper.apply(report.numbers, 1e-2)
    state = stepper.guard.to_state()
    stepper.guard.from_state(state)
    assert stepper.guard.to_state() == state
    return gathered(state, world)


def poisoned(mode: str, root: Path, world: World) -> dict[str, Any]:
    """Run up to the step with the bad sample; its non-finite gradient values are then zeroed."""
    config = config_of(root, "poisoned", method={"kind": "lora", "rank": 4}, stability={"on_nonfinite": "zero"})
    dims, data = MODES[mode], dataset_of(config)
    here = replace(world, layout=layout_of(dims, "cpu"))
    plan = make_plan(config, dims=dims, micro=2)
    stepper = Stepper(build_model(config, plan, here, silent), config, here, plan).setup()
    stepper.model.train()
    (token,) = load_tokenizer(config.model).encode(toy.RARE)
    (bad,) = [index for index in range(len(data)) if token in data.sequence(index).input_ids]
    with Feed(data, here, seed=0, global_batch=7, micro_batch=2, limit=None) as feed:
        step = next(number for number in range(6) if bad in feed.samples(number))
        batches = feed.step(step)
        report = stepper.backward(batches, stop_requested=False)
        verdict = stepper.guard.policy.decide(report.numbers, loss_scale=None)
        findings = investigate(stepper, batches)
        stepper.apply(report.numbers, 1e-2, zero_nonfinite=verdict.action == "zero")
        after = stepper.backward(feed.step(step + 1), stop_requested=False)
    found = culprit(findings)
    assert found is not None
    return {
        "bad": bad,
        "holders": gathered(bad in [int(i) for ids in batches.own_samples for i in ids], world),
        "verdicts": gathered(asdict(verdict), world),
        "culprit": asdict(found),
        "culprits": gathered(asdict(found), world),
        "finite": gathered(all(bool(part.isfinite().all()) for _, part in stepper.parts), world),
        "finite next": after.numbers.finite,
    }


def retried(mode: str, root: Path, world: World) -> dict[str, Any]:
    """Steps in which a layer of rank 1 outputs NaN once, against the same steps without it."""
    events: list[dict[str, Any]] = []
    disturbed = _retried(mode, root, world, events, at=1)
    undisturbed = _retried(mode, root, world, events, at=None)
    return {"events": gathered(events, world), "equal": gathered(torch.equal(disturbed, undisturbed), world)}


def _retried(mode: str, root: Path, world: World, events: list[dict[str, Any]], *, at: int | None) -> Tensor:
    """Weights of this rank after the last step."""
    stepper, judge, feed = _judged(mode, root, world, events)
    layer = next(module for module in stepper.model.modules() if isinstance(module, GradientCheckpointingLayer))
    with feed:
        for step in range(STEPS):
            _take(stepper, judge, feed, step, once_nan(layer) if step == at and world.rank == 1 else nullcontext())
    return torch.cat([part.detach().flatten() for _, part in stepper.parts])


def _judged(
    mode: str, root: Path, world: World, events: list[dict[str, Any]], precision: str = "fp32", **changes: Any
) -> tuple[Stepper, StepJudge, Feed]:
    """Stepper and judge of an adapter; events are appended to `events`."""
    config = config_of(root, "llama", method={"kind": "lora", "rank": 4, "dropout": 0.2}, **changes)
    dims = MODES[mode]
    here = replace(world, layout=layout_of(dims, "cpu"))
    plan = make_plan(config, dims=dims, micro=2, precision=precision)
    torch.manual_seed(here.layout.data_rank)
    stepper = Stepper(build_model(config, plan, here, silent), config, here, plan).setup()
    stepper.model.train()
    judge = StepJudge(stepper, RunDir(root), lambda event: events.append(event.model_dump()), about={}, keeps=True)
    return stepper, judge, Feed(dataset_of(config), here, seed=0, global_batch=7, micro_batch=2, limit=None)


def _take(
    stepper: Stepper, judge: StepJudge, feed: Feed, step: int, during: AbstractContextManager[None] | None = None
) -> None:
    batches = feed.step(step)
    with during or nullcontext():
        norms = stepper.guard.groups.due(step + 1)
        report = stepper.backward(batches, stop_requested=False, group_norms=norms)
    verdict, report = judge.judge(step + 1, batches, report, checkpoint=None)
    if verdict.action == "skip":
        stepper.skip()
    else:
        stepper.apply(report.numbers, 1e-2)


@contextmanager
def once_nan(layer: nn.Module) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda module, args, output: output * math.nan)
    try:
        yield
    finally:
        handle.remove()


# fp16 -----------------------------------------------------------------------------------------------------------------


def in_fp16(mode: str, root: Path, world: World) -> dict[str, Any]:
    """Steps in the second of which gradients of rank 1 are NaN: in the first passes, in all, or in none."""
    found: dict[str, Any] = {}
    for name, passes in (("never", 0), ("once", 1), ("always", 100)):
        events: list[dict[str, Any]] = []
        stepper, judge, feed = _judged(mode, root, world, events, precision="fp16", stability={"on_nonfinite": "skip"})
        stepper.scaler.scale(torch.ones(()))  # makes its tensors
        stepper.set_loss_scale(4.0)
        layer = next(module for module in stepper.model.modules() if isinstance(module, GradientCheckpointingLayer))
        with feed:
            for step in range(STEPS):
                with nan_gradients(layer, 2 * passes) if step == 1 and world.rank == 1 else nullcontext():
                    _take(stepper, judge, feed, step)
        weights = torch.cat([part.detach().flatten() for _, part in stepper.parts])
        verdicts = [(event["anomaly"], event["action"]) for event in events if event["kind"] == "verdict"]
        found[name] = {"weights": weights, "verdicts": verdicts, "scale": stepper.loss_scale}
    return {
        "equal": gathered(torch.equal(found["never"]["weights"], found["once"]["weights"]), world),
        "skipped": gathered(not torch.equal(found["never"]["weights"], found["always"]["weights"]), world),
        "finite": gathered(bool(found["always"]["weights"].isfinite().all()), world),
        "verdicts": gathered({name: case["verdicts"] for name, case in found.items()}, world),
        "scales": gathered([case["scale"] for case in found.values()], world),
    }


@contextmanager
def nan_gradients(layer: nn.Module, passes: int) -> Iterator[None]:
    """Make the layer's gradient NaN in the next `passes` passes."""
    left = [passes]

    def spoil(gradient: Tensor) -> Tensor:
        left[0] -= 1
        return gradient * math.nan if left[0] >= 0 else gradient

    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(spoil)

    handle = layer.register_forward_hook(after_forward)
    try:
        yield
    finally:
        handle.remove()


# Clean steps ----------------------------------------------------------------------------------------------------------

OFF = {"clipping": "none", "on_spike": "ignore"}
LOOSE: Mapping[str, Mapping[str, Any]] = {
    "global_norm": {},
    "value": {"clip_value": 1e6},
    "adagc": {"clip_warmup_steps": 1, "clip_growth": 1e6},
}


def clean(mode: str, root: Path, world: World) -> dict[str, list[bool]]:
    """Whether weights are bit-equal to those of steps without a guard, on every rank."""
    bare = _clean(mode, root, world, OFF)
    guarded = {kind: _clean(mode, root, world, {"clipping": kind, **settings}) for kind, settings in LOOSE.items()}
    return {kind: gathered(torch.equal(bare, weights), world) for kind, weights in guarded.items()}


def _clean(mode: str, root: Path, world: World, stability: Mapping[str, Any]) -> Tensor:
    stepper, judge, feed = _judged(mode, root, world, [], stability=stability, train={"max_grad_norm": 1e6})
    with feed:
        for step in range(STEPS):
            _take(stepper, judge, feed, step)
    return torch.cat([part.detach().flatten() for _, part in stepper.parts])


# Collectives of a step ------------------------------------------------------------------------------------------------


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives of this process, by operator name and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor op first decomposes into plain tensors and collectives
        if func.namespace in ("c10d", "_c10d_functional"):
            kinds = {str(leaf.dtype) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
            self.counts[" ".join([func.name().partition(".")[0], *sorted(kinds)])] += 1
        return func(*args, **(kwargs or {}))


def group_norms(mode: str | None, root: Path, world: World, *, every: int) -> dict[str, Any]:
    """Group norms after the passes of a step, and the collectives of a full step."""
    config = config_of(root, stability={"group_norms_every": every})
    dims = ParallelDims() if mode is None else MODES[mode]
    here = World(0, 1, world.device) if mode is None else replace(world, layout=layout_of(dims, "cpu"))
    plan = make_plan(config, dims=dims, micro=4)
    stepper = Stepper(build_model(config, plan, here, silent), config, here, plan).setup()
    events: list[dict[str, Any]] = []
    judge = StepJudge(stepper, RunDir(root), lambda event: events.append(event.model_dump()), about={}, keeps=True)
    with Feed(dataset_of(config), here, seed=0, global_batch=7, micro_batch=4, limit=None) as feed:
        _take(stepper, judge, feed, 0)  # skip the first step, in which DDP and pipelines initialize
        with CollectiveCounter() as exchanges:
            _take(stepper, judge, feed, 1)
    return {"groups": [event["groups"] for event in events], "exchanges": exchanges.counts}


# Joint findings -------------------------------------------------------------------------------------------------------


def joint_findings(mode: str, root: Path, world: World) -> dict[str, Any]:
    """Findings about a step in which only rank 1 is faulty."""
    stepper, _, feed = _judged(mode, root, world, [], parallel={"check_every": 1})
    with feed:
        batches = feed.step(0)
    stepper.backward(batches, stop_requested=False)
    found: dict[str, Any] = {"in step": _drift(stepper, world)}
    for group, names in replica_groups(stepper.parameters, stepper.world.layout):
        part = dict(stepper.parts)[min(names)]
        if world.rank == 1:
            part.data.view(-1)[0] += 1e-6
        found.setdefault("drift", {})[min(names)] = [dist.get_world_size(group), _drift(stepper, world)]
        if world.rank == 1:
            part.data.view(-1)[0] -= 1e-6
    name, last = stepper.parts[-1]
    last_names = gathered(name, world)
    for anomaly, value in (("jump", 1e6), ("nonfinite", math.nan)):
        if world.rank == 1:
            assert last.grad is not None
            last.grad.view(-1)[0] = value
        evidence = gather_evidence(stepper.parts, batches, anomaly, stepper.world)  # type: ignore[arg-type]
        found[anomaly] = gathered(evidence.tensor, world)
    found["expected"] = last_names[1]
    found["operation"] = gathered(_bad_operation(stepper, batches, world), world)
    return found


def _drift(stepper: Stepper, world: World) -> list[str | None]:
    try:
        stepper.check_replicas(1)
    except DriftError as err:
        return gathered(err.what, world)
    return gathered(None, world)


def _bad_operation(stepper: Stepper, batches: StepBatches, world: World) -> str | None:
    layer = next(module for module in stepper.model.modules() if isinstance(module, GradientCheckpointingLayer))
    handle = layer.register_forward_hook(lambda module, args, output: BadGradient.apply(output))
    if world.rank != 1:
        handle.remove()
    try:
        return find_nan_operation(stepper, batches)
    finally:
        handle.remove()


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


def rollback_run(root: Path, name: str, dims: ParallelDims) -> RunDir:
    """A run that reaches the bad sample after it has saved checkpoints."""
    config = config_of(
        root,
        "poisoned",
        method={"kind": "lora", "rank": 4},
        train={"max_steps": 7, "max_grad_norm": 1.0},
        stability={"on_nonfinite": "roll_back"},
        checkpoint={"every_steps": 1, "keep": 5},
    )
    return make_run(root / name, config, make_plan(config, dims=dims, micro=2))


def rolled_back(mode: str, root: Path, world: World) -> None:
    run = RunDir(root / f"roll back {mode}")
    here = replace(world, layout=layout_of(MODES[mode], "cpu"))
    with EventWriter(run.path, rank=world.rank) as events:
        train_rank(run, run.config(), run.plan(), here, events if world.is_main else silent, StopFlag(run.stop_file))


def gathered(value: Any, world: World) -> list[Any]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    torch.set_num_threads(1)
    root, size = Path(sys.argv[1]), int(sys.argv[2])
    results: dict[str, Any] = {}
    references: dict[str, Trial] = {}
    with open_world(make_plan(config_of(root), world=size), timeout_seconds=300) as world:
        for mode, kind in (case for case in CASES if MODES[case[0]].world_size == size):
            if world.is_main and kind not in references:
                references[kind] = clipped(kind, None, root, world)
            world.wait_for_main()
            found = clipped(kind, mode, root, world)
            if world.is_main:
                results[f"{mode} {kind}"] = asdict(difference(found, references[kind]))
        if size == 2:
            for mode in TWO:
                results[f"{mode} poisoned"] = poisoned(mode, root, world)
                results[f"{mode} retried"] = retried(mode, root, world)
                for every in (0, 1):
                    own = group_norms(mode, root, world, every=every)
                    results[f"{mode} group_norms {every}"] = gathered(own, world)
            if world.is_main:
                results["alone group_norms"] = group_norms(None, root, world, every=1)
            world.wait_for_main()
            for mode in ("ddp x2", "fsdp x2"):
                results[f"{mode} fp16"] = in_fp16(mode, root, world)
                results[f"{mode} clean"] = clean(mode, root, world)
            for mode in (*TWO, "cp x2"):
                results[f"{mode} joint findings"] = joint_findings(mode, root, world)
            rolled_back("fsdp x2", root, world)
            for kind in LEARNERS:
                results[f"guard_states {kind}"] = {
                    mode: guard_states(kind, mode, root, world) for mode in ("fsdp x2", "pp x2")
                }
        if world.is_main:
            (root / f"results-{size}.json").write_text(json.dumps(results))
        world.wait_for_main()


if __name__ == "__main__":
    main()

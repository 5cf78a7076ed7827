"""Plans to compare: parallelism, checkpointing, micro-batch and frozen weights, where the user left them open.

The rules of `choose` give the first one, which was measured where anything was. Others take its place only if it does
not fit into memory, or if they are clearly faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import PantheraError
from pantheraml.planner.choose import choose
from pantheraml.planner.decided import Decided
from pantheraml.planner.facts import DeviceFacts, ModelFacts
from pantheraml.planner.layer_sizes import layer_sizes
from pantheraml.planner.memory import predict_memory
from pantheraml.planner.model_shapes import ModelShapes
from pantheraml.planner.setting import Setting, setting_of
from pantheraml.planner.step_time import StepTime, TimeInputs, least_seconds, predict_time
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.parallel import DIMENSIONS, ParallelDims
from pantheraml.specs.plan import DeviceSpec, Plan
from pantheraml.specs.prediction import MemoryPrediction
from pantheraml.specs.train import Checkpointing, MethodConfig, TrainConfig

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full", "offload")
"""From the fastest to the leanest."""
SAFE_SHARE = 0.95
"""Fraction of the memory that a chosen plan may be predicted to need, since predictions err."""
DEGREES = (2, 4, 8, 16)
MANY_NODES = 16
"""Weights are rather not gathered over more nodes than these, if replicas of shards are an alternative."""


@dataclass(frozen=True)
class Problem:
    """A run to plan, and what is known for predicting it."""

    config: TrainConfig
    devices: DeviceSpec
    place: ProcessRank | None
    shapes: ModelShapes
    model: ModelFacts
    hardware: DeviceFacts

    @property
    def capability(self) -> tuple[int, int] | None:
        """The oldest; None: that of one is not known."""
        found = [gpu.compute_capability for gpu in self.devices.gpus]
        known = [each for each in found if each is not None]
        return min(known) if known and len(known) == len(found) else None

    def memory(self, setting: Setting) -> MemoryPrediction | None:
        capacity = self.hardware.capacity_bytes
        return predict_memory(self.shapes, setting, capacity_bytes=capacity, capability=self.capability)

    @cached_property
    def time_inputs(self) -> tuple[TimeInputs | None, TimeInputs | None]:
        """Inputs with known rates, and with peaks."""
        sizes = layer_sizes(self.shapes)
        trained = count_trained(self.config.method, self.shapes)
        hardware = self.hardware
        known, bounds = (
            None if rates is None or sizes is None else TimeInputs(sizes, self.shapes.parameters, trained, rates, links)
            for rates, links in ((hardware.rates, hardware.links), (hardware.bounds, hardware.bound_links))
        )
        return known, bounds

    def plan(self, decided: Decided) -> Plan | None:
        """None: the rules do not allow it."""
        try:
            return choose(self.config, self.devices, self.place, decided)
        except PantheraError:
            return None


@dataclass
class Candidate:
    """A plan with its predictions; memory is predicted when somebody asks."""

    problem: Problem
    decided: Decided
    plan: Plan
    setting: Setting
    time: StepTime | None
    ranking_seconds: float
    """Seconds to compare by: predicted, or the same from data-sheet peaks; 0: not known."""
    _memory: tuple[MemoryPrediction | None] | None = None

    @property
    def memory(self) -> MemoryPrediction | None:
        if self._memory is None:
            self._memory = (self.problem.memory(self.setting),)
        return self._memory[0]

    @property
    def looked_at(self) -> bool:
        """Whether its memory has been predicted."""
        return self._memory is not None

    @property
    def fits(self) -> bool | None:
        return fits(self.memory)

    @property
    def least_seconds(self) -> float | None:
        """Seconds of a step at the data sheet's peaks; None: not known."""
        peaks = self.problem.time_inputs[1]
        return None if peaks is None else least_seconds(self.setting, peaks)

    @property
    def parallel_effort(self) -> int:
        """How much parallelism asks of links and model: the less, the fewer ways to be slower than predicted."""
        dims, node = self.setting.dims, self.problem.hardware.links.ranks_per_node
        used = sum(degree > 1 for degree in dims.degrees)
        far = 2 * (dims.shard > node) + 2 * (dims.shard > MANY_NODES * node)
        return used + 3 * (dims.world_size > dims.data) + (dims.shard > 1) + far

    @property
    def effort(self) -> tuple[int, int, int]:
        """Tie-breakers: simple parallelism, little recomputation, large micro-batches."""
        mode = CHECKPOINTING.index(self.setting.activation_checkpointing)
        return self.parallel_effort, mode, -self.setting.micro_batch


def fits(memory: MemoryPrediction | None) -> bool | None:
    """Whether it fits with a margin; None: not known."""
    if memory is None or memory.capacity_bytes is None:
        return None
    return needed_bytes(memory) <= SAFE_SHARE * memory.capacity_bytes


def needed_bytes(memory: MemoryPrediction) -> int:
    """Memory of the device that a run needs; of a plan that an older version made, what was known then."""
    return memory.allocated_bytes if memory.device_bytes is None else memory.device_bytes


def candidate(problem: Problem, decided: Decided) -> Candidate | None:
    plan = problem.plan(decided)
    return None if plan is None else of_plan(problem, decided, plan)


def of_plan(problem: Problem, decided: Decided, plan: Plan) -> Candidate:
    setting = setting_of(problem.config, plan)
    return _timed(problem, decided, plan, setting)


def _timed(problem: Problem, decided: Decided, plan: Plan, setting: Setting) -> Candidate:
    known, bounds = problem.time_inputs
    foreign = problem.model.why_other_kernels(fused=setting.fused)
    time = None if known is None or foreign is not None else predict_time(setting, known)
    bound = None if bounds is None else predict_time(setting, bounds)
    ranked = time or bound
    return Candidate(problem, decided, plan, setting, time, 0.0 if ranked is None else ranked.seconds)


def with_micro_batch(found: Candidate, size: int) -> Candidate:
    """The same plan with other micro-batches, without asking the rules again."""
    share = math.ceil(found.plan.global_batch_size / found.plan.dims.data)
    setting = found.setting.model_copy(update={"micro_batch": size, "accumulation": math.ceil(share / size)})
    decided = Decided(found.decided.dims, found.decided.checkpointing, size, found.decided.frozen_weights)
    return _timed(found.problem, decided, found.plan, setting)


def alternatives_to(base: Candidate, *, quantized: bool = False) -> Iterator[Candidate]:
    """Every other plan that the configuration leaves open. `quantized`: those with frozen weights in 4 bits."""
    problem = base.problem
    formats: tuple[Literal["int8", "nf4"] | None, ...] = ("nf4",) if quantized else (base.decided.frozen_weights,)
    if quantized and not may_quantize(problem.config, base.setting):
        return
    for dims in _dims(problem, base.plan):
        for mode in _modes(problem.config):
            for frozen in formats:
                decided = Decided(
                    dims=None if dims == base.plan.dims else dims,
                    checkpointing=None if mode == base.setting.activation_checkpointing else mode,
                    frozen_weights=frozen,
                )
                found = candidate(problem, decided)
                if found is not None and found.plan.world_size == base.plan.world_size:
                    yield from _micro_batches(found)


def count_trained(method: MethodConfig, shapes: ModelShapes) -> int:
    """Parameters that the method trains."""
    return shapes.parameters if method.kind == "full" else shapes.lora_parameters(method.rank, method.target_modules)


def may_quantize(config: TrainConfig, setting: Setting) -> bool:
    return config.model.precision == "auto" and config.method.kind == "lora" and setting.frozen_weights != "nf4"


def _modes(config: TrainConfig) -> tuple[Checkpointing, ...]:
    mode = config.train.activation_checkpointing
    return CHECKPOINTING if mode == "auto" else (mode,)


def _micro_batches(found: Candidate) -> Iterator[Candidate]:
    yield found
    size, dims = found.setting.micro_batch, found.setting.dims
    share = math.ceil(found.plan.global_batch_size / dims.data)
    auto = found.problem.config.train.micro_batch_size == "auto"
    if auto and found.setting.method == "full" and dims.shard > 1 and share > size:
        yield with_micro_batch(found, share)  # gradients of several passes would be summed before they are sharded
    while auto and size > 1:
        size = (size + 1) // 2
        yield with_micro_batch(found, size)


def is_open(config: TrainConfig) -> bool:
    """Whether the configuration leaves the parallel degrees open."""
    parallel = config.parallel
    free = parallel.mode is MultiGPUMode.AUTO and all(getattr(parallel, name) is None for name in DIMENSIONS)
    return free and parallel.batch_shares == "even" and parallel.aggregation == "mean"


def _dims(problem: Problem, plan: Plan) -> list[ParallelDims]:
    """Parallel degrees that use all processes, the planned ones first."""
    n = plan.world_size
    if n == 1 or not is_open(problem.config):
        return [plan.dims]
    node, heads = problem.hardware.links.ranks_per_node, problem.model.heads_divide
    found = [plan.dims, ParallelDims(replicate=n), ParallelDims(shard=n)]
    shards = [size for size in (node, *(node * k for k in DEGREES), *DEGREES) if 1 < size < n and n % size == 0]
    found += [ParallelDims(replicate=n // size, shard=size) for size in shards]
    for degree in (each for each in DEGREES if n % each == 0):
        if degree <= node and heads % degree == 0:
            found += [
                ParallelDims(replicate=n // degree, tensor=degree),
                ParallelDims(shard=n // degree, tensor=degree),
            ]
            found += [ParallelDims(shard=n // degree, context=degree)]
        found.append(ParallelDims(replicate=n // degree, pipeline=degree))
    batch = problem.config.train.global_batch_size
    return [dims for dims in dict.fromkeys(found) if dims.data <= batch]

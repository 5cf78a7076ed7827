"""Profile of a few training steps: the phases of a step, the work of the device by kind, the slowest operators.

The steps are those of a run with the same config. Phases are wall-clock time of the host, which waits for the device at
the end of each; the rest comes from torch.profiler, whose own cost is in the figures (a few percent on a GPU, more for
small operators on a CPU).
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.compile import compile_layers
from pantheraml.engine.optim.schedule import learning_rate
from pantheraml.engine.step.step import Stepper
from pantheraml.engine.trial import trial_feed
from pantheraml.parallel.process_group import World
from pantheraml.specs.plan import Plan
from pantheraml.specs.tasks import ProfileResult, ProfileRow
from pantheraml.specs.train import TrainConfig

SLOWEST = 12
"""Operators that are listed."""

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("c10d::", "nccl", "gloo:", "allreduce", "all_gather", "reduce_scatter")),
    ("attention", ("scaled_dot_product", "attention", "flash", "fmha")),
    ("optimizer", ("adam", "_foreach_", "optimizer", "multi_tensor_apply", "clip_grad")),
    ("matmuls", ("mm", "matmul", "linear", "gemm", "cutlass", "cublas", "nvjet", "xmma")),
    ("loss and vocabulary", ("cross_entropy", "nll_loss", "log_softmax", "embedding", "index_add")),
    ("norms", ("norm",)),
    ("copies and memory", ("copy", "memcpy", "memset", "clone", "cat", "fill_", "zero", "empty", "resize", "to_")),
)
"""Kinds of work by words in the names of operators and kernels, in order; the rest is elementwise and other."""
REST = "elementwise and other"


def profile_steps(
    model: nn.Module,
    config: TrainConfig,
    plan: Plan,
    world: World,
    dataset: TokenDataset,
    *,
    steps: int,
    warmup: int,
    trace: Path | None,
) -> ProfileResult | None:
    """Train `warmup` steps, then `steps` under the profiler. A collective; the result is that of rank 0, else None."""
    stepper = Stepper(model, config, world, plan).setup()
    if plan.compile:
        compile_layers(model)
    model.train()
    clock = _Clock(world.device)
    tokens = 0.0
    with contextlib.ExitStack() as stack:
        feed = stack.enter_context(trial_feed(dataset, world, config, plan))
        recorded = None
        for step in range(warmup + steps):
            if step == warmup:
                clock.reset()
                if world.is_main:
                    recorded = stack.enter_context(profile(activities=_activities(world.device)))
            with clock.phase("data"):
                batches = feed.step(step)
            with clock.phase("forward and backward"):
                report = stepper.backward(batches, stop_requested=False)
            with clock.phase("update"):
                stepper.apply(report.numbers, learning_rate(config.train, step, warmup + steps))
            if step >= warmup:
                tokens += sum(rank.tokens for rank in report.ranks)
    if recorded is None:
        return None
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    events = [event for event in recorded.key_averages() if _is_work(event, world.device)]
    seconds = sum(clock.seconds.values()) / steps
    operators = _rows(((event.key, _own_seconds(event, world.device), event.count) for event in events), steps)
    return ProfileResult(
        device=world.device.type,
        precision=plan.precision,
        world_size=world.size,
        steps=steps,
        warmup=warmup,
        step_seconds=seconds,
        tokens_per_second=tokens / steps / seconds,
        memory_bytes=_most_memory(world.device),
        phases=_rows(((name, spent, steps) for name, spent in clock.seconds.items()), steps, ordered=False),
        parts=_rows(((kind_of(e.key), _own_seconds(e, world.device), e.count) for e in events), steps),
        operators=operators[:SLOWEST],
    )


class _Clock:
    """Seconds of each phase; the device has finished at the end of one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        self.seconds = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def kind_of(operator: str) -> str:
    name = operator.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), REST)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def _is_work(event: Any, device: torch.device) -> bool:
    """On a GPU, its kernels and copies; on a CPU, operators. Neither the brackets that torch puts around them, such as
    that of an optimizer's step, which the profiler repeats on the GPU's timeline."""
    if device.type == "cuda":
        return bool(event.device_type == DeviceType.CUDA) and not event.is_user_annotation
    return not event.key.startswith(("ProfilerStep", "autograd::engine", "[", "Optimizer."))


def _own_seconds(event: Any, device: torch.device) -> float:
    """Without the operators that it calls."""
    microseconds = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
    return float(microseconds) / 1e6


def _rows(measured: Iterable[tuple[str, float, int]], steps: int, *, ordered: bool = True) -> list[ProfileRow]:
    """Add up rows of one name; the largest come first."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, spent, count in measured:
        seconds[name] += spent
        calls[name] += count
    total = sum(seconds.values())
    rows = [
        ProfileRow(name=name, seconds=spent / steps, share=spent / total if total else 0.0, calls=calls[name] / steps)
        for name, spent in seconds.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds) if ordered else rows


def _most_memory(device: torch.device) -> int:
    """Since the process began: a captured step has its memory from the capture, and a replay allocates none."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""Rank script of the weak scaling benchmark: the same steps in one process and in two, by the engine and by plain DDP.

Every turn starts with a barrier, runs a few steps of one kind, and ends with the slowest process. Turns of all kinds
alternate, each round in the reverse order of the last, so that all see the same load. CPU time of a turn covers all
processes and threads; other load hardly affects it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pantheraml.base.env import process_rank
from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.step.feed import read_batch
from pantheraml.engine.step.loss import LossModel
from pantheraml.parallel.process_group import World
from pantheraml.specs.parallel import ParallelDims
from ranks.small_run import (
    Size,
    SmallRun,
    among,
    by_itself,
    config_of,
    model_of,
    opened,
    plan_of,
    prepared,
    write_inputs,
)

Turn = Callable[[], None]
"""One step of this process; a no-op if it only waits."""


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    size = Size(**request["size"])
    if request["cores"] is not None:
        _pin_to(request["cores"][process_rank().local_rank])
    with opened(2) as world:
        if world.is_main:
            write_inputs(folder, size)
        world.wait_for_main()
        answer = [_measure(folder, size, method, world, request) for method in request["methods"]]
        if world.is_main:
            (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
        world.wait_for_main()


def _pin_to(core: int) -> None:
    """Pin the process to `core`, before it has threads, which inherit the affinity."""
    os.sched_setaffinity(0, {core})


def _measure(folder: Path, size: Size, method: str, world: World, request: dict[str, Any]) -> dict[str, Any]:
    dims = ParallelDims(replicate=world.size)
    one, two = (config_of(folder, size, method, shares=shares) for shares in (1, world.size))
    single, shared = plan_of(one, ParallelDims(), micro_batch=size.batch), plan_of(two, dims, micro_batch=size.batch)
    dataset, here = prepared(one, world), by_itself(world)
    with (
        SmallRun(one, single, here, dataset) as alone,
        SmallRun(two, shared, among(world, dims), dataset) as together,
    ):
        plain_alone = _PlainLoop(LossModel(model_of(one, single, here)), dataset, size, world)
        wrapped = DistributedDataParallel(LossModel(model_of(two, shared, here)))
        plain_together = _PlainLoop(wrapped, dataset, size, world)
        turns: dict[str, Turn] = {
            "alone": alone.step if world.is_main else _wait,
            "plain_alone": plain_alone.step if world.is_main else _wait,
            "apart": alone.step,
            "together": together.step,
            "plain_together": plain_together.step,
        }
        times = _take_turns(turns, world, repeats=request["repeats"], steps=request["steps"])
    return {"method": method, "trained": plain_alone.trained, **_ratios(times)}


def _wait() -> None:
    """No-op while the other process runs alone."""


@dataclass(frozen=True)
class StepTime:
    """Time per step."""

    seconds: float
    """Wall time of the slowest process."""
    cpu_seconds: float
    """CPU time of all processes."""


def _take_turns(turns: dict[str, Turn], world: World, *, repeats: int, steps: int) -> dict[str, list[StepTime]]:
    """Times of each turn by round, without the first round."""
    times: dict[str, list[StepTime]] = {name: [] for name in turns}
    order = list(turns)
    for _ in range(repeats + 1):
        for name in order:
            world.wait_for_main()
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                turns[name]()
            mine = [(time.perf_counter() - begin) / steps, (time.process_time() - cpu) / steps]
            rows = world.gather(mine)
            times[name].append(StepTime(float(rows[:, 0].max()), float(rows[:, 1].sum())))
        order.reverse()
    return {name: found[1:] for name, found in times.items()}


def _ratios(times: dict[str, list[StepTime]]) -> dict[str, float]:
    """Medians of times and of the ratios within a round, and ratios of the fastest turns."""

    def ratios(over: str, under: str, what: str = "seconds") -> list[float]:
        return [getattr(a, what) / getattr(b, what) for a, b in zip(times[over], times[under], strict=True)]

    def fastest(over: str, under: str) -> float:
        """Ratio of the fastest turns: other load only makes turns longer, more so with two processes."""
        return min(one.seconds for one in times[over]) / min(one.seconds for one in times[under])

    against = ratios("plain_together", "together")
    return {
        "alone_seconds": statistics.median(one.seconds for one in times["alone"]),
        "together_seconds": statistics.median(one.seconds for one in times["together"]),
        "efficiency": statistics.median(ratios("alone", "together")),
        "plain_efficiency": statistics.median(ratios("plain_alone", "plain_together")),
        "machine_efficiency": statistics.median(ratios("alone", "apart")),
        "fastest_efficiency": fastest("alone", "together"),
        "fastest_plain_efficiency": fastest("plain_alone", "plain_together"),
        "fastest_machine_efficiency": fastest("alone", "apart"),
        "against_plain": statistics.median(against),
        "against_plain_spread": _spread(against),
        "cpu_against_plain": statistics.median(ratios("plain_together", "together", "cpu_seconds")),
    }


def _spread(values: list[float]) -> float:
    """Interquartile range over rounds."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


class _PlainLoop:
    """Hand-written loop on one batch: forward, backward, clip, step."""

    def __init__(self, model: nn.Module, dataset: TokenDataset, size: Size, world: World) -> None:
        self._model = model
        first = world.rank * size.batch
        ids = torch.arange(first, first + size.batch).numpy()
        self._batch = read_batch(dataset, ids, by_itself(world))
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-4, fused=True)

    @property
    def trained(self) -> int:
        return sum(parameter.numel() for parameter in self._trained)

    def step(self) -> None:
        batch = self._batch
        total = self._model(
            batch.input_ids, batch.position_ids, batch.targets, batch.boundaries, batch.max_length, batch.target_count
        )
        loss = total / batch.target_count
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.item()


if __name__ == "__main__":
    main()

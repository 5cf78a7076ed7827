"""Each process of the weak scaling benchmark: the same steps alone and together, by the engine and by plain DDP.

Every turn begins with a meeting, takes a few steps of one kind, and ends with its slowest process. Turns of all kinds
follow one another again and again, so that all see the same machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.feed import read_batch
from pantheraml.engine.loss import LossModel
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
"""One step of this process; does nothing where the process only waits."""


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    size = Size(**request["size"])
    with opened(2) as world:
        if world.is_main:
            write_inputs(folder, size)
        world.wait_for_main()
        answer = [_measure(folder, size, method, world, request) for method in request["methods"]]
        if world.is_main:
            (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
        world.wait_for_main()


def _measure(folder: Path, size: Size, method: str, world: World, request: dict[str, Any]) -> dict[str, Any]:
    dims = ParallelDims(replicate=world.size)
    one, two = (config_of(folder, size, method, shares=shares) for shares in (1, world.size))
    lonely, shared = plan_of(one, ParallelDims(), micro_batch=size.batch), plan_of(two, dims, micro_batch=size.batch)
    dataset, here = prepared(one, world), by_itself(world)
    with (
        SmallRun(one, lonely, here, dataset) as alone,
        SmallRun(two, shared, among(world, dims), dataset) as together,
    ):
        plain_alone = _PlainLoop(LossModel(model_of(one, lonely, here)), dataset, size, world)
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
    """The other process works alone."""


def _take_turns(turns: dict[str, Turn], world: World, *, repeats: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, of the slowest process; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repeats + 1):
        for name, turn in turns.items():
            world.wait_for_main()
            begin = time.perf_counter()
            for _ in range(steps):
                turn()
            times[name].append(float(world.gather([(time.perf_counter() - begin) / steps]).max()))
    return {name: found[1:] for name, found in times.items()}


def _ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians of times, and of the ratios within a round."""

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))

    return {
        "alone_seconds": statistics.median(times["alone"]),
        "together_seconds": statistics.median(times["together"]),
        "efficiency": ratio("alone", "together"),
        "plain_efficiency": ratio("plain_alone", "plain_together"),
        "machine_efficiency": ratio("alone", "apart"),
        "against_plain": ratio("plain_together", "together"),
    }


class _PlainLoop:
    """What one would write by hand: forward, backward, clip, step, on one batch."""

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

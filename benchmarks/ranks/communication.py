"""Rank script of the communication benchmark: run a training step of every case and count what is sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pantheraml.parallel.process_group import World
from pantheraml.planner.dims import named_modes
from ranks.counting import Sent
from ranks.small_run import Size, SmallRun, among, config_of, opened, plan_of, prepared, write_inputs
from ranks.theory import Case

WARM_UP = 2
"""DDP rebuilds its buckets after the first step."""


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    size = Size(**request["size"])
    with opened(2) as world:
        if world.is_main:
            write_inputs(folder, size)
        world.wait_for_main()
        answer = [_everybody(_sent(folder, size, Case(**case), world), world) for case in request["cases"]]
        if world.is_main:
            (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
        world.wait_for_main()


def _sent(folder: Path, size: Size, case: Case, world: World) -> dict[str, Any]:
    dims = named_modes(world.size)[case.mode]
    config = config_of(folder, size, case.method, shares=dims.data, stages=case.stages)
    plan = plan_of(config, dims, micro_batch=size.batch // case.passes)
    with SmallRun(config, plan, among(world, dims), prepared(config, world)) as run:
        for _ in range(WARM_UP):
            run.step()
        with Sent() as sent:
            run.step()
        numbers = sent.transfers.pop()
        return {
            "numbers": numbers._asdict(),
            "counts": sent.counts(),
            "whole_bytes": sent.whole_bytes(),
            "sent_bytes": sent.sent_bytes(world.size),
            "trained_bytes": sum(part.nbytes for _, part in run.stepper.parts),
        }


def _everybody(mine: dict[str, Any], world: World) -> list[dict[str, Any]]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, mine, group=world.long_timeout_group)
    return found


if __name__ == "__main__":
    main()

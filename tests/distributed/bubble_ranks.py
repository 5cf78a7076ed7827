"""Rank script of test_pipeline_bubble: runs the benchmark's own counting."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def main() -> None:
    sys.path.insert(0, str(BENCHMARKS))  # benchmarks are scripts, not a package
    from ranks.pipeline_order import Work, idle_turns, waited

    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = [waited(**case) for case in cases]
        if dist.get_rank() == 0:
            one_by_one = [
                [Work(stage, n, backward) for n in range(4) for backward in (False, True)] for stage in (0, 1)
            ]
            (folder / "found.json").write_text(json.dumps([found, idle_turns(one_by_one)]))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

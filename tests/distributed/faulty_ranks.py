"""`rank_main` for the runs of test_out_of_memory.py: memory runs out in the one called `short`."""

from __future__ import annotations

from pantheraml.base import env
from pantheraml.specs.run_dir import RunDir
from tests.distributed import rank_main


def set_faults(run: RunDir) -> None:
    env.set_for_this_process("PANTHERAML_FAULTS", "1:2:oom,0:4:oom" if run.path.name == "short" else "")


def main() -> None:
    rank_main.main(set_faults)


if __name__ == "__main__":
    main()

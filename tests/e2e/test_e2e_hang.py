"""A rank that hangs: the run ends within the timeout, and the error names the rank and the place."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pantheraml.base.errors import HangError
from tests.e2e.conftest import Playground

HANG = """
import os, sys, time
if os.environ.get("RANK") == "1" and "pantheraml.worker" in sys.orig_argv:
    from pantheraml.engine.step import Stepper
    taken = []
    apply = Stepper.apply
    def a_call_that_never_returns(self, *given, **named):
        taken.append(1)
        while len(taken) == 3:
            time.sleep(0.1)
        return apply(self, *given, **named)
    Stepper.apply = a_call_that_never_returns
"""


@pytest.mark.timeout(200)
def test_the_stuck_rank_is_named(playground: Playground, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANG)
    paths = [str(tmp_path), *filter(None, [playground.environment.get("PYTHONPATH")])]
    stuck = replace(playground, environment={**playground.environment, "PYTHONPATH": os.pathsep.join(paths)})
    settings = ["parallel.timeout_seconds=10", "parallel.grace_seconds=2", "train.max_steps=1000"]
    process = stuck.start_training("runs/hang", "--nproc", "2", *(part for s in settings for part in ("--set", s)))
    stuck.wait_for_steps("runs/hang")
    begin = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode == HangError.exit_code, err
    assert "rank 1 is stuck in a_call_that_never_returns" in err
    assert "rank 0 waits for it" in err
    assert "Traceback" not in err
    assert time.monotonic() - begin < 60
    assert "a_call_that_never_returns" in (playground.root / "runs/hang/stacks/rank-1.txt").read_text()

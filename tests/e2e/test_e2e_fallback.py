"""A rank with an unusable device: all ranks agree on a fallback, report it, and nothing hangs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pantheraml.base.errors import DeviceError
from tests.e2e.conftest import Playground
from tests.event_log import raw_events
from tests.harness import values

pytestmark = pytest.mark.extended

BROKEN_DEVICE = """
import os, sys
if os.environ.get("RANK") == "1" and "pantheraml.worker" in sys.orig_argv:
    from pantheraml.parallel import process_group
    process_group.device_problem = lambda device: "it fell off the bus"
"""


SHORT = ["--set", "train.max_steps=3"]


@pytest.fixture
def broken(playground: Playground, tmp_path: Path) -> Playground:
    """The command line on a machine where rank 1 cannot use its device."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN_DEVICE)
    paths = [str(tmp_path), *filter(None, [playground.environment.get("PYTHONPATH")])]
    return replace(playground, environment={**playground.environment, "PYTHONPATH": os.pathsep.join(paths)})


@pytest.mark.seed("S0-104", partly="in `pantheraml train`; a script stops with an error")
@pytest.mark.seed("C14")
def test_rank_0_continues_alone_and_reports_it(broken: Playground, playground: Playground) -> None:
    """Also with parallel.batch_shares: the remaining rank gets the whole batch."""
    ended = broken.train("fallback-two", *SHORT, "--nproc", "2", "--set", "parallel.batch_shares=[1,3]")
    assert ended.code == 0, ended.err
    reason = "rank 1 cannot use its device: it fell off the bus"
    assert f"training continues in one process instead of 2: {reason}" in ended.err
    root: Path = playground.root
    events = raw_events(root / "fallback-two")
    assert values(events, "run.fallback", "reason") == [reason]
    assert values(events, "run.fallback", "planned_world_size") == [2]
    written = json.loads((root / "fallback-two/run.json").read_text())
    assert (written["fallback_reason"], written["world_size"]) == (reason, 1)
    assert playground.train("fallback-one", *SHORT).code == 0
    losses, expected = (
        values(raw_events(root / name), "train.step", "loss") for name in ("fallback-two", "fallback-one")
    )
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.seed("C14")
def test_a_strict_run_stops(broken: Playground) -> None:
    ended = broken.train("strict", *SHORT, "--nproc", "2", "--set", "parallel.strict=true")
    assert ended.code == DeviceError.exit_code
    assert "rank 1 cannot use its device: it fell off the bus" in ended.err
    assert "Traceback" not in ended.err

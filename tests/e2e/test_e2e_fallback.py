"""A rank whose device is not usable: all ranks decide together, loudly, and nothing hangs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pantheraml.base.errors import DeviceError
from pantheraml.base.events import read_events
from tests.e2e.conftest import Playground
from tests.harness import values

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


def test_rank_0_goes_on_alone_and_says_so(broken: Playground, playground: Playground) -> None:
    ended = broken.train("fallback-two", *SHORT, "--nproc", "2")
    assert ended.code == 0, ended.err
    assert "one process goes on instead of 2: rank 1 cannot use its device: it fell off the bus" in ended.err
    assert playground.train("fallback-one", *SHORT).code == 0
    root: Path = playground.root
    losses, expected = (
        values(read_events(root / name), "train.step", "loss") for name in ("fallback-two", "fallback-one")
    )
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_strict_run_stops(broken: Playground) -> None:
    ended = broken.train("strict", *SHORT, "--nproc", "2", "--set", "parallel.strict=true")
    assert ended.code == DeviceError.exit_code
    assert "rank 1 cannot use its device: it fell off the bus" in ended.err
    assert "Traceback" not in ended.err

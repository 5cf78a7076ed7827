"""`pantheraml profile` on this machine, in one process and on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from pantheraml.cli.main import main
from tests import toy
from tests.e2e.conftest import COMMAND_SECONDS


def profile(folder: Path, *arguments: str) -> str:
    toy.write_llama(folder / "model")
    toy.write_jsonl(folder / "rows.jsonl", toy.arithmetic(40))
    done = subprocess.run(
        [sys.executable, "-m", "pantheraml", "profile", "--model", str(folder / "model"), "--data",
         str(folder / "rows.jsonl"), "--device", "cpu", "--set", "data.seq_len=64",
         "--set", "train.global_batch_size=4", *arguments],
        env=child_environment(OMP_NUM_THREADS="1"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.extended
@pytest.mark.seed("S1-134")
def test_where_the_time_of_a_step_goes(tmp_path: Path) -> None:
    found: dict[str, Any] = json.loads(profile(tmp_path, "--steps", "2", "--json", "--trace", "trace.json"))
    assert (found["device"], found["precision"], found["world_size"], found["steps"]) == ("cpu", "fp32", 1, 2)
    phases = {row["name"]: row["seconds"] for row in found["phases"]}
    assert list(phases) == ["data", "forward and backward", "update"]
    assert sum(phases.values()) == pytest.approx(found["step_seconds"])
    assert found["tokens_per_second"] == pytest.approx(4 * 64 / found["step_seconds"], rel=0.2)
    work = {row["name"]: row for row in found["parts"]}
    assert {"matmuls", "attention", "optimizer", "elementwise and other"} <= set(work)
    assert sum(row["share"] for row in work.values()) == pytest.approx(1)
    # the profiler sees nearly all of what the host spends in torch, and not twice
    assert 0.2 < sum(row["seconds"] for row in work.values()) / found["step_seconds"] < 1.5
    assert "aten::mm" in {row["name"] for row in found["operators"]}
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


@pytest.mark.extended
def test_ranks_exchange_gradients(tmp_path: Path) -> None:
    printed = profile(tmp_path, "--steps", "1", "--nproc", "2")
    assert "on cpu in fp32, rank 0 of 2" in printed
    assert "communication" in printed
    assert [line.split()[0] for line in printed.splitlines() if "per step" in line][1:] == ["phase", "work", "slowest"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--steps", "0"], 2, "--steps must be at least 1"),
        (["--warmup", "-1"], 2, "--warmup at least 0"),
        (["--trace", "no/folder/t.json"], 17, "There is no folder"),
    ],
)
def test_bad_input(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["profile", *arguments]) == code
    assert says in capsys.readouterr().err

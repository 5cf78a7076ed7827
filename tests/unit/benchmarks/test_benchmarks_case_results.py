"""What a case of a suite leaves: usable results are rows, all else fails its case and no other."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.benchmarks.conftest import Python

pytestmark = pytest.mark.extended

UNUSABLE = """
import dataclasses, json
from pathlib import Path
from suites import run_case as module
from suites.smoke import CASES
from suites.workshop import SuiteFolder
RUN = '''
import json
from pathlib import Path
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import MemoryMeasured, TrainStep, WarningIssued
for name in ("run/model", "run/checkpoints/step-1"):
    Path(name).mkdir(parents=True)
with EventWriter(Path("run")) as emit:
    emit(TrainStep(step=1, epoch=0.1, loss=6.0, learning_rate=0.1, grad_norm=1.0, tokens=8, target_tokens=8,
                   seconds=1.0, tokens_per_second=8.0, memory_bytes=8))
    emit(MemoryMeasured(step=2, allocated_bytes=1 << 30, reserved_bytes=2 << 30, device_bytes=3 << 30,
                        capacity_bytes=9 << 30, predicted_bytes=None, predicted_device_bytes=None))
    if message:
        emit(WarningIssued(message=message))
summary = {"tokens_per_second": 8.0, "peak_memory_bytes": 8, "reserved_memory_bytes": None, "first_loss": 6.0}
Path("run/run.json").write_text(json.dumps(summary | {"final_loss": last}))
'''
TRL = "from pathlib import Path\\nPath('result').write_text('{\\"loss_first\\": 6.0, \\"loss_last\\": NaN}')"
SCRIPTS = {
    "good": "message, last = '', 5.9" + RUN,
    "nan": "message, last = '', 'nan'" + RUN,
    "smaller": "message, last = 'retried with 2 sequences at a time from now on', 5.9" + RUN,
    "nothing": "",
    "peer": TRL,
}
module.cli_command = module.trl_command = lambda case, *rest: [sys.executable, "-c", SCRIPTS[case.name]]
folder = SuiteFolder(Path(sys.argv[1]), "cpu")
folder.model("tiny").mkdir(parents=True)
cases = [dataclasses.replace(CASES[0], name=name, path="trl" if name == "peer" else "cli") for name in SCRIPTS]
with module.CaseLauncher(folder) as launcher:
    rows = [module.run_case(case, None, launcher) for case in cases]
    left = [path.name for path in folder.output(cases[0]).joinpath("run").iterdir() if path.is_dir()]
    other = dataclasses.replace(CASES[3], name="peer", seq=32)
    (folder.folder / "data" / "tiny-full-2x32x5.unfinished").mkdir()
    launcher.start_next([other])
    rows.append(module.run_case(other, None, launcher))
print(json.dumps([rows, left], allow_nan=False))
"""


def test_a_result_that_cannot_be_used_fails_its_case_alone(python: Python, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (good, *others), left = json.loads(python(UNUSABLE, str(tmp_path)))
    assert (good["status"], good["loss_last"]) == ("measured", 5.9)
    assert (good["probe_gib"], good["device_gib"]) == (1.0, 3.0)
    assert not left, "weights are not kept: the next cases need the disk"
    assert {row["status"] for row in others} == {"failed"}
    assert [row["reason"] for row in others] == [
        "no usable result: ValueError: loss_last is nan",
        "no usable result: ValueError: retried with 2 sequences at a time from now on",
        f"no usable result: FileNotFoundError: [Errno 2] No such file or directory:"
        f" '{tmp_path}/runs/nothing/run/run.json'",
        "no usable result: ValueError: loss_last is nan",
        f"[Errno 21] Is a directory: '{tmp_path}/data/tiny-full-2x32x5.unfinished'",
    ]


def test_a_suite_and_its_cases_end_with_the_command(tmp_path: Path) -> None:
    places = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--device", "cpu"]
    words = ["bench", "--suite", "smoke", "--only", "hf-tiny-lora", "--commit", "x", *places]
    command = subprocess.Popen([sys.executable, "-m", "pantheraml", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    log = tmp_path / "work" / "smoke" / "logs" / "model-tiny.log"
    while not log.exists():
        assert time.monotonic() < deadline, "no case has begun"
        time.sleep(0.05)
    command.kill()
    command.wait()
    while left := [each for each in psutil.process_iter() if str(tmp_path) in " ".join(words_of(each))]:
        assert time.monotonic() < deadline, f"{left} run on"
        time.sleep(0.1)


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()  # type: ignore[no-any-return]
    return []

"""Suites: commands of cases are valid, and every outcome has a result row."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pantheraml.cli.main import build_parser, main
from pantheraml.cli.train import config_from
from tests.unit.benchmarks.conftest import BENCHMARKS, Python

pytestmark = pytest.mark.extended

ROWS = ["case", "status", "reason", "system", "path", "trainer", "model", "method", "precision", "checkpointing",
        "data", "batch", "seq", "cache", "tokens_per_second", "peak_gib", "reserved_gib", "device_gib", "probe_gib",
        "seconds_to_first_step", "loss_first", "loss_last", "settings", "seconds", "date", "commit"]  # fmt: skip


def bench(results: Path, *words: str, suite: str = "smoke", status: int = 0) -> dict[str, Any]:
    """Run the smoke suite on the CPU and return the record it wrote."""
    places = ["--results", str(results), "--work", str(results.parent / "work"), "--device", "cpu"]
    command = [sys.executable, "-m", "pantheraml.cli.main", "bench", "--suite", suite, *places, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == status, done.stderr
    (path,) = results.glob("*.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def record_names(*trainers: str) -> list[str]:
    systems = [f"{system}-tiny-{trainer}" for trainer in trainers for system in ("hf", "ours-trl")]
    return [f"{name}{suffix}" for name in systems for suffix in ("", "-uneven")]


def statuses(record: dict[str, Any]) -> dict[str, str]:
    return {row["case"]: row["status"] for row in record["results"]}


COMMANDS = """
import json
from pathlib import Path
from suites import h200, h200_families
from suites.run_case import cli_command
own = [case for case in (*h200.CASES, *h200_families.CASES) if case.path == "cli"]
print(json.dumps({case.name: cli_command(case, Path("m"), Path("d"), Path("o"), None)[3:] for case in own}))
"""


def test_commands_of_the_suite_are_valid(python: Python) -> None:
    commands = json.loads(python(COMMANDS))
    assert {"ours-8b-lora-fp8", "ours-qwen3-4b-lora", "ours-gemma3-4b-lora-uneven"} <= set(commands)
    for name, words in commands.items():
        config = config_from(build_parser().parse_args(words))
        assert config.train.max_steps is not None, name
        assert config.method.rank == 16, name
        tokens = config.train.global_batch_size * config.data.seq_len
        assert tokens == config.data.seq_len if name.endswith("k") else tokens == 8192, name
        assert bool(config.method.target_parameters) == name.endswith("-experts"), name


NAMES = """
import importlib, json
suite = importlib.import_module(f"suites.{sys.argv[1]}")
CASES, TARGETS = suite.CASES, suite.TARGETS
expected = {name for each in TARGETS.comparisons for name in (each.ours, *each.peers)}
print(json.dumps([[case.name for case in CASES], sorted(expected | {start.case for start in TARGETS.starts})]))
"""


@pytest.mark.parametrize("suite", ["h200", "h200_families"])
def test_targets_name_cases_of_the_suite(python: Python, suite: str) -> None:
    cases, expected = json.loads(python(NAMES, suite))
    assert len(set(cases)) == len(cases)
    assert set(expected) <= set(cases)


def test_missing_packages_skip_a_case_and_unselected_cases_do_not_run(tmp_path: Path) -> None:
    described = tmp_path / "peers" / "unsloth_zoo-1.2.3.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: unsloth_zoo\nVersion: 1.2.3\n")
    peers = ["--peers", str(tmp_path / "peers")]
    record = bench(tmp_path / "results", "--only", "unsloth-*", "--commit", "0123abc", *peers, status=1)
    assert statuses(record) == {
        "ours-tiny-lora": "not run",
        "ours-tiny-uneven": "not run",
        "ours-tiny-quantized": "not run",
        "hf-tiny-lora": "not run",
        "ours-trl-tiny-lora": "not run",
        "unsloth-tiny-lora": "skipped",
        **dict.fromkeys(record_names("dpo", "grpo"), "not run"),
        **dict.fromkeys(("ours-tiny-experts", "ours-trl-tiny-experts", "hf-tiny-experts"), "not run"),
    }
    assert record["results"][5]["reason"] == "not installed: unsloth, unsloth_zoo, bitsandbytes"
    assert all(list(row) == ROWS for row in record["results"])
    assert record["commit"] == "0123abc"
    assert record["versions"]["unsloth"] is None
    assert record["versions"]["unsloth-zoo"] == "1.2.3", "from the folder of the peers"


def test_cases_beyond_the_time_budget_have_a_reason(tmp_path: Path) -> None:
    record = bench(tmp_path / "results", "--minutes", "0.5", status=1)
    assert set(statuses(record).values()) == {"not run"}
    assert record["results"][0]["reason"] == "no time left of 0.5 minutes"


@pytest.mark.timeout(900)
def test_resume_keeps_measured_cases(tmp_path: Path) -> None:
    first = bench(tmp_path / "results", "--only", "ours-tiny-lora")
    (row,) = [row for row in first["results"] if row["status"] == "measured"]
    assert row["tokens_per_second"] > 0
    assert 0.1 < row["peak_gib"] < 8
    assert 0 < row["seconds_to_first_step"] < row["seconds"]
    assert row["loss_first"] == pytest.approx(6.24, abs=0.1), "about log(512): random weights"
    again = bench(tmp_path / "results", "--resume", "--only", "ours-tiny-lora", "--only", "unsloth-*", status=1)
    assert again["results"][0] == row
    assert statuses(again)["unsloth-tiny-lora"] == "skipped"


@pytest.mark.timeout(900)
def test_preference_and_group_cases_of_both_systems(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    record = bench(tmp_path / "results", "--only", "*-tiny-dpo*", "--only", "*-tiny-grpo*")
    rows = {row["case"]: row for row in record["results"] if row["status"] == "measured"}
    assert sorted(rows) == sorted(record_names("dpo", "grpo"))
    for name, row in rows.items():
        assert row["tokens_per_second"] > 0
        assert row["reason"] is None, "batches are as full as the case says"
        expected = math.log(2) if "dpo" in name else 0.0
        assert row["loss_first"] == pytest.approx(expected, abs=0.002), "the adapter adds nothing yet"
        assert (row["loss_last"] != row["loss_first"]) == ("dpo" in name)


QUANTIZE = """
import json
from pathlib import Path
from suites.smoke import CASES
from suites.workshop import SuiteFolder
folder = SuiteFolder(Path(sys.argv[1]), "cpu")
(case,) = [case for case in CASES if case.model != case.shape]
words = folder.quantize_command(case.shape, folder.model(case.model))
print(json.dumps([words[3:], str(folder.model(case.shape)), str(folder.model(case.model)), str(folder.data(case))]))
"""


def test_quantize_command_is_valid(python: Python, tmp_path: Path) -> None:
    """Its effect is tested end to end elsewhere; it takes a minute."""
    words, plain, quantized, data = json.loads(python(QUANTIZE, str(tmp_path)))
    given = build_parser().parse_args(words)
    assert (given.command, given.model, given.output, given.device) == ("quantize", plain, quantized, "cpu")
    assert config_from(given).data.path == given.data
    rows = [json.loads(line)["text"].split() for line in Path(given.data).read_text(encoding="utf-8").splitlines()]
    assert sum(len(row) + 1 for row in rows) == given.tokens, "an end token is added to each"
    assert Path(data).name.startswith("tiny-full"), "same data as other models of that shape"


@pytest.mark.timeout(900)
def test_cases_through_trl_prepare_ahead_of_their_turn(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    record = bench(tmp_path / "results", "--only", "hf-tiny-lora", "--only", "ours-trl-tiny-lora")
    first, second = (row for row in record["results"] if row["status"] == "measured")
    for row in (first, second):
        assert row["tokens_per_second"] > 0
        assert row["loss_first"] == pytest.approx(6.24, abs=0.1)
        assert row["peak_gib"] is None, "measured only on a GPU"
    assert first["seconds"] > first["seconds_to_first_step"], "the first case has nothing to wait for"
    assert second["seconds"] < second["seconds_to_first_step"], "it prepared while the first case ran"
    assert (first["cache"], second["cache"]) == ("cold", "cold"), "first case of each system"
    run = tmp_path / "work" / "smoke" / "runs" / "hf-tiny-lora"
    (run / "result").unlink()
    command = [sys.executable, str(BENCHMARKS / "suites" / "trl_run.py"), str(run / "job.json")]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=400).returncode == 1
    assert not (run / "result").exists(), "without a suite there is no turn"


ENDS = """
import dataclasses, json
from pathlib import Path
from suites.run_case import CaseLauncher, run_case
from suites.smoke import CASES
from suites.workshop import SuiteFolder
refused = dataclasses.replace(CASES[0], settings={"train.no_such_key": "1"})
broken = CASES[-1]
slow = dataclasses.replace(CASES[0], minutes=0.0005)
with CaseLauncher(SuiteFolder(Path(sys.argv[1]), "cpu", Path(sys.argv[2]))) as launcher:
    print(json.dumps([
        run_case(refused, None, launcher, coming=[broken, slow]),
        run_case(broken, None, launcher, coming=[slow]),
        run_case(slow, None, launcher),
    ]))
"""


@pytest.mark.timeout(900)
def test_failures_and_timeouts_are_results(python: Python, tmp_path: Path) -> None:
    for package in ("unsloth", "unsloth_zoo", "bitsandbytes", "trl", "datasets"):
        (tmp_path / "peers" / package).mkdir(parents=True)
        (tmp_path / "peers" / package / "__init__.py").write_text("raise ImportError('another torch is needed')")
    refused, broken, slow = json.loads(python(ENDS, str(tmp_path), str(tmp_path / "peers")))
    assert refused["status"] == "failed"
    assert refused["reason"].startswith("exit code 2: ConfigError:")
    assert refused["tokens_per_second"] is None
    assert broken["status"] == "failed", "its packages are found, and importing them fails"
    assert broken["reason"] == "exit code 1: ImportError: another torch is needed"
    assert slow["status"] == "timed out"
    assert slow["reason"] == "stopped after 0 s"


STARTS = """
import dataclasses, json
from pathlib import Path
from suites.run_case import CaseLauncher
from suites.smoke import CASES
from suites.workshop import SuiteFolder
cli, _, _, hf, ours, unsloth, *_ = CASES
fresh = dataclasses.replace(hf, name="fresh", cache="fresh")
folder = SuiteFolder(Path(sys.argv[1]), "cpu", Path(sys.argv[2]), Path(sys.argv[1]) / "extras")
def there():
    return [case.name for case in (*CASES, fresh) if folder.output(case).exists()]
with CaseLauncher(folder) as launcher:
    launcher.start_next([cli, unsloth, fresh, hf, ours])
    first = there()
    launcher.start_next([hf, ours])
    waited = launcher.take(hf)
    again = launcher.take(hf)
    launcher.start_next([ours, hf])
    print(json.dumps([first, there(), waited.began < again.began]))
    waited.end()
    again.end()
paths = [folder.environment(case).get("PYTHONPATH", "") for case in (cli, hf, ours)]
print(json.dumps([[name in path for name in ("peers", "extras")] for path in paths]))
"""


def test_only_trl_cases_start_ahead_and_see_the_peers(python: Python, tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    started, seen = map(json.loads, python(STARTS, str(tmp_path), str(tmp_path / "peers")).splitlines())
    assert started == [["hf-tiny-lora"], ["hf-tiny-lora", "ours-trl-tiny-lora"], True]
    assert seen == [[False, True], [True, False], [True, True]]


DEATH = """
import os, signal
from pathlib import Path
from suites.process import Process
folder = Path(sys.argv[1])
started = [Process(["sleep", "1000"], folder / name, dict(os.environ)) for name in ("running", "waiting")]
print(*(each._process.pid for each in started), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_with_a_suite_that_is_killed(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{DEATH}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    try:
        while any(map(runs, pids)):
            assert time.monotonic() < deadline, "a case runs on"
            time.sleep(0.05)
    finally:
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_listing_runs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "h200", "--list", "--only", "*-1b-full*"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["ours-1b-full", "0.7", "min"]
    assert lines[-1].startswith(f"{len(lines) - 1} cases, about")


RESUMED = """
import json
from pathlib import Path
from suite import ResultFile
folder = Path(sys.argv[1])
for name in ("h200", "h200-families"):
    for day in ("01", "02"):
        (folder / f"{name}-202601{day}T000000Z.json").write_text(json.dumps({}), encoding="utf-8")
print(json.dumps([ResultFile.newest(folder, name).path.name for name in ("h200", "h200-families")]))
"""


def test_resume_finds_the_newest_file_of_its_own_suite(python: Python, tmp_path: Path) -> None:
    newest = json.loads(python(RESUMED, str(tmp_path)))
    assert newest == ["h200-20260102T000000Z.json", "h200-families-20260102T000000Z.json"]


def test_suite_with_a_hyphen_is_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "h200-families", "--list", "--only", "*gemma3*-bf16"]) == 0
    assert capfd.readouterr().out.splitlines()[0].split()[0] == "ours-gemma3-4b-lora-bf16"


FAMILIES = """
import json
import inputs, torch
from pathlib import Path
from suites.trl_run import model_module
from transformers import AutoConfig, AutoModelForCausalLM
found = {}
small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=16)
for shape in json.loads(sys.argv[2]):
    folder = Path(sys.argv[1]) / shape
    lists = {name: value[2:4] for name, value in inputs.SHAPES[shape].items() if isinstance(value, list)}
    experts = {name: 4 for name in ("num_experts", "num_local_experts") if name in inputs.SHAPES[shape]}
    layers = lists | experts | {name: 2 for name in ("num_experts_per_tok",) if name in inputs.SHAPES[shape]}
    inputs.SHAPES["small"] = inputs.SHAPES[shape] | small | layers
    inputs.write_model(folder, "small")
    model = AutoModelForCausalLM.from_pretrained(folder)
    same_module = type(model).__module__ == model_module(str(folder))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found[shape] = [type(model).__name__, str(model.dtype), tied, same_module]
print(json.dumps(found))
"""


MORE_SHAPES = {
    "8b-long": ("LlamaForCausalLM", False),
    "olmo3-7b": ("Olmo3ForCausalLM", False),
    "granite-8b": ("GraniteForCausalLM", True),
    "smollm3-3b": ("SmolLM3ForCausalLM", True),
    "qwen3-32b-half": ("Qwen3ForCausalLM", False),
    "gpt-oss-20b": ("GptOssForCausalLM", False),
    "qwen3-30b-a3b-half": ("Qwen3MoeForCausalLM", False),
}


def test_models_of_other_families_are_written(python: Python, tmp_path: Path) -> None:
    shapes = ["8b", "qwen3-4b", "qwen2.5-3b", "gemma3-4b", "mistral-7b", *MORE_SHAPES]
    assert json.loads(python(FAMILIES, str(tmp_path), json.dumps(shapes)).splitlines()[-1]) == {
        "8b": ["LlamaForCausalLM", "torch.bfloat16", False, True],
        "qwen3-4b": ["Qwen3ForCausalLM", "torch.bfloat16", True, True],
        "qwen2.5-3b": ["Qwen2ForCausalLM", "torch.bfloat16", True, True],
        "gemma3-4b": ["Gemma3ForCausalLM", "torch.bfloat16", True, True],
        "mistral-7b": ["MistralForCausalLM", "torch.bfloat16", False, True],
        **{shape: [name, "torch.bfloat16", tied, True] for shape, (name, tied) in MORE_SHAPES.items()},
    }


def test_unknown_names_are_rejected_with_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "h2000", "--list"]) == 2
    assert "known: h200, h200-families, h200-planner, smoke" in capfd.readouterr().err
    assert main(["bench", "--suite", "smoke", "--only", "nothing"]) == 2
    assert "no case of smoke matches nothing" in capfd.readouterr().err
    assert main(["bench", "--suite", "smoke", "--peers", "no/such/folder"]) == 2
    assert "no such folder: no/such/folder" in capfd.readouterr().err


ROOM = """
import json
from pathlib import Path
from suites.workshop import SuiteFolder
folder = SuiteFolder(Path(sys.argv[1]))
for name in ("8b", "1b", "1b-quantized"):
    folder.model(name).mkdir(parents=True)
log = folder.log("model")
found = []
for text in ("OutOfMemoryError", "OSError: [Errno 28] No space left on device"):
    log.write_text(text)
    removed, models = folder._make_room(log, keep="1b"), folder.folder / "models"
    found.append([removed, sorted(path.name for path in models.iterdir())])
print(json.dumps(found))
"""


def test_other_models_are_removed_when_the_disk_is_full(python: Python, tmp_path: Path) -> None:
    assert json.loads(python(ROOM, str(tmp_path))) == [[False, ["1b", "1b-quantized", "8b"]], [True, ["1b"]]]


LONGEST = """
import json
from suites.comparison import Longest, Targets
names = "a", "b", "c"
targets = Targets((), (), (Longest("8B", names, ("peer-a", "peer-b"), 1.3),))
print(targets.markdown([{"results": json.loads(sys.argv[1])}]))
"""


@pytest.mark.parametrize(
    ("lengths", "line"),
    [
        ({"a": 4096, "b": 8192, "peer-a": 4096}, "| 8B | 8,192 | 4,096 | 2.00 | ≥ 1.3: yes |"),
        ({"a": 4096, "peer-a": 4096}, "| 8B | 4,096 | 4,096 | 1.00 | ≥ 1.3: no |"),
        ({"a": 4096}, "| 8B | 4,096 | not measured | – | ≥ 1.3 |"),
    ],
)
def test_the_longest_sequences_are_compared(lengths: dict[str, int], line: str, python: Python) -> None:
    rows = [
        {"case": name, "seq": lengths.get(name, 1 << 20), "status": "measured" if name in lengths else "out of memory"}
        for name in ("a", "b", "c", "peer-a", "peer-b")
    ]
    assert line in python(LONGEST, json.dumps(rows))


ORDER = """
import dataclasses, json
from pathlib import Path
import suite
from suites import smoke
cases = tuple(dataclasses.replace(smoke.OURS, name=name) for name in "abcdef")
statuses = {"a": "failed", "b": "measured", "c": "out of memory", "d": "not run", "e": "timed out"}
file = suite.ResultFile(Path("none"), {"results": [{"case": name, "status": s} for name, s in statuses.items()]})
for again in (False, True):
    print("".join(case.name for case in suite.to_run(cases, suite.Wanted((), None, again), file)))
"""


def test_resuming_runs_what_has_no_result_and_failures_last(python: Python) -> None:
    assert python(ORDER).split() == ["dfae", "abcdef"]


SHORT = """
import suite
from suites import h200_families, h200_planner, smoke
row = smoke.OURS.row(status="measured", peak_gib=12.5, seconds_to_first_step=3.0)
print(suite.describe(row))
cases = (*h200_families.CASES, *h200_planner.CASES)
print(max(case.minutes for case in cases if not case.experts))
"""


def test_a_run_too_short_for_a_speed_is_a_result_and_no_case_is_too_long_for_a_call(python: Python) -> None:
    told, longest = python(SHORT).splitlines()
    assert told == "measured, 12.50 GiB, first step after 3.0 s"
    assert float(longest) <= 9


COMPARED = """
import json
from suites.comparison import Comparison, StartLimit, Targets
targets = Targets(
    comparisons=(
        Comparison("speed and memory", "ours", ("slow", "fast"), 1.6, 0.95),
        Comparison("memory only", "ours", ("slow",), None, 0.5),
        Comparison("not there", "lost", ("fast",), 1.0, None),
    ),
    starts=(StartLimit("cold", "ours", 60), StartLimit("warm", "lost", 30)),
)
print(targets.markdown([{"results": rows} for rows in json.loads(sys.argv[1])]))
"""


def measured(**figures: tuple[int, int, int]) -> list[dict[str, object]]:
    return [
        {"case": name, "status": "failed" if name == "lost" else "measured", "tokens_per_second": speed,
         "peak_gib": peak, "seconds_to_first_step": start}
        for name, (speed, peak, start) in figures.items()
    ]  # fmt: skip


def comparisons(python: Python, *runs: list[dict[str, object]]) -> list[str]:
    return [line for line in python(COMPARED, json.dumps(runs)).splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(
    ("elsewhere", "speed", "memory"),
    [
        ((900, 60, 1), "1,000 (fast) | 1.70 | ≥ 1.6: yes", "50.0 | 0.80 | ≤ 0.95: yes"),
        ((1700, 40, 1), "1,700 (slow *) | 1.00 | ≥ 1.6: no", "40.0 | 1.00 | ≤ 0.95: no"),
        ((900, 40, 1), "1,000 (fast) | 1.70 | ≥ 1.6: yes", "40.0 (slow *) | 1.00 | ≤ 0.95: no"),
    ],
)
def test_peers_from_another_run_count(elsewhere: tuple[int, int, int], speed: str, memory: str, python: Python) -> None:
    newer, older = measured(ours=(1700, 40, 9), fast=(1000, 50, 1)), measured(slow=elsewhere)
    line = comparisons(python, newer, older)[1]
    assert f"| {speed} |" in line
    assert f"| {memory} |" in line
    assert "≥ 1.6: so far yes |" in comparisons(python, newer)[1], "one was never measured"


def test_ratios_use_the_fastest_and_the_leanest_peer(python: Python) -> None:
    lines = comparisons(python, measured(ours=(1600, 40, 61), slow=(800, 50, 1), fast=(1000, 80, 1), lost=(1, 1, 1)))
    assert lines[1:] == [
        "| speed and memory | ours | 1,600 | 1,000 (fast) | 1.60 | ≥ 1.6: yes"
        " | 40.0 | 50.0 (slow) | 0.80 | ≤ 0.95: yes |",
        "| memory only | ours | 1,600 | – | – | – | 40.0 | 50.0 (slow) | 0.80 | ≤ 0.5: no |",
        "| time to first step | our case | measured | limit |",
        "| cold | ours | 61 s | 60 s: no |",
        "| warm | lost | not measured | 30 s |",
    ]

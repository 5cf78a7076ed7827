"""Every script of examples/ runs as it stands, on two CPU processes or one, with a tiny model."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from pantheraml.data.tiny_inputs import write_tiny_inputs
from tests.distributed.launching import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
ELSEWHERE = {"finetune_with_trl": "test_e2e_trl.py", "verify_installation": "test_e2e_doctor.py"}
extended = pytest.mark.extended
Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script on ranks; returns what each printed."""

    def run_example(script: str, processes: int, *arguments: object) -> list[str]:
        run_ranks("example_ranks", processes, tmp_path, script, *arguments)
        return [(tmp_path / f"out-{rank}.txt").read_text() for rank in range(processes)]

    return run_example


def adapter_of(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


@pytest.mark.seed("S3-047", "S3-076", "S3-079")
def test_quick_start(run: Run, tmp_path: Path) -> None:
    first, second = run("quick_start", 2, "--max-steps", 2)
    assert "2 steps, mean loss" in first
    assert "the adapter is in" not in second
    assert adapter_of(tmp_path / "runs/quick_start").is_file()


@extended
@pytest.mark.seed("S3-048", "S3-078")
def test_advanced_config(run: Run, tmp_path: Path) -> None:
    """The same global batch of 32 on two processes and on one."""
    (first, _), (alone,) = (run("advanced_config", count, "--max-steps", 1) for count in (2, 1))
    assert "1 steps of 8 samples per pass x 2 passes x 2 process(es)" in first
    assert "1 steps of 8 samples per pass x 4 passes x 1 process(es)" in alone
    assert adapter_of(tmp_path / "runs/advanced_config").is_file()


@pytest.mark.extended
@pytest.mark.seed("S3-049", "S3-077", "S3-079")
def test_direct_trainer_usage(run: Run, tmp_path: Path) -> None:
    first, second = run("direct_trainer_usage", 2, "--epochs", 1)
    assert "64 samples on 2 process(es)" in first
    assert "epoch" not in second
    assert adapter_of(tmp_path / "runs/direct_trainer_usage").is_file()


@pytest.mark.extended
@pytest.mark.seed("S0-013", "S0-014")
def test_multi_gpu_training_basic(run: Run, tmp_path: Path) -> None:
    first, _ = run("multi_gpu_training", 2, "--max-steps", 2)
    assert "2 steps on 2 process(es)" in first
    assert adapter_of(tmp_path / "runs/multi_gpu_training").is_file()


@extended
@pytest.mark.seed("S0-014", "S0-015", "S0-016", "S0-116")
def test_multi_gpu_training_advanced(run: Run, tmp_path: Path) -> None:
    run("multi_gpu_training", 2, "--advanced", "--max-steps", 2)
    output = tmp_path / "runs/multi_gpu_training"
    assert (output / "checkpoint-2/manifest.json").is_file()
    first, _ = run("multi_gpu_training", 2, "--advanced", "--max-steps", 3, "--resume")
    assert "3 steps on 2 process(es)" in first
    assert (output / "checkpoint-3/manifest.json").is_file()


@extended
@pytest.mark.seed("S2-076")
@pytest.mark.parametrize(("mode", "processes"), [("ddp", 2), ("split", 1), ("single", 1)])
def test_multi_gpu_training_example(run: Run, tmp_path: Path, mode: str, processes: int) -> None:
    first, *others = run("multi_gpu_training_example", processes, "--mode", mode, "--max-steps", 1)
    assert f"1 steps; {processes} process(es), 0 GPU(s) visible" in first
    assert not [other for other in others if "steps" in other]
    assert adapter_of(tmp_path / "runs/multi_gpu_training_example").is_file()


def test_custom_loop(run: Run, tmp_path: Path) -> None:
    first, second = run("custom_loop", 2, "--max-steps", 5)
    assert "step 5: step, loss" in first
    assert "5 steps on 2 process(es)" in first
    assert second == ""
    assert adapter_of(tmp_path / "runs/custom_loop").is_file()


def test_every_example_is_run_here_or_by_another_test() -> None:
    tested = Path(__file__).read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f'"{script.stem}"' in tested or script.stem in ELSEWHERE, script
    for name, test in ELSEWHERE.items():
        assert name in (Path(__file__).parents[1] / "e2e" / test).read_text()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_an_example_is_short_and_says_how_to_run_it(script: Path) -> None:
    code = script.read_text()
    assert f"python examples/{script.name}" in (ast.get_docstring(ast.parse(code)) or "")
    assert len(code.splitlines()) <= 130


def test_tiny_inputs_of_several_ranks(tmp_path: Path) -> None:
    first = write_tiny_inputs(tmp_path / "tiny")
    before = {path: path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()}
    assert write_tiny_inputs(tmp_path / "tiny") == first
    assert write_tiny_inputs(tmp_path / "other") != first
    assert len(before) >= 4
    assert all(path.read_bytes() == data for path, data in before.items())
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "other"}, "no scratch folder is left"

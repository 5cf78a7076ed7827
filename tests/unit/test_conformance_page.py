"""docs/conformance.md is what the markers of the tests say, and cannot say more: see docs/generate_conformance.py."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests import promises
from tests.seed_blocks import BLOCKS, EDITS, MODULES, adapted, read_blocks

ROOT = Path(__file__).parents[2]
COUNTS = {"S0": 121, "S1": 137, "S2": 82, "S3": 93, "S4": 167}
CONFLICTS = 28
BLOCKS_SHA256 = "7bbcf496abbd5651d2d0c750ca5e7787fcf2255a8650b88b5e6d3428ce777615"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    name = "generate_conformance"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs/generate_conformance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(page: ModuleType) -> None:
    written = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    assert written == page.render(), "run: python docs/generate_conformance.py"


def test_every_promise_has_one_row(page: ModuleType) -> None:
    counted = Counter(promise.item for promises in page.read_promises().values() for promise in promises)
    expected = {f"{document}-{number:03d}" for document, count in COUNTS.items() for number in range(1, count + 1)}
    expected |= {f"C{number}" for number in range(1, CONFLICTS + 1)} | set(read_blocks())
    assert counted == dict.fromkeys(expected, 1)


def test_code_blocks_change_in_import_lines_and_listed_edits_alone() -> None:
    assert hashlib.sha256(BLOCKS.read_bytes()).hexdigest() == BLOCKS_SHA256, (
        "they are the documents', and do not change"
    )
    assert len(read_blocks()) == 58
    for name, block in read_blocks().items():
        if name not in EDITS:
            for ours, theirs in zip(adapted(name).splitlines(), block.splitlines(), strict=True):
                assert ours == theirs or theirs.split()[1] in MODULES, name


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('@pytest.mark.seed("S9-001")\ndef test_a(): ...', "S9-001 is not in docs/promises.txt"),
        ('@pytest.mark.seed("S2-013")\ndef test_a(): ...', "S2-013 is refused"),
        ('pytestmark = pytest.mark.seed("S0-001")\ndef test_a(): ...', "write seed markers as decorators"),
        (
            '@pytest.mark.seed("S4-160")\ndef test_a(): ...\n'
            '@pytest.mark.seed("S4-160", partly="some")\ndef test_b(): ...',
            "S4-160 is marked as done by one test and as partly by another",
        ),
    ],
)
def test_markers_that_are_wrong(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(source)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=message):
        page.load()


def test_states_come_from_markers(page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, source in (
        ("tests/unit", '@pytest.mark.seed("S0-001", *("S0-002", "S0-003"))\ndef test_a(): ...'),
        ("tests/gpu", '@pytest.mark.seed("S0-002", "S0-004")\ndef test_b(): ...'),
        ("tests/e2e", '@pytest.mark.seed("S0-005", partly="half of it")\ndef test_c(): ...'),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_it.py").write_text(source)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    found = {promise.item: promise for promises in page.load().values() for promise in promises}
    states = [found[f"S0-00{number}"].state for number in range(1, 7)]
    assert states == ["done", "done", "done", "done on a GPU", "partly", "not yet"]
    assert found["S0-002"].tests == ["tests/gpu/test_it.py::test_b", "tests/unit/test_it.py::test_a"]
    assert found["S2-013"].state == "refused"


@pytest.mark.parametrize(("folder", "failed"), [("unit", 3), ("gpu", 0)])
def test_a_skipped_promise_fails(tmp_path: Path, folder: str, failed: int) -> None:
    """In `make test`; tests/gpu is skipped there."""
    (tmp_path / folder).mkdir()
    body = "@pytest.mark.seed('S0-001')\n@pytest.mark.{}\ndef test_{}():\n    assert {}\n"
    cases = [body.format("skip", "a", 1), body.format("xfail", "b", 0), body.format("timeout(9)", "c", 1)]
    (tmp_path / folder / "test_one.py").write_text("import pytest\n" + "\n".join(cases))
    (tmp_path / folder / "test_two.py").write_text(
        "import pytest\npytest.importorskip('no_such_library')\n" + body.format("skip", "d", 1)
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = seed\n")

    class Outcomes:
        def __init__(self) -> None:
            self.failed: list[str] = []
            self.passed = 0

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.failed += [report.nodeid] * report.failed
            self.passed += report.passed and report.when == "call"

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            self.failed += [report.nodeid] * report.failed

    outcomes = Outcomes()
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "--continue-on-collection-errors",
        promises.OPTION,
        str(tmp_path),
    ]
    pytest.main(arguments, plugins=[promises, outcomes])
    assert len(outcomes.failed) == failed
    assert outcomes.passed == 1

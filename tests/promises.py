"""Pytest hooks: with `--no-skipped-promises`, a test that shows a promise (marker `seed`) fails if it is skipped.

docs/conformance.md says "done" where a test is marked; `make test` and `make test-rest` pass the option, so that a
green run means that the tests were run. Those of tests/gpu run on a GPU host, and count as such on the page.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

OPTION = "--no-skipped-promises"
MESSAGE = "shows a promise of docs/conformance.md (marker `seed`), and must not be skipped here"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="fail tests with the marker seed that are skipped")


def _required(config: pytest.Config, path: Path) -> bool:
    return bool(config.getoption(OPTION)) and path.parent.name != "gpu"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.get_closest_marker("seed") and _required(item.config, item.path):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} {MESSAGE}: {report.longrepr}"
        vars(report).pop("wasxfail", None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """For modules that skip themselves."""
    report = yield
    skipped = report.outcome == "skipped" and isinstance(collector, pytest.Module)
    if skipped and "mark.seed(" in collector.path.read_text("utf-8") and _required(collector.config, collector.path):
        report.outcome, report.longrepr = "failed", f"{collector.nodeid} {MESSAGE}: {report.longrepr}"
    return report

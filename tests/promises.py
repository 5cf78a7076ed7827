"""Pytest hooks about the marker `seed`, which names the promises that a test shows.

With `--no-skipped-promises`, a marked test fails if it is skipped. docs/conformance.md says "done" where a test is
marked; CI passes the option, so that a green run means that the tests were run. Elsewhere a test whose program is not
installed (Chromium, Prometheus) is skipped with a line. Those of tests/gpu run on a GPU host, and count as such on the
page.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

OPTION = "--no-skipped-promises"
MESSAGE = "shows a promise of docs/conformance.md (marker `seed`), and must not be skipped here"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-promises", metavar="FILE", help="write the markers seed of collected tests")
    parser.addoption(OPTION, action="store_true", help="fail tests with the marker seed that are skipped")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write [test, items, keywords] for docs/generate_conformance.py."""
    path = session.config.getoption("--list-promises")
    if path:
        found = [
            [item.nodeid.partition("[")[0], mark.args, mark.kwargs]
            for item in session.items
            for mark in item.iter_markers("seed")
        ]
        Path(path).write_text(json.dumps(found), encoding="utf-8")


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

"""Fixture of the fork server for ranks, which lives as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launching import LIMIT_SECONDS, SERVER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longer timeouts: the first test of a file waits for several launches."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1.5 * LIMIT_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    SERVER.start()
    yield
    SERVER.end()

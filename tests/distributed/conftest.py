"""The process that ranks are forked from lives as long as the session: no test may leave one behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.launching import SERVER


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    SERVER.start()
    yield
    SERVER.end()

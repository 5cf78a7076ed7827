"""The process that ranks are forked from ends with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.launching import SERVER


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    yield
    SERVER.end()

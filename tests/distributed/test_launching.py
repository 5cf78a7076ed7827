"""The launcher of distributed tests: failures of ranks are reported, and no process is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.distributed.launching import RankServer

pytestmark = pytest.mark.extended


@pytest.fixture
def server() -> Iterator[RankServer]:
    own = RankServer()
    yield own
    own.end()


def ranks() -> list[psutil.Process]:
    """Processes below the server."""
    return [grandchild for child in psutil.Process().children() for grandchild in child.children(recursive=True)]


def test_failing_rank_ends_the_others_and_is_reported(server: RankServer) -> None:
    for way, expected in (("raise", "rank 1 is unwell"), ("exit", "exit code 7")):
        with pytest.raises(AssertionError, match=expected):
            server.run("failing_ranks", 3, way, timeout=300)
        assert not ranks()
        server.run("failing_ranks", 3, "end")
    with pytest.raises(AssertionError, match="no_such_script"):
        server.run("no_such_script", 2)


def test_ranks_that_time_out_are_killed(server: RankServer) -> None:
    server.run("failing_ranks", 2, "end")
    with pytest.raises(TimeoutError, match="failing_ranks did not end within 1 s"):
        server.run("failing_ranks", 2, "sleep", timeout=1)
    assert not ranks()
    server.run("failing_ranks", 2, "end")

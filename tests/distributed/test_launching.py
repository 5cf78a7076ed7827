"""What distributed tests are started with: no failure of a rank goes unnoticed, and none leaves anybody behind."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.distributed.launching import RankServer


@pytest.fixture
def server() -> Iterator[RankServer]:
    own = RankServer()
    yield own
    own.end()


def ranks() -> list[psutil.Process]:
    """Below the server, which stays."""
    return [grandchild for child in psutil.Process().children() for grandchild in child.children(recursive=True)]


def test_a_rank_that_fails_ends_the_others_and_is_heard(server: RankServer) -> None:
    for way, told in (("raise", "rank 1 is unwell"), ("exit", "exit code 7")):
        with pytest.raises(AssertionError, match=told):
            server.run("failing_ranks", 3, way, timeout=300)
        assert not ranks()
        server.run("failing_ranks", 3, "end")
    with pytest.raises(AssertionError, match="no_such_script"):
        server.run("no_such_script", 2)


def test_ranks_that_take_too_long_are_ended(server: RankServer) -> None:
    server.run("failing_ranks", 2, "end")
    with pytest.raises(TimeoutError, match="failing_ranks did not end within 1 s"):
        server.run("failing_ranks", 2, "sleep", timeout=1)
    assert not ranks()
    server.run("failing_ranks", 2, "end")

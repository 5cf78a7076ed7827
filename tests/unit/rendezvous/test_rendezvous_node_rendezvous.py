"""Coordination of node agents through the store of node 0. Agents are threads here."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from pantheraml.base.errors import LaunchError
from pantheraml.launch.nodes import Assignment, NodeSpec
from pantheraml.launch.outcomes import Outcome, RestartDecision
from pantheraml.rendezvous import node_rendezvous
from pantheraml.rendezvous.node_rendezvous import LocalRanks, NodeRendezvous
from tests.ports import reserved_port

Outcomes = dict[int, Outcome | None]


PATIENCE = 100
"""Timeout in seconds for nodes that do join."""


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def assignment(port: int, number: int, *, count: int = 2, processes: int = 1, timeout: int = PATIENCE) -> Assignment:
    node = NodeSpec(count, number, "127.0.0.1", port)
    return Assignment(node, processes, "/run", timeout, 0, ("killed",), 1)


def together(*agents: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(agents)) as pool:
        return [pool.submit(agent) for agent in agents]


def judge(outcomes: Outcomes) -> RestartDecision:
    """Report the exit codes; restart unless all succeeded."""
    codes = ["gone" if outcome is None else str(outcome.exit_code) for outcome in outcomes.values()]
    return RestartDecision(1, " ".join(codes), restarts_run=set(codes) != {"0"})


def not_stopping() -> bool:
    return False


HELD: list[NodeRendezvous] = []
"""Keeps hosted stores alive until the other nodes have read them."""


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    HELD.clear()


def agent(
    port: int, number: int, outcomes: list[Outcome], *, timeouts: Sequence[int] = (PATIENCE, PATIENCE), **settings: Any
) -> list[Any]:
    """Run one start per outcome."""
    seen: list[Any] = []
    for turn, (outcome, timeout) in enumerate(zip(outcomes, timeouts, strict=False)):
        rendezvous = NodeRendezvous(assignment(port, number, timeout=timeout, **settings))
        HELD.append(rendezvous)
        seen.append((rendezvous.ranks, rendezvous.agree_on_start(turn, f"start {turn}" if turn else None)))
        rendezvous.tell(outcome)
        verdict = rendezvous.verdict(judge, not_stopping)
        assert verdict is not None
        seen.append((rendezvous.others_failed(), verdict.message))
    return seen


def test_each_start_has_a_fresh_rendezvous(port: int) -> None:
    killed, followed, well = Outcome(71, "killed"), Outcome(None), Outcome(0)
    first, second = together(
        lambda: agent(port, 0, [followed, well], processes=2), lambda: agent(port, 1, [killed, well], processes=3)
    )
    assert first.result() == [
        (LocalRanks(0, 2, 5), (0, None)),
        (True, "None 71"),
        (LocalRanks(0, 2, 5), (1, "start 1")),
        (False, "0 0"),
    ]
    assert [seen[0] for seen in second.result()[::2]] == [LocalRanks(2, 3, 5)] * 2
    assert second.result()[1::2] == first.result()[1::2]


def test_lost_node_rejoins(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new agent learns the start number from node 0."""
    monkeypatch.setattr(node_rendezvous, "ANSWER_SECONDS", 0.5)

    def lose_power() -> list[Any]:
        NodeRendezvous(assignment(port, 1)).agree_on_start(0, None)
        return agent(port, 1, [Outcome(0)])

    first, second = together(lambda: agent(port, 0, [Outcome(70, "lost"), Outcome(0)]), lose_power)
    assert [seen[1] for seen in first.result()[1::2]] == ["70 gone", "0 0"]
    assert second.result()[0][1] == (1, "start 1")


def test_lost_node_that_does_not_rejoin_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "ANSWER_SECONDS", 0.5)

    def lose_power() -> None:
        NodeRendezvous(assignment(port, 1)).agree_on_start(0, None)

    # node 0 waits long for the first rendezvous, and two seconds once the other node is gone
    first, _ = together(lambda: agent(port, 0, [Outcome(70, "lost"), Outcome(0)], timeouts=(PATIENCE, 2)), lose_power)
    with pytest.raises(LaunchError, match=r"1 of 2 nodes joined within 2 s; missing: node 1\."):
        first.result()


def test_stopping_node_does_not_wait_for_the_decision(port: int) -> None:
    left = Event()

    def leaving() -> RestartDecision | None:
        rendezvous = NodeRendezvous(assignment(port, 1))
        rendezvous.tell(Outcome.of_stop(signal.SIGTERM))
        verdict = rendezvous.verdict(judge, lambda: True)
        left.set()
        return verdict

    def staying() -> RestartDecision | None:
        rendezvous = NodeRendezvous(assignment(port, 0))
        assert left.wait(PATIENCE)
        rendezvous.tell(Outcome(0))
        return rendezvous.verdict(judge, not_stopping)

    first, second = together(staying, leaving)
    assert second.result() is None
    assert first.result() == RestartDecision(1, "0 143", restarts_run=True)


def test_lost_node_0(port: int) -> None:
    joined, gone = Event(), Event()

    def host() -> None:
        rendezvous = NodeRendezvous(assignment(port, 0))
        assert joined.wait(PATIENCE)
        del rendezvous
        gone.set()

    def guest() -> str:
        rendezvous = NodeRendezvous(assignment(port, 1))
        joined.set()
        assert gone.wait(PATIENCE)
        assert not rendezvous.others_failed()
        rendezvous.tell(Outcome(0))
        with pytest.raises(LaunchError) as raised:
            rendezvous.verdict(judge, not_stopping)
        return str(raised.value)

    _, second = together(host, guest)
    assert f"Node 1 lost the store at 127.0.0.1:{port}: node 0 is gone." in second.result()

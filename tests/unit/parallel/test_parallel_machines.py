"""Agents of several machines: what they tell each other. They are threads here; a store neither knows nor cares."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from pantheraml.base.errors import LaunchError
from pantheraml.launch.machines import Assignment, Machine
from pantheraml.launch.outcomes import Outcome, Verdict
from pantheraml.parallel import machines
from pantheraml.parallel.machines import Meeting, RanksHere
from tests.ports import reserved_port

Outcomes = dict[int, Outcome | None]


PATIENCE = 100
"""Seconds for those who do come."""


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def assignment(port: int, number: int, *, count: int = 2, processes: int = 1, timeout: int = PATIENCE) -> Assignment:
    machine = Machine(count, number, "127.0.0.1", port)
    return Assignment(machine, processes, "/run", timeout, 0, ("killed",), 1)


def together(*agents: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(agents)) as pool:
        return [pool.submit(agent) for agent in agents]


def judge(outcomes: Outcomes) -> Verdict:
    """Tells what it heard; all start again unless all went well."""
    codes = ["gone" if outcome is None else str(outcome.exit_code) for outcome in outcomes.values()]
    return Verdict(1, " ".join(codes), starts_again=set(codes) != {"0"})


def patient() -> bool:
    return False


HELD: list[Meeting] = []
"""By those who host a store, until the others have read it."""


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    HELD.clear()


def agent(
    port: int, number: int, outcomes: list[Outcome], *, timeouts: Sequence[int] = (PATIENCE, PATIENCE), **settings: Any
) -> list[Any]:
    """Takes part in as many starts as it has outcomes."""
    seen: list[Any] = []
    for turn, (outcome, timeout) in enumerate(zip(outcomes, timeouts, strict=False)):
        meeting = Meeting(assignment(port, number, timeout=timeout, **settings))
        HELD.append(meeting)
        seen.append((meeting.ranks, meeting.agree_on_start(turn, f"start {turn}" if turn else None)))
        meeting.tell(outcome)
        verdict = meeting.verdict(judge, patient)
        assert verdict is not None
        seen.append((meeting.others_failed(), verdict.told))
    return seen


def test_each_start_is_a_fresh_one(port: int) -> None:
    killed, followed, well = Outcome(71, "killed"), Outcome(None), Outcome(0)
    first, second = together(
        lambda: agent(port, 0, [followed, well], processes=2), lambda: agent(port, 1, [killed, well], processes=3)
    )
    assert first.result() == [
        (RanksHere(0, 2, 5), (0, None)),
        (True, "None 71"),
        (RanksHere(0, 2, 5), (1, "start 1")),
        (False, "0 0"),
    ]
    assert [told[0] for told in second.result()[::2]] == [RanksHere(2, 3, 5)] * 2
    assert second.result()[1::2] == first.result()[1::2]


def test_a_machine_that_says_nothing_and_comes_back(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new agent knows of no earlier start, and learns from machine 0 which one this is."""
    monkeypatch.setattr(machines, "ANSWER_SECONDS", 0.5)

    def power_cut() -> list[Any]:
        Meeting(assignment(port, 1)).agree_on_start(0, None)
        return agent(port, 1, [Outcome(0)])

    first, second = together(lambda: agent(port, 0, [Outcome(70, "lost"), Outcome(0)]), power_cut)
    assert [seen[1] for seen in first.result()[1::2]] == ["70 gone", "0 0"]
    assert second.result()[0][1] == (1, "start 1")


def test_a_machine_that_does_not_come_back(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "ANSWER_SECONDS", 0.5)

    def power_cut() -> None:
        Meeting(assignment(port, 1)).agree_on_start(0, None)

    # machine 0 waits for the other as long as it takes, and when that is gone, for two seconds
    first, _ = together(lambda: agent(port, 0, [Outcome(70, "lost"), Outcome(0)], timeouts=(PATIENCE, 2)), power_cut)
    with pytest.raises(LaunchError, match=r"1 of 2 machines came within 2 s; missing: machine 1\."):
        first.result()


def test_somebody_in_a_hurry_does_not_wait_for_the_verdict(port: int) -> None:
    left = Event()

    def leaving() -> Verdict | None:
        meeting = Meeting(assignment(port, 1))
        meeting.tell(Outcome.of_stop(signal.SIGTERM))
        verdict = meeting.verdict(judge, lambda: True)
        left.set()
        return verdict

    def staying() -> Verdict | None:
        meeting = Meeting(assignment(port, 0))
        assert left.wait(PATIENCE)
        meeting.tell(Outcome(0))
        return meeting.verdict(judge, patient)

    first, second = together(staying, leaving)
    assert second.result() is None
    assert first.result() == Verdict(1, "0 143", starts_again=True)


def test_machine_0_is_gone(port: int) -> None:
    met, gone = Event(), Event()

    def host() -> None:
        meeting = Meeting(assignment(port, 0))
        assert met.wait(PATIENCE)
        del meeting
        gone.set()

    def guest() -> str:
        meeting = Meeting(assignment(port, 1))
        met.set()
        assert gone.wait(PATIENCE)
        assert not meeting.others_failed()
        meeting.tell(Outcome(0))
        with pytest.raises(LaunchError) as raised:
            meeting.verdict(judge, patient)
        return str(raised.value)

    _, second = together(host, guest)
    assert f"Machine 1 lost the store at 127.0.0.1:{port}: machine 0 is gone." in second.result()

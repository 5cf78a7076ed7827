"""The ranks of one node, here shells, end together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.errors import LaunchError
from pantheraml.launch import rank_processes
from pantheraml.launch.local import StopRequests
from pantheraml.launch.outcomes import Outcome
from pantheraml.launch.rank_processes import RankWatch, run_ranks

PATIENCE = 100.0
"""Timeout in seconds for things that are expected to happen."""


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "FAILURE_SECONDS", 0.3)
    monkeypatch.setattr(rank_processes, "KILL_AFTER_SECONDS", 1.0)


def outcome_of(
    script: str,
    *,
    ranks: int = 2,
    stops: StopRequests | None = None,
    others_failed: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Outcome of shells with $RANK from 4 on."""
    environments = [child_environment(RANK=str(4 + number)) for number in range(ranks)]
    reported: list[Outcome] = []
    ended: list[set[psutil.Process]] = []
    before = set(psutil.Process().children())  # long-lived ones of other tests

    def report(outcome: Outcome) -> None:
        reported.append(outcome)
        ended.append(set(psutil.Process().children()) - before)

    run_ranks(
        ["sh", "-c", script], environments, 4, RankWatch(stops or StopRequests(), PATIENCE, others_failed, report)
    )
    if stops is not None:
        assert ended == [set()], "a stop is reported after ranks have saved, or other nodes would end theirs too soon"
    assert set(psutil.Process().children()) == before
    assert len(reported) == 1
    return reported[0]


def test_all_ranks_succeed() -> None:
    assert outcome_of("exit 0") == Outcome(0)


def test_a_killed_rank_is_the_cause(tmp_path: Path) -> None:
    """Rank 4 fails once rank 5 is dead, as if it had lost its connection."""
    own, alive = tmp_path / "pid", f'grep -qs "State:.[RSD]" /proc/$(cat {tmp_path}/pid)/status'
    dies = f"test $RANK = 5 && echo $$ > {own}.new && mv {own}.new {own} && kill -9 $$"
    script = f"{dies}; until test -e {own}; do sleep 0.02; done; while {alive}; do sleep 0.02; done; exit 70"
    assert outcome_of(script) == Outcome.of_ranks({5: -signal.SIGKILL})


def test_remaining_ranks_are_ended_with_their_children(tmp_path: Path) -> None:
    begin, up = time.monotonic(), tmp_path / "up"
    fails = f"test $RANK = 5 && until test -e {up}; do sleep 0.02; done && exit 3"
    stubborn = f'trap "" INT TERM; {fails}; setsid sleep 100 & touch {up}; sleep 100; sleep 100'
    assert outcome_of(stubborn) == Outcome.of_ranks({5: 3})
    assert time.monotonic() - begin < 50


def test_ranks_end_when_another_node_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, then SIGINT: rank 0 then does not save."""
    monkeypatch.setattr(
        rank_processes, "SIGNAL_GAP_SECONDS", 2.0
    )  # a shell that gets both at once handles SIGINT first
    monkeypatch.setattr(rank_processes, "KILL_AFTER_SECONDS", PATIENCE)
    log, up = tmp_path / "log", tmp_path / "up"
    traps = f'trap "echo TERM >> {log}" TERM; trap "echo INT >> {log}; exit 0" INT'
    script = f"{traps}; touch {up}; while true; do sleep 0.02; done"
    assert outcome_of(script, ranks=1, others_failed=up.exists) == Outcome(None)
    assert log.read_text() == "TERM\nINT\n"


def test_own_error_is_reported_after_another_node_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "FAILURE_SECONDS", PATIENCE)
    assert outcome_of("sleep 0.1; exit 17", ranks=1, others_failed=lambda: True) == Outcome.of_ranks({4: 17})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_is_forwarded_and_awaited(tmp_path: Path, number: signal.Signals) -> None:
    stops = StopRequests()
    log = tmp_path / "log"
    saves = f'trap "sleep 0.5; echo saved >> {log}; exit 0" {number.name[3:]}'
    script = f"{saves}; touch {tmp_path}/up-$RANK; while true; do sleep 0.02; done"

    def stop_when_up() -> bool:
        if stops.count == 0 and len(list(tmp_path.glob("up-*"))) == 2:
            stops.receive(number)
        return False

    assert outcome_of(script, stops=stops, others_failed=stop_when_up) == Outcome.of_stop(number)
    assert log.read_text() == "saved\nsaved\n"


def test_missing_command() -> None:
    with pytest.raises(LaunchError, match="could not be started"):
        run_ranks(["/no/such/command"], [{}], 0, RankWatch(StopRequests(), 1.0, lambda: False, lambda outcome: None))

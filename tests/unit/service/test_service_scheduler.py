"""Which jobs start, on which devices, and why the others wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pantheraml.service.jobs.scheduler import (
    AGING_SECONDS,
    Allowance,
    Place,
    Running,
    WaitingJob,
    decide,
    ordered,
    place_before,
)

NOW = 1_000_000.0


def job(
    name: str,
    *,
    devices: int = 1,
    owner: str = "a",
    priority: int = 0,
    at: float = NOW,
    seconds: float | None = None,
    on: set[str] | None = None,
) -> WaitingJob:
    return WaitingJob(name, owner, priority, at, devices, seconds, None if on is None else frozenset(on))


def names(jobs: list[WaitingJob]) -> list[str]:
    return [each.id for each in jobs]


def test_the_order_is_priority_then_usage_then_arrival() -> None:
    queue = [
        job("late", at=NOW - 1),
        job("early", at=NOW - 2),
        job("heavy-user", owner="b", at=NOW - 900),
        job("urgent", owner="b", priority=1),
    ]
    assert names(ordered(queue, {"b": 3600.0}, NOW)) == ["urgent", "early", "late", "heavy-user"]


def test_waiting_makes_a_job_as_urgent_as_one_of_higher_priority() -> None:
    queue = [job("urgent", priority=1, at=NOW), job("patient", at=NOW - 2 * AGING_SECONDS)]
    assert names(ordered(queue, {}, NOW)) == ["patient", "urgent"]
    assert names(ordered([queue[0], job("patient", at=NOW - 1)], {}, NOW)) == ["urgent", "patient"]


@pytest.mark.seed("S4-036", "S4-164")
def test_free_devices_are_given_once() -> None:
    decision = decide([job("1", at=1), job("2", at=2), job("3", at=3)], [], ["gpu:0", "gpu:1"], {}, {}, NOW)
    assert decision.starts == {"1": ["gpu:0"], "2": ["gpu:1"]}
    assert decision.waiting["3"].position == 1
    assert "needs 1 of 2 devices; 0 free" in decision.waiting["3"].text
    taken = decide([job("1")], [Running("0", "a", None)], ["gpu:0", "gpu:1"], {"gpu:0": "0"}, {}, NOW)
    assert taken.starts == {"1": ["gpu:1"]}


@pytest.mark.seed("S4-154")
def test_small_jobs_fill_a_gap_only_if_they_do_not_delay_the_large_one() -> None:
    running = [Running("r", "a", NOW + 100)]
    held = {"gpu:0": "r"}
    queue = [
        job("large", devices=2, at=1),
        job("long", at=2, seconds=101),
        job("unknown", at=3),
        job("short", at=4, seconds=99),
    ]
    decision = decide(queue, running, ["gpu:0", "gpu:1"], held, {}, NOW)
    assert decision.starts == {"short": ["gpu:1"]}
    assert decision.waiting["large"].estimated_start == NOW + 100
    assert "would delay large" in decision.waiting["long"].text
    assert "would delay large" in decision.waiting["unknown"].text
    assert [decision.waiting[name].position for name in ("large", "long", "unknown")] == [1, 2, 3]


def test_nothing_is_guessed_where_the_plan_does_not_tell() -> None:
    queue = [job("large", devices=2, at=1), job("short", at=2, seconds=1)]
    decision = decide(queue, [Running("r", "a", None)], ["gpu:0", "gpu:1"], {"gpu:0": "r"}, {}, NOW)
    assert decision.starts == {}
    assert decision.waiting["large"].estimated_start is None


def test_everybody_is_told_when_it_is_their_turn() -> None:
    """As long as all before it have predicted how long they take; by then all take their turn."""
    running = [Running("r", "a", NOW + 100), Running("s", "a", NOW + 50)]
    queue = [job("1", at=1, seconds=30), job("2", at=2, seconds=10), job("3", at=3), job("4", at=4), job("5", at=5)]
    waiting = decide(queue, running, ["gpu:0", "gpu:1"], {"gpu:0": "r", "gpu:1": "s"}, {}, NOW).waiting
    assert [waiting[name].estimated_start for name in "12345"] == [NOW + 50, NOW + 80, NOW + 90, NOW + 100, None]
    both = [job("1", at=1, devices=2, seconds=7), job("2", at=2, devices=3), job("3", at=3)]
    waiting = decide(both, running, ["gpu:0", "gpu:1"], {"gpu:0": "r", "gpu:1": "s"}, {}, NOW).waiting
    assert [waiting[name].estimated_start for name in "123"] == [NOW + 100, None, NOW + 107]


def runs(name: str, *, devices: int = 1, priority: int = 0, ran: float = 60.0, waited: float = 0.0) -> Running:
    place = WaitingJob(name, "a", priority, NOW - ran - waited, devices, None, ran=ran)
    return Running(name, "a", None, place)


def paused_for(
    waiting: list[WaitingJob], running: list[Running], devices: int = 4, held: list[str] | None = None
) -> dict[str, str]:
    names = [f"gpu:{number}" for number in range(devices)]
    holders = held or [each.id for each in running for _ in range(each.if_paused.devices if each.if_paused else 1)]
    decision = decide(waiting, running, names, dict(zip(names, holders, strict=False)), {}, NOW)
    if decision.pauses:
        (first,) = set(decision.pauses.values())
        assert (decision.waiting[first].estimated_start, decision.starts) == (NOW, {})
        assert "makes room" in decision.waiting[first].text
    return decision.pauses


def test_a_job_of_higher_priority_has_others_paused() -> None:
    full = [runs("old", devices=2, ran=900), runs("new", devices=1, ran=5), runs("low", devices=1, priority=-1)]
    assert paused_for([job("urgent", priority=1)], full) == {"low": "urgent"}
    assert paused_for([job("urgent", priority=1, devices=2)], full) == {"low": "urgent", "new": "urgent"}
    assert paused_for([job("urgent", priority=1, devices=3)], full) == {"low": "urgent", "old": "urgent"}
    assert paused_for([job("equal", at=NOW - 7 * AGING_SECONDS)], full[:2], 3) == {}, "waiting alone pauses nobody"
    assert paused_for([job("urgent", priority=1, on={"gpu:9"})], full) == {}
    protected = [replace(each, if_paused=None) for each in full]
    assert paused_for([job("urgent", priority=1)], protected, held=["old", "old", "new", "low"]) == {}


def test_nobody_is_paused_in_vain() -> None:
    urgent = job("urgent", priority=1, devices=2)
    assert paused_for([urgent], [runs("low", priority=-1), runs("higher", priority=2)], 2) == {}
    leaving = Running("leaving", "a", NOW, None, is_leaving=True)
    assert paused_for([urgent], [leaving, runs("low")], 2) == {"low": "urgent"}
    assert paused_for([urgent], [leaving, runs("low")], 3, ["leaving", "leaving", "low"]) == {}
    assert paused_for([urgent, job("next", priority=1, at=NOW + 1)], [runs("low", devices=3)], 4) == {"low": "urgent"}


def test_a_paused_job_does_not_come_before_the_one_that_it_made_room_for() -> None:
    """Running time is no waiting time; a job that has waited for hours gains priority, and continues."""
    urgent = job("urgent", priority=2)
    assert paused_for([urgent], [runs("long", ran=50 * AGING_SECONDS)], 1) == {"long": "urgent"}
    assert paused_for([urgent], [runs("patient", waited=2 * AGING_SECONDS)], 1) == {}
    place = runs("long", ran=50 * AGING_SECONDS).if_paused
    assert place is not None
    assert names(ordered([place, urgent], {}, NOW)) == ["urgent", "long"]


def test_a_job_is_given_only_devices_that_it_may_have() -> None:
    both = ["gpu:0", "gpu:1", "gpu:2"]
    assert decide([job("1", on={"gpu:1"})], [], both, {}, {}, NOW).starts == {"1": ["gpu:1"]}
    waits = decide([job("1", on={"gpu:1"})], [Running("r", "a", NOW + 9)], both, {"gpu:1": "r"}, {}, NOW)
    assert waits.starts == {}
    assert (waits.waiting["1"].text, waits.waiting["1"].estimated_start) == ("needs 1 of 1 devices; 0 free", NOW + 9)
    elsewhere = decide([job("1", on={"gpu:1"})], [Running("r", "a", NOW + 9)], both, {"gpu:0": "r"}, {}, NOW)
    assert elsewhere.starts == {"1": ["gpu:1"]}


def test_others_pass_a_waiting_job_on_devices_that_it_may_not_have() -> None:
    queue = [job("first", on={"gpu:1"}, at=1), job("second", at=2), job("third", at=3)]
    devices = ["gpu:0", "gpu:1", "gpu:2"]
    decision = decide(queue, [Running("r", "a", None)], devices, {"gpu:1": "r"}, {}, NOW)
    assert decision.starts == {"second": ["gpu:0"], "third": ["gpu:2"]}
    assert list(decision.waiting) == ["first"]


def test_disabled_devices_are_named() -> None:
    decision = decide(
        [job("1", devices=2, at=1), job("2")], [], ["gpu:0", "gpu:1"], {}, {}, NOW, unusable={"gpu:1": "disabled"}
    )
    assert decision.starts == {"2": ["gpu:0"]}, "nobody knows when the first one can start"
    assert decision.waiting["1"].text == "needs 2 of 2 devices; 1 free (gpu:1 disabled)"


def test_a_moved_job_stays_before_the_other_one() -> None:
    """Also when that one grows older, or leaves the queue."""
    queue = [job("1", at=NOW - 30), job("2", at=NOW - 20), job("3", owner="b", at=NOW - 10)]

    def moved(order: list[WaitingJob], name: str, before: str | None) -> list[WaitingJob]:
        place = place_before(order, name, before)
        return ordered([replace(each, place=place) if each.id == name else each for each in order], usage, NOW)

    usage = {"b": 60.0}
    order = moved(ordered(queue, usage, NOW), "3", "2")
    assert names(order) == ["1", "3", "2"]
    assert names(moved(order, "2", "3")) == ["1", "2", "3"]
    assert names(moved(order, "1", None)) == ["3", "2", "1"]
    assert names(moved(order, "2", "1")) == ["2", "1", "3"]
    later = NOW + 2 * AGING_SECONDS
    newcomer = job("4", priority=1, at=later)
    assert names(ordered([*order[1:], newcomer], usage, later)) == ["3", "2", "4"]
    assert names(ordered([order[1], newcomer, job("5", at=NOW)], usage, later)) == ["3", "5", "4"]


def test_a_job_between_two_that_were_moved() -> None:
    place = Place("a", 0, 1.0, 0.0)
    order = [
        replace(job("x"), place=replace(place, tie=-1.0)),
        replace(job("y"), place=replace(place, tie=0.0)),
        job("z", at=NOW),
    ]
    assert place_before(order, "z", "y").tie == -0.5


def test_a_user_at_the_limit_waits_and_holds_up_nobody() -> None:
    queue = [job("1", at=1), job("2", at=2), job("other", owner="b", at=3)]
    devices = ["gpu:0", "gpu:1", "gpu:2"]
    decision = decide(queue, [], devices, {}, {}, NOW, Allowance(running=1))
    assert set(decision.starts) == {"1", "other"}
    assert decision.waiting["2"].text == "its user runs 1 job(s), as many as are allowed at a time"
    used = decide(queue, [], devices, {}, {}, NOW, Allowance(hours=10), {"a": 10.0, "b": 9.9})
    assert set(used.starts) == {"other"}
    assert used.waiting["1"].text == "its user has used 10.0 of 10 device hours of the last 30 days"


def test_no_job_starts_on_a_gpu_that_failed() -> None:
    devices = ["gpu:0", "gpu:1"]
    decision = decide(
        [job("1", at=1), job("2", devices=2, at=2)], [], devices, {}, {}, NOW, unusable={"gpu:0": "not healthy"}
    )
    assert decision.starts == {"1": ["gpu:1"]}
    assert decision.waiting["2"].text == "needs 2 of 2 devices; 0 free (gpu:0 not healthy)"


SHARES = ["gpu:0:1/2", "gpu:0:2/2", "gpu:1:1/2", "gpu:1:2/2"]
"""Two GPUs, each for two jobs."""


def test_jobs_share_gpus_only_when_all_have_one() -> None:
    queue = [job(str(at), at=at) for at in range(1, 6)]
    decision = decide(queue, [], SHARES, {}, {}, NOW)
    assert decision.starts == {"1": [SHARES[0]], "2": [SHARES[2]], "3": [SHARES[1]], "4": [SHARES[3]]}
    assert decision.waiting["5"].text == "needs 1 of 2 devices; 0 free"


def test_ranks_of_a_job_get_different_gpus() -> None:
    decision = decide([job("1", devices=2, at=1), job("2", devices=2, at=2)], [], SHARES, {}, {}, NOW)
    assert decision.starts == {"1": [SHARES[0], SHARES[2]], "2": [SHARES[1], SHARES[3]]}
    running, held = [Running("a", "a", NOW + 9), Running("b", "a", NOW + 5)], {SHARES[0]: "a", SHARES[1]: "b"}
    waits = decide([job("1", devices=2)], running, SHARES, held, {}, NOW)
    assert waits.starts == {}, "both free shares are of one GPU"
    assert waits.waiting["1"].text == "needs 2 of 2 devices; 1 free"
    assert waits.waiting["1"].estimated_start == NOW + 5
    assert decide([job("1", devices=3)], [], SHARES, {}, {}, NOW).starts == {}, "there are two GPUs"


def test_a_job_may_have_all_shares_of_its_gpus_but_none_of_an_unusable_one() -> None:
    assert decide([job("1", on={"gpu:1"})], [], SHARES, {}, {}, NOW).starts == {"1": [SHARES[2]]}
    decision = decide([job("1"), job("2"), job("3")], [], SHARES, {}, {}, NOW, unusable={"gpu:0": "disabled"})
    assert list(decision.starts.values()) == [[SHARES[2]], [SHARES[3]]]
    assert decision.waiting["3"].text == "needs 1 of 2 devices; 0 free (gpu:0 disabled)"


def test_the_first_job_keeps_a_share_of_each_gpu() -> None:
    """Others may have those beyond: a job cannot use two shares of one GPU."""
    queue = [job("large", devices=2, at=1), job("small", at=2), job("next", at=3)]
    held = {SHARES[2]: "r", SHARES[3]: "r"}
    decision = decide(queue, [Running("r", "a", None)], SHARES, held, {}, NOW)
    assert decision.starts == {"small": [SHARES[1]]}
    assert "would delay large" in decision.waiting["next"].text


def test_a_pause_makes_room_only_where_no_share_is_free() -> None:
    beside = [runs("beside"), runs("there", ran=90), runs("here", ran=30)]
    held = dict(zip(SHARES, ["beside", None, "here", "there"], strict=True))
    taken = {name: holder for name, holder in held.items() if holder}
    decision = decide([job("urgent", devices=2, priority=1)], beside, SHARES, taken, {}, NOW)
    assert decision.pauses == {"here": "urgent"}, "the first GPU has a free share, and one job of the second is enough"


def test_when_shares_free_up() -> None:
    running = [Running(name, "a", NOW + end) for name, end in (("a", 10), ("b", 20), ("c", 30), ("d", 40))]
    held = dict(zip(SHARES, "abcd", strict=True))
    waiting = decide([job("1", at=1, devices=2, seconds=5), job("2", at=2)], running, SHARES, held, {}, NOW).waiting
    assert [waiting[name].estimated_start for name in "12"] == [NOW + 30, NOW + 20]

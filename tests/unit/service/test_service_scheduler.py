"""Who starts, on what, and why the others wait."""

from __future__ import annotations

import pytest

from pantheraml.service.jobs.scheduler import AGING_SECONDS, Running, Waiting, decide, ordered

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
) -> Waiting:
    return Waiting(name, owner, priority, at, devices, seconds, None if on is None else frozenset(on))


def names(jobs: list[Waiting]) -> list[str]:
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
    taken = decide([job("1")], [Running("0", 1, None)], ["gpu:0", "gpu:1"], {"gpu:0": "0"}, {}, NOW)
    assert taken.starts == {"1": ["gpu:1"]}


@pytest.mark.seed("S4-154")
def test_small_jobs_fill_a_gap_only_if_they_do_not_delay_the_large_one() -> None:
    running = [Running("r", 1, NOW + 100)]
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
    decision = decide(queue, [Running("r", 1, None)], ["gpu:0", "gpu:1"], {"gpu:0": "r"}, {}, NOW)
    assert decision.starts == {}
    assert decision.waiting["large"].estimated_start is None


def test_a_job_is_given_only_devices_that_it_may_have() -> None:
    both = ["gpu:0", "gpu:1", "gpu:2"]
    assert decide([job("1", on={"gpu:1"})], [], both, {}, {}, NOW).starts == {"1": ["gpu:1"]}
    waits = decide([job("1", on={"gpu:1"})], [Running("r", 1, NOW + 9)], both, {"gpu:1": "r"}, {}, NOW)
    assert waits.starts == {}
    assert (waits.waiting["1"].text, waits.waiting["1"].estimated_start) == ("needs 1 of 1 devices; 0 free", NOW + 9)
    elsewhere = decide([job("1", on={"gpu:1"})], [Running("r", 1, NOW + 9)], both, {"gpu:0": "r"}, {}, NOW)
    assert elsewhere.starts == {"1": ["gpu:1"]}


def test_others_pass_a_waiting_job_on_devices_that_it_may_not_have() -> None:
    queue = [job("first", on={"gpu:1"}, at=1), job("second", at=2), job("third", at=3)]
    devices = ["gpu:0", "gpu:1", "gpu:2"]
    decision = decide(queue, [Running("r", 1, None)], devices, {"gpu:1": "r"}, {}, NOW)
    assert decision.starts == {"second": ["gpu:0"], "third": ["gpu:2"]}
    assert list(decision.waiting) == ["first"]


def test_disabled_devices_are_named() -> None:
    decision = decide([job("1", devices=2, at=1), job("2")], [], ["gpu:0"], {}, {}, NOW, disabled=1)
    assert decision.starts == {"2": ["gpu:0"]}, "nobody knows when the first one can start"
    assert decision.waiting["1"].text == "needs 2 of 1 devices (1 disabled); 1 free"

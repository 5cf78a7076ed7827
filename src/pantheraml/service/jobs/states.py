"""States of a job, and the transitions between them. Only `store.jobs.move` changes a state, and it asks this table.

validating -> queued -> starting -> running -> succeeded | failed
running -> pausing -> paused -> queued
running -> cancelling -> cancelled
running -> crashed -> queued          a killed process, a lost supervisor, a reboot: resumes from its checkpoint
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    VALIDATING = "validating"
    QUEUED = "queued"
    STARTING = "starting"
    """Its devices are leased and its supervisor was started; no step has been taken."""
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


_S = State

TRANSITIONS: dict[State, frozenset[State]] = {
    _S.VALIDATING: frozenset({_S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.QUEUED: frozenset({_S.STARTING, _S.PAUSED, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.PAUSING, _S.CANCELLING, _S.FAILED, _S.CRASHED}),
    _S.RUNNING: frozenset({_S.PAUSING, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED, _S.CRASHED}),
    # a run may end or fail before it notices the request
    _S.PAUSING: frozenset({_S.PAUSED, _S.CANCELLING, _S.SUCCEEDED, _S.FAILED}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.CRASHED: frozenset({_S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.CANCELLED: frozenset(),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
}

ACTIVE = frozenset({_S.STARTING, _S.RUNNING, _S.PAUSING, _S.CANCELLING})
"""A supervisor may be running, and devices are leased."""

ENDED = frozenset(state for state, following in TRANSITIONS.items() if not following)

OPENAI_STATUS: dict[State, str] = {
    _S.VALIDATING: "validating_files",
    _S.QUEUED: "queued",
    _S.STARTING: "queued",
    _S.RUNNING: "running",
    _S.PAUSING: "running",
    _S.PAUSED: "queued",
    _S.CANCELLING: "running",
    _S.CANCELLED: "cancelled",
    _S.CRASHED: "queued",
    _S.SUCCEEDED: "succeeded",
    _S.FAILED: "failed",
}
"""OpenAI's wire has six states; clients that validate raise on any other."""


class ForbiddenTransitionError(Exception):
    """A job cannot go from one state to the other."""

    def __init__(self, before: State, after: State) -> None:
        super().__init__(f"a job that is {before} cannot become {after}")
        self.before, self.after = before, after


def check_transition(before: State, after: State) -> None:
    if after not in TRANSITIONS[before]:
        raise ForbiddenTransitionError(before, after)

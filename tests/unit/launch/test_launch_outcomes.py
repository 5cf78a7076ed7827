"""Multi-node outcomes: root cause, restart decision and its message, and the number of restarts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pantheraml.base.errors import (
    ConfigError,
    DataError,
    HangError,
    InterruptedRunError,
    LaunchError,
    NonFiniteError,
    OutOfMemoryError,
    PantheraError,
    PreemptedError,
    StorageError,
    WorkerError,
    WorkerKilledError,
)
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import TrainStarted
from pantheraml.launch.outcomes import NodeRestarts, Outcome, RestartDecision, cause_of
from pantheraml.specs.run_dir import RunDir

KILLED = Outcome.of_ranks({1: -signal.SIGKILL})
FAILED = Outcome.of_ranks({0: WorkerError.exit_code})
SUCCEEDED = Outcome(0)
ENDED = Outcome(None)
EVERYTHING = ("killed", "failed", "hung")


def policy(folder: Path, restart_on: tuple[str, ...] = ("killed",), max_retries: int = 2) -> NodeRestarts:
    return NodeRestarts(RunDir(folder), restart_on=restart_on, max_retries=max_retries)


def save(folder: Path, step: int) -> None:
    checkpoint = folder / f"checkpoints/step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()


def train(folder: Path) -> None:
    with EventWriter(folder) as emit:
        emit(TrainStarted(first_step=1, total_steps=9, world_size=2, device="cpu", global_batch_size=4))


def test_outcome_of_failed_ranks() -> None:
    assert Outcome(71, "Rank 1 was killed by SIGKILL (most often the kernel, out of memory).") == KILLED
    assert Outcome.of_ranks({0: 71}) == Outcome(71, "Rank 0 was killed.")
    assert Outcome.of_ranks({2: -signal.SIGSEGV}).message == "Rank 2 was killed by SIGSEGV."
    assert Outcome.of_ranks({2: -signal.SIGTERM}).exit_code == PreemptedError.exit_code
    assert Outcome.of_ranks({2: -signal.SIGUSR1}).exit_code == PreemptedError.exit_code
    assert Outcome.of_ranks({2: -signal.SIGINT}).exit_code == InterruptedRunError.exit_code
    assert Outcome.of_stop(signal.SIGUSR1) == Outcome(PreemptedError.exit_code, "Stopped by SIGUSR1.")
    assert Outcome.of_ranks({0: 70, 1: -signal.SIGKILL, 2: -signal.SIGABRT}) == KILLED
    assert Outcome.of_ranks({2: 2}) == Outcome(2, "Rank 2 exited with code 2.")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([SUCCEEDED, SUCCEEDED], SUCCEEDED),
        ([FAILED, KILLED], KILLED),
        ([ENDED, KILLED], KILLED),
        ([SUCCEEDED, KILLED], KILLED),
        ([Outcome(6, "lost"), KILLED], KILLED),
        ([Outcome(48, "hung"), KILLED], Outcome(48, "hung")),
        ([Outcome(17, "disk full"), KILLED], Outcome(17, "disk full")),
        ([FAILED, Outcome(143, "stopped")], Outcome(143, "stopped")),
        ([Outcome(48, "hung"), None], Outcome(71, "Node 1 is unreachable.")),
        ([FAILED, None, None], Outcome(71, "Nodes 1, 2 are unreachable.")),
        ([SUCCEEDED, None], SUCCEEDED),
    ],
)
def test_root_cause(outcomes: list[Outcome | None], expected: Outcome) -> None:
    assert cause_of(dict(enumerate(outcomes))) == expected


@pytest.mark.parametrize(
    "error",
    [
        *(ConfigError, DataError, OutOfMemoryError, StorageError, NonFiniteError, LaunchError),
        *(InterruptedRunError, PreemptedError),
    ],
)
def test_no_restart_after_errors_that_would_recur(tmp_path: Path, error: type[PantheraError]) -> None:
    decided = policy(tmp_path, EVERYTHING).decide({0: Outcome(error.exit_code, "It failed."), 1: ENDED})
    assert decided == RestartDecision(error.exit_code, "It failed.")


@pytest.mark.parametrize(
    ("error", "reason"), [(WorkerKilledError, "killed"), (WorkerError, "failed"), (HangError, "hung")]
)
def test_restart_only_for_the_reasons_in_restart_on(tmp_path: Path, error: type[PantheraError], reason: str) -> None:
    outcomes: dict[int, Outcome | None] = {0: ENDED, 1: Outcome(error.exit_code, "It failed.")}
    others = tuple(word for word in EVERYTHING if word != reason)
    assert policy(tmp_path, (reason,)).decide(outcomes).restarts_run
    assert policy(tmp_path, others).decide(outcomes) == RestartDecision(error.exit_code, "It failed.")


def test_a_new_checkpoint_resets_the_restart_count(tmp_path: Path) -> None:
    run = policy(tmp_path)
    train(tmp_path)
    decided = [run.decide({0: FAILED, 1: KILLED}) for _ in range(3)]
    assert [decision.restarts_run for decision in decided] == [True, True, False]
    assert "Resuming from the beginning (restart 2 of 2 without a new checkpoint)." in decided[1].message
    assert decided[2] == RestartDecision(WorkerKilledError.exit_code, KILLED.message)
    save(tmp_path, 4)
    again = run.decide({0: FAILED, 1: KILLED})
    assert again.restarts_run
    assert again.resumes
    assert again.message == f"{KILLED.message} Resuming from step 4 (restart 1 of 2 without a new checkpoint)."


def test_a_run_that_had_not_begun_to_train_starts_over(tmp_path: Path) -> None:
    """The folder may hold an older run, which this one replaces and must not resume."""
    save(tmp_path, 4)
    train(tmp_path)
    run = policy(tmp_path)
    decided = run.decide({0: FAILED, 1: KILLED})
    assert (decided.restarts_run, decided.resumes) == (True, False)
    assert "Starting over (restart 1 of 2" in decided.message
    train(tmp_path)
    assert run.decide({0: FAILED, 1: KILLED}).resumes


def test_json_round_trip() -> None:
    for outcome in (KILLED, SUCCEEDED, ENDED):
        assert Outcome.from_json(outcome.to_json()) == outcome
    decision = RestartDecision(71, "message", restarts_run=True, resumes=True)
    assert RestartDecision.from_json(decision.to_json()) == decision

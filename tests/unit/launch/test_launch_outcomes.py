"""Which outcomes of several machines a run starts again after, what is told, and how often."""

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
from pantheraml.base.events import EventWriter
from pantheraml.launch.outcomes import Outcome, Starts, Verdict, cause_of
from pantheraml.specs.run_dir import RunDir

KILLED = Outcome.of_ranks({1: -signal.SIGKILL})
FAILED = Outcome.of_ranks({0: WorkerError.exit_code})
WELL = Outcome(0)
FOLLOWED = Outcome(None)
EVERYTHING = ("killed", "failed", "hung")


def starts(folder: Path, restart_on: tuple[str, ...] = ("killed",), max_retries: int = 2) -> Starts:
    return Starts(RunDir(folder), restart_on=restart_on, max_retries=max_retries)


def save(folder: Path, step: int) -> None:
    place = folder / f"checkpoints/step-{step}"
    place.mkdir(parents=True)
    (place / "manifest.json").touch()


def train(folder: Path) -> None:
    with EventWriter(folder) as emit:
        emit("train.started", first_step=1, total_steps=9, world_size=2, device="cpu", global_batch_size=4)


def test_what_ranks_are_said_to_have_died_of() -> None:
    assert Outcome(71, "Rank 1 was killed by SIGKILL (most often the kernel, out of memory).") == KILLED
    assert Outcome.of_ranks({0: 71}) == Outcome(71, "Rank 0 was killed.")
    assert Outcome.of_ranks({2: -signal.SIGSEGV}).told == "Rank 2 was killed by SIGSEGV."
    assert Outcome.of_ranks({2: -signal.SIGTERM}).exit_code == PreemptedError.exit_code
    assert Outcome.of_ranks({2: -signal.SIGUSR1}).exit_code == PreemptedError.exit_code
    assert Outcome.of_ranks({2: -signal.SIGINT}).exit_code == InterruptedRunError.exit_code
    assert Outcome.of_stop(signal.SIGUSR1) == Outcome(PreemptedError.exit_code, "Stopped by SIGUSR1.")
    assert Outcome.of_ranks({0: 70, 1: -signal.SIGKILL, 2: -signal.SIGABRT}) == KILLED
    assert Outcome.of_ranks({2: 2}) == Outcome(2, "Rank 2 ended with status 2.")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([WELL, WELL], WELL),
        ([FAILED, KILLED], KILLED),
        ([FOLLOWED, KILLED], KILLED),
        ([WELL, KILLED], KILLED),
        ([Outcome(6, "lost"), KILLED], KILLED),
        ([Outcome(48, "hung"), KILLED], Outcome(48, "hung")),
        ([Outcome(17, "disk full"), KILLED], Outcome(17, "disk full")),
        ([FAILED, Outcome(143, "stopped")], Outcome(143, "stopped")),
        ([Outcome(48, "hung"), None], Outcome(71, "Machine 1 is gone.")),
        ([FAILED, None, None], Outcome(71, "Machines 1, 2 are gone.")),
        ([WELL, None], WELL),
    ],
)
def test_the_cause_of_an_end(outcomes: list[Outcome | None], expected: Outcome) -> None:
    assert cause_of(dict(enumerate(outcomes))) == expected


@pytest.mark.parametrize(
    "error",
    [
        *(ConfigError, DataError, OutOfMemoryError, StorageError, NonFiniteError, LaunchError),
        *(InterruptedRunError, PreemptedError),
    ],
)
def test_what_no_new_start_would_help(tmp_path: Path, error: type[PantheraError]) -> None:
    judged = starts(tmp_path, EVERYTHING).judge({0: Outcome(error.exit_code, "So it was."), 1: FOLLOWED})
    assert judged == Verdict(error.exit_code, "So it was.")


@pytest.mark.parametrize(
    ("error", "reason"), [(WorkerKilledError, "killed"), (WorkerError, "failed"), (HangError, "hung")]
)
def test_only_the_reasons_that_were_named(tmp_path: Path, error: type[PantheraError], reason: str) -> None:
    outcomes: dict[int, Outcome | None] = {0: FOLLOWED, 1: Outcome(error.exit_code, "So it was.")}
    others = tuple(word for word in EVERYTHING if word != reason)
    assert starts(tmp_path, (reason,)).judge(outcomes).starts_again
    assert starts(tmp_path, others).judge(outcomes) == Verdict(error.exit_code, "So it was.")


def test_starts_in_vain_are_counted_anew_after_a_checkpoint(tmp_path: Path) -> None:
    run = starts(tmp_path)
    train(tmp_path)
    judged = [run.judge({0: FAILED, 1: KILLED}) for _ in range(3)]
    assert [verdict.starts_again for verdict in judged] == [True, True, False]
    assert "The run goes on from the beginning (start 2 of 2 without a new checkpoint)." in judged[1].told
    assert judged[2] == Verdict(WorkerKilledError.exit_code, KILLED.told)
    save(tmp_path, 4)
    again = run.judge({0: FAILED, 1: KILLED})
    assert again.starts_again
    assert again.resumes
    assert again.told == f"{KILLED.told} The run goes on from step 4 (start 1 of 2 without a new checkpoint)."


def test_a_run_that_had_not_begun_to_train_begins_again(tmp_path: Path) -> None:
    """The folder may hold another run, which this one was told to replace, and must not continue."""
    save(tmp_path, 4)
    train(tmp_path)
    run = starts(tmp_path)
    judged = run.judge({0: FAILED, 1: KILLED})
    assert (judged.starts_again, judged.resumes) == (True, False)
    assert "The run begins again (start 1 of 2" in judged.told
    train(tmp_path)
    assert run.judge({0: FAILED, 1: KILLED}).resumes


def test_they_cross_the_store_whole() -> None:
    for outcome in (KILLED, WELL, FOLLOWED):
        assert Outcome.from_json(outcome.to_json()) == outcome
    verdict = Verdict(71, "told", starts_again=True, resumes=True)
    assert Verdict.from_json(verdict.to_json()) == verdict

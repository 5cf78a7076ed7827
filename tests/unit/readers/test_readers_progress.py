"""The progress display, on a recorded terminal and in a log file."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pantheraml.base.events import KINDS
from pantheraml.readers import figures
from pantheraml.readers.progress import ProgressBar, Stage
from pantheraml.readers.summary import summarise


@pytest.fixture(autouse=True)
def _usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rich is told by the environment that the tests run in."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def log_of(events: list[Any], *, title: str = "") -> list[str]:
    stream = io.StringIO()
    bar = ProgressBar(title, console=Console(file=stream, width=80))
    for event in events:
        bar.handle(event)
    bar.close()
    return stream.getvalue().splitlines()


def loss_at(story: Any, step: int, kind: str = "train.step") -> str:
    (event,) = [event for event in story.events if event["kind"] == kind and event["step"] == step]
    return f"{event['loss']:.4f}"


def test_a_log_reads_as_plain_lines(complete: Any) -> None:
    lines = log_of(complete.events, title="pantheraml train")
    assert lines[:6] == [
        "pantheraml train",
        "plan: 2 processes on cuda, bf16, global batch 16 in micro-batches of 4",
        "train data: 12,000 rows · 1.23 M tokens · 608 x 2,048 · 98.7 % full · 3 skipped · 41 truncated · 1.9 s",
        "eval data: 240 rows · 24,000 tokens · 12 x 2,048 · 98.7 % full · 3 skipped · 41 truncated · 1.9 s",
        "model: LlamaForCausalLM, 1.24 B parameters, 11.3 M trained, bf16",
        f"training 10/120 steps · loss {loss_at(complete, 10)} · lr 0.000197 · 64,000 tokens/s · 15.8 GiB · 0:55 left",
    ]
    assert lines[-2:] == [
        f"trained to step 120 in 1:02 · loss {loss_at(complete, 120)} · 64,000 tokens/s · 15.8 GiB",
        "adapter saved: runs/first/adapter",
    ]
    assert "step 120: checkpoint saved (42.9 MiB in 0.2 s, the best so far)" in lines
    assert not any("\x1b" in line for line in lines), "no colour codes in a log"


def test_a_long_run_does_not_flood_the_log(story: Any) -> None:
    story.train(1, 36_000, pace=1.0)  # ten hours
    lines = log_of(story.events)
    assert 100 < len(lines) < 300
    story.events.clear()
    story.train(1, 60, pace=1.0)
    assert len(log_of(story.events)) == 12


def test_a_resumed_run_estimates_from_its_own_pace(story: Any) -> None:
    story.train(91, 96, total=100, pace=10.0)
    assert log_of(story.events)[-1].startswith("training 96/100 steps · ")
    assert log_of(story.events)[-1].endswith(" · 0:40 left"), "four steps of ten seconds, not of the run's average"


def test_why_training_ended_early_is_said(story: Any) -> None:
    story.train(1, 4, total=100)
    story.tell("train.finished", steps=4, stopped_by="early_stopping")
    assert log_of(story.events)[-1].startswith("trained to step 4 of 100, stopped by early_stopping in 2 s · loss")


def last_line(events: list[Any]) -> str:
    return next(line for line in reversed(log_of(events)) if line.startswith("trained to step"))


def test_the_last_line_has_the_speed_of_run_json(story: Any) -> None:
    story.begin()
    story.train(1, 20, total=40)
    for step, seconds in ((21, 0.1), (22, 4.0)):  # the last step's speed is an accident
        story.step(step, 40, after=seconds)
    story.tell("run.restarted", message="Rank 1 was killed.", step=10, world_size=2)
    story.train(11, 40, pace=0.8)
    story.step(40, 40, after=5.0)
    story.finish(40)
    speed = figures.count(summarise(story.events)["tokens_per_second"])
    assert speed == "40,000"
    assert f" · {speed} tokens/s · " in last_line(story.events)


def test_the_speed_of_a_resumed_run_is_that_of_all_its_starts(
    story: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.begin()
    story.train(1, 20, total=40, pace=0.25)
    seen = len(story.events)
    story.begin()
    story.train(15, 28, total=40, pace=1.0)
    story.finish(28)
    story.write(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    speed = figures.count(summarise(story.events)["tokens_per_second"])
    assert speed == "128,000"
    assert f" · {speed} tokens/s · " in last_line(story.events[seen:]), "of whose events the display sees the last ones"


def test_a_run_that_ends_no_better_than_it_began_is_warned_of_at_the_end(story: Any) -> None:
    story.train(1, 4)
    concern = "the loss ended at 9, above the 2 that it began at"
    story.tell("train.finished", steps=4, stopped_by="end", concern=concern)
    assert log_of(story.events)[-1] == f"warning: {concern}"
    assert summarise(story.events)["concern"] == concern


def test_messages_are_shown_as_they_are(story: Any) -> None:
    story.tell("warning", message="rows [bold]3[/bold] and [/] were skipped")
    story.tell("notice", message="x" * 300)
    story.tell("verdict", step=7, action="skip", cause="inf in lm_head")
    expected = ["warning: rows [bold]3[/bold] and [/] were skipped", "x" * 300, "step 7: skip (inf in lm_head)"]
    assert log_of(story.events) == expected


def test_numbers_that_are_unknown_or_not_finite(story: Any) -> None:
    story.tell("train.started", first_step=1, total_steps=9, world_size=1, device="cpu", global_batch_size=1)
    story.step(1, 9, after=6.0, loss="nan", learning_rate=None, tokens_per_second=None, memory_bytes=None)
    assert log_of(story.events) == ["training 1/9 steps · loss nan · lr – · – tokens/s · – · 0:48 left"]


def test_bytes_are_shown_as_sizes(story: Any) -> None:
    for done in (0, 2**30):
        story.tell("data.progress", after=6, split="train", stage="tokenise", done=done, total=2**32, unit="bytes")
    assert log_of(story.events) == ["train data: tokenise 1 GiB of 4 GiB · 0:18 left"]


def test_every_kind_of_event_is_accepted(story: Any) -> None:
    """A reader may not fail on a kind that it does not show, nor on one that a newer writer adds."""
    for kind in KINDS.keys() - {"plan.made", "data.ready"}:
        known = {"output": "here", "path": "here", "message": "here", "ranks": [1]}
        story.tell(kind, **{name: known.get(name, 1) for name in KINDS[kind]})
    shown = log_of(story.events)
    story.events.append({"kind": "from.the.future", "time": 0.0})
    assert log_of(story.events) == shown


@pytest.fixture
def terminal(reading: Callable[..., Any]) -> tuple[ProgressBar, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=30, color_system=None)
    return reading(ProgressBar("pantheraml train", console=console)), stream


def test_the_terminal_draws_in_place_and_cleans_up(complete: Any, terminal: tuple[ProgressBar, io.StringIO]) -> None:
    bar, stream = terminal
    before = threading.active_count()
    for event in complete.events:
        bar.handle(event)
        if event["kind"] == "train.step" and event["step"] == 60:
            bar._display._live.refresh()  # what the clock thread does five times a second
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"training +━+[╸╺]? +60/120 steps +\d", drawn)
    loss, eval_loss = loss_at(complete, 60), loss_at(complete, 30, "eval.done")
    assert f"loss {loss} · eval {eval_loss} · lr 0.0001 · 64,000 tokens/s · 15.8 GiB" in drawn
    bar.close()
    deadline = time.monotonic() + 100  # rich asks its clock thread to end and does not wait for it
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() == before, "the clock thread has ended"
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l"), "the cursor is back"


def test_closing_twice_or_unused_is_harmless(terminal: tuple[ProgressBar, io.StringIO]) -> None:
    bar, stream = terminal
    bar.close()
    after_once = stream.getvalue()
    bar.close()
    assert stream.getvalue() == after_once


@pytest.mark.parametrize(
    ("stage", "left"),
    [
        (Stage("s", "rows", 0.0, 0, 5, 10, now=5.0), 5.0),
        (Stage("s", "rows", 0.0, 8, 9, 10, now=5.0), 5.0),
        (Stage("s", "rows", 0.0, 5, 5, 10, now=5.0), None),
        (Stage("s", "rows", 0.0, 0, 5, None, now=5.0), None),
        (Stage("s", "rows", 0.0, 0, 10, 10, now=5.0), None),
    ],
)
def test_remaining_time(stage: Stage, left: float | None) -> None:
    assert stage.remaining_seconds() == left


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (figures.count, 1234, "1,234"),
        (figures.count, 12_345_678, "12.3 M"),
        (figures.count, 7_241_748_480, "7.24 B"),
        (figures.count, None, "–"),
        (figures.count, "nan", "nan"),
        (figures.size, 1023, "1023 B"),
        (figures.size, 1536, "1.5 KiB"),
        (figures.size, 80 * 2**30, "80 GiB"),
        (figures.size, 3 * 2**40, "3 TiB"),
        (figures.duration, 0.42, "0.42 s"),
        (figures.duration, 75, "1:15"),
        (figures.duration, 3700, "1:01:40"),
        (figures.duration, "inf", "–"),
        (figures.clock, 2.4, "0:02"),
        (figures.loss, "inf", "inf"),
        (figures.small, 0.00012, "0.00012"),
        (figures.share, 0.9876, "98.8 %"),
    ],
)
def test_figures(write: Callable[[Any], str], value: Any, text: str) -> None:
    assert write(value) == text

"""The progress display, on a recorded terminal and in a log file."""

from __future__ import annotations

import io
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pantheraml.base.events import KINDS
from pantheraml.readers import number_format as figures
from pantheraml.readers.progress import ProgressBar, Stage
from pantheraml.readers.summary import summarize


@pytest.fixture(autouse=True)
def _usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide terminal settings of the environment from rich."""
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


def loss_at(fake_run: Any, step: int, kind: str = "train.step") -> str:
    (event,) = [event for event in fake_run.events if event.kind == kind and event.step == step]
    return f"{event.loss:.4f}"


@pytest.mark.seed("S3-073")
def test_log_has_plain_lines(complete: Any) -> None:
    lines = log_of(complete.events, title="pantheraml train")
    assert lines[:6] == [
        "pantheraml train",
        "plan: 2 processes on cuda, bf16, global batch 16 in micro-batches of 4",
        "train data: 12,000 rows · 1.23 M tokens · 608 x 2,048 · 98.7 % filled · 3 skipped · 41 truncated · 1.9 s",
        "eval data: 240 rows · 24,000 tokens · 12 x 2,048 · 98.7 % filled · 3 skipped · 41 truncated · 1.9 s",
        "model: LlamaForCausalLM, 1.24 B parameters, 11.3 M trainable, bf16",
        f"training 10/120 steps · loss {loss_at(complete, 10)} · lr 0.000197 · 64,000 tokens/s · 15.8 GiB · 0:55 left",
    ]
    assert lines[-2:] == [
        f"trained to step 120 in 1:02 · loss {loss_at(complete, 120)} · 64,000 tokens/s · 15.8 GiB",
        "adapter saved: runs/first/adapter",
    ]
    assert "step 120: checkpoint saved (42.9 MiB in 0.2 s, best so far)" in lines
    assert not any("\x1b" in line for line in lines), "no color codes in a log"


def test_a_long_run_does_not_flood_the_log(fake_run: Any) -> None:
    fake_run.train(1, 36_000, pace=1.0)  # ten hours
    lines = log_of(fake_run.events)
    assert 100 < len(lines) < 300
    fake_run.events.clear()
    fake_run.train(1, 60, pace=1.0)
    assert len(log_of(fake_run.events)) == 12


def test_a_resumed_run_estimates_from_its_own_pace(fake_run: Any) -> None:
    fake_run.train(91, 96, total=100, pace=10.0)
    assert log_of(fake_run.events)[-1].startswith("training 96/100 steps · ")
    assert log_of(fake_run.events)[-1].endswith(" · 0:40 left"), "four steps of ten seconds, not of the run's average"


def test_early_end_names_its_cause(fake_run: Any) -> None:
    fake_run.train(1, 4, total=100)
    fake_run.emit("train.finished", steps=4, stopped_by="early_stopping")
    assert log_of(fake_run.events)[-1].startswith("trained to step 4 of 100, stopped by early_stopping in 2 s · loss")


def last_line(events: list[Any]) -> str:
    return next(line for line in reversed(log_of(events)) if line.startswith("trained to step"))


def test_last_line_has_the_speed_of_run_json(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.train(1, 20, total=40)
    for step, seconds in ((21, 0.1), (22, 4.0)):  # the last step's speed is an accident
        fake_run.step(step, 40, after=seconds)
    fake_run.emit("run.restarted", message="Rank 1 was killed.", step=10, world_size=2)
    fake_run.train(11, 40, pace=0.8)
    fake_run.step(40, 40, after=5.0)
    fake_run.finish(40)
    speed = figures.count(summarize(fake_run.events)["tokens_per_second"])
    assert speed == "40,000"
    assert f" · {speed} tokens/s · " in last_line(fake_run.events)


def test_speed_of_a_resumed_run_covers_all_starts(
    fake_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run.begin()
    fake_run.train(1, 20, total=40, pace=0.25)
    seen = len(fake_run.events)
    fake_run.begin()
    fake_run.train(15, 28, total=40, pace=1.0)
    fake_run.finish(28)
    fake_run.write(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    speed = figures.count(summarize(fake_run.events)["tokens_per_second"])
    assert speed == "128,000"
    assert f" · {speed} tokens/s · " in last_line(fake_run.events[seen:]), (
        "although the display sees only the last events"
    )


def test_concern_is_the_last_warning(fake_run: Any) -> None:
    fake_run.train(1, 4)
    concern = "the loss ended at 9, above the 2 that it began at"
    fake_run.emit("train.finished", steps=4, stopped_by="end", concern=concern)
    assert log_of(fake_run.events)[-1] == f"warning: {concern}"
    assert summarize(fake_run.events)["concern"] == concern


def test_messages_are_printed_verbatim(fake_run: Any) -> None:
    fake_run.emit("warning", message="rows [bold]3[/bold] and [/] were skipped")
    fake_run.emit("notice", message="x" * 300)
    fake_run.emit("verdict", step=7, action="skip", cause="inf in lm_head")
    expected = ["warning: rows [bold]3[/bold] and [/] were skipped", "x" * 300, "step 7: skip (inf in lm_head)"]
    assert log_of(fake_run.events) == expected


def test_unknown_and_nonfinite_numbers(fake_run: Any) -> None:
    fake_run.emit("train.started", first_step=1, total_steps=9, world_size=1, device="cpu", global_batch_size=1)
    fake_run.step(1, 9, after=6.0, loss="nan", learning_rate=None, tokens_per_second=None, memory_bytes=None)
    assert log_of(fake_run.events) == ["training 1/9 steps · loss nan · lr – · – tokens/s · – · 0:48 left"]


def test_bytes_are_shown_as_sizes(fake_run: Any) -> None:
    for done in (0, 2**30):
        fake_run.emit("data.progress", after=6, split="train", stage="tokenize", done=done, total=2**32, unit="bytes")
    assert log_of(fake_run.events) == ["train data: tokenize 1 GiB of 4 GiB · 0:18 left"]


def test_every_kind_of_event_is_accepted(fake_run: Any) -> None:
    """A reader must accept kinds that it does not show, and kinds of newer versions."""
    known: dict[Any, Any] = {str: "here", dict[str, Any]: {}}
    lists = {"ranks": [1], "tokens": [1], "seconds": [1.0], "memory_bytes": [1]}
    for kind, model in KINDS.items():
        if kind in ("plan.made", "data.ready"):
            continue
        fields = {name: field for name, field in model.model_fields.items() if field.is_required()}
        values = {
            name: lists[name] if (name in lists and "Sequence" in str(field.annotation)) or name == "ranks"
            else known.get(field.annotation, "here" if "str" in str(field.annotation) else 1)
            for name, field in fields.items()
        }  # fmt: skip
        fake_run.emit(kind, **values)
    shown = log_of(fake_run.events)
    fake_run.emit("from.the.future", answer=42)
    assert log_of(fake_run.events) == shown


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
        if event.kind == "train.step" and event.step == 60:
            bar._display._live.refresh()  # as the clock thread does five times per second
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"training +━+[╸╺]? +60/120 steps +\d", drawn)
    loss, eval_loss = loss_at(complete, 60), loss_at(complete, 30, "eval.done")
    assert f"loss {loss} · eval {eval_loss} · lr 0.0001 · 64,000 tokens/s · 15.8 GiB" in drawn
    bar.close()
    deadline = time.monotonic() + 100  # rich does not wait for its clock thread to end
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
        (figures.count, math.nan, "nan"),
        (figures.size, 1023, "1023 B"),
        (figures.size, 1536, "1.5 KiB"),
        (figures.size, 80 * 2**30, "80 GiB"),
        (figures.size, 3 * 2**40, "3 TiB"),
        (figures.duration, 0.42, "0.42 s"),
        (figures.duration, 75, "1:15"),
        (figures.duration, 3700, "1:01:40"),
        (figures.duration, math.inf, "–"),
        (figures.clock, 2.4, "0:02"),
        (figures.loss, math.inf, "inf"),
        (figures.small, 0.00012, "0.00012"),
        (figures.share, 0.9876, "98.8 %"),
    ],
)
def test_figures(write: Callable[[Any], str], value: Any, text: str) -> None:
    assert write(value) == text

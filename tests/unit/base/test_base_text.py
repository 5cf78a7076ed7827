"""No control character from a file, a row or a model reaches the terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pantheraml.base import log
from pantheraml.base.errors import DataError, WorkerError
from pantheraml.base.events import Notice, RunRestarted, WarningIssued
from pantheraml.base.text import printable
from pantheraml.cli import generate, plan
from pantheraml.cli.main import main
from pantheraml.cli.verify import show
from pantheraml.readers.progress import ProgressBar
from pantheraml.readers.report_page import escape
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.tasks import ModeVerdict, Verdicts

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\u202egnp.exe\u2066\u200f\ud800\x00"
MARKUP = "[red]not red[/red] [/nothing]"
CONTROLS = {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *"\u202e\u2066\u200f\ud800"} - {"\n", "\t"}


def harmless(text: str) -> bool:
    text.encode()
    return not CONTROLS & set(text)


def test_control_characters_are_escaped() -> None:
    assert printable(EVIL) == (r"\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x0d\u202egnp.exe\u2066\u200f\ud800\x00")
    for number in (*range(0x20), *range(0x7F, 0xA0), 0x061C, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF):
        assert printable(chr(number)) != chr(number) or chr(number) in "\n\t"
    plain = "Größe 12 µm\n\tнет 日本語 \U0001f469\u200d\U0001f680 क्\u200dष"
    assert printable(plain) == plain


def test_error_messages_are_escaped() -> None:
    err = DataError(f"A row {EVIL}", where=f"{EVIL}.jsonl", fix=EVIL)
    assert harmless(str(err))
    assert err.what == f"A row {EVIL}", "events and reports get the raw text"


def test_cli_errors_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "--model", EVIL[:-2], "--data", "d", "--set", f"train.{EVIL[:-2]}=1"]) == 2
    assert harmless(capsys.readouterr().err)

    def fail(arguments: Any) -> int:
        raise ZeroDivisionError(EVIL)

    monkeypatch.setattr(plan, "run", fail)
    assert main(["plan", "--model", "m", "--data", "d"]) == WorkerError.exit_code
    assert harmless(capsys.readouterr().err)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_escapes_text(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    stream = io.StringIO()
    bar = ProgressBar(f"train {EVIL}", console=Console(file=stream, width=300, force_terminal=terminal))
    message = f"{EVIL} {MARKUP}"
    for event in (
        Notice(message=message),
        WarningIssued(message=message),
        RunRestarted(message=message, step=None, world_size=1),
    ):
        bar.handle(event)
    bar.close()
    shown = stream.getvalue()
    assert shown.count(printable(EVIL)) == 4
    assert shown.count(MARKUP) == 3
    assert "\x1b]0;" not in shown
    assert "\x1b[2J" not in shown
    assert terminal or harmless(shown)


def test_verify_table_escapes_text(capsys: pytest.CaptureFixture[str]) -> None:
    impossible = ModeVerdict(mode="tp", dims=ParallelDims(), not_possible=f"{EVIL[:-2]} {MARKUP}")
    show(
        Verdicts(
            device="cpu", precision="fp32", steps=1, tolerance=0.1, weights_tolerance=0.1, tolerance_reason="so",
            seconds_of_one=1.0, notes=[f"{EVIL[:-2]} {MARKUP}"], modes=[impossible],
        )
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert harmless(shown)
    assert "[red]" in shown.replace("\n", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_generated_text_is_escaped_for_a_terminal_and_raw_for_a_pipe(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = EVIL.replace("\ud800", "").replace("\r", "")
    monkeypatch.setattr(generate, "complete", lambda *arguments, **others: [completion])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert main(["generate", "run", "--prompt", "x"]) == 0
    shown = capsys.readouterr().out
    assert harmless(shown) if terminal else shown == f"{completion}\n"
    assert main(["generate", "run", "--prompt", "x", "--json"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["completion"] == completion
    assert harmless(shown) or not terminal


def test_log_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("pantheraml")
    before = logger.handlers, logger.level, logger.propagate
    logger.propagate = False  # pytest would store the record, and pytest-xdist cannot send a lone surrogate
    try:
        log.start()
        log.get("pantheraml.test").warning("a file says %s", EVIL)
    finally:
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)
    assert harmless(capsys.readouterr().err)


def test_report_escapes_text() -> None:
    shown = escape(f"{EVIL}<script>alert(1)</script>")
    assert harmless(shown)
    assert "<" not in shown

"""Run one notebook in a forked child: bounded in time and memory, in a folder of its own.

Children are forked from a process that has imported torch, transformers, TRL, PEFT and datasets, which takes longer
than most notebooks. A child leads its own process group, which is ended with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.notebooks.cells import Notebook, python_of
from tools.notebooks.rewrite import CAP, CUDA, PICTURE, REWARD, SAVE, SOUND, cap, rewrite, varied_reward
from tools.notebooks.rows import UnknownDataError
from tools.notebooks.training_record import Training, problem_with, trains, watch_trainers
from tools.notebooks.verdicts import OLD_REWARDS, Result, category_of, not_possible, reason_not_supported

_PRODUCT = "pantheraml"
_FRAMES = 4


@dataclass(frozen=True)
class Bounds:
    seconds: float = 180.0
    memory_gib: float = 6.0


@dataclass
class Running:
    notebook: Notebook
    pid: int
    folder: Path
    started: float

    def outcome(self, status: int) -> Result:
        """Return the result of a child that has ended."""
        base = blank_result(self.notebook, time.monotonic() - self.started)
        try:
            answer: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        except FileNotFoundError:
            return replace(base, outcome="error", reason=f"the process ended with status {status} and no result")
        return replace(base, **answer)


def blank_result(notebook: Notebook, seconds: float = 0.0) -> Result:
    return Result(
        notebook.name,
        category_of(notebook.name, notebook.code),
        "ok",
        seconds=round(seconds, 1),
        copies=notebook.copies,
    )


def not_run(notebook: Notebook) -> Result | None:
    """Return the result of a notebook that this tool cannot run; None for others."""
    reason = not_possible(notebook.code)
    return None if reason is None else replace(blank_result(notebook), outcome="limit", reason=reason)


def start(notebook: Notebook, folder: Path) -> Running:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    folder.mkdir(parents=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = _child(notebook, folder)
        finally:
            os._exit(status)
    return Running(notebook, pid, folder, time.monotonic())


def poll(running: Running, bounds: Bounds) -> Result | None:
    """Return the result if the notebook has ended, or ended now because it passed its bounds."""
    ended, status = os.waitpid(running.pid, os.WNOHANG)
    if ended:
        _end_group(running.pid)
        return running.outcome(os.waitstatus_to_exitcode(status))
    seconds = time.monotonic() - running.started
    used = _memory_gib(running.pid)
    if seconds <= bounds.seconds and used <= bounds.memory_gib:
        return None
    _end_group(running.pid)
    os.waitpid(running.pid, 0)
    what = f"{bounds.seconds:g} s" if seconds > bounds.seconds else f"{bounds.memory_gib:g} GiB of memory"
    cell = _progress(running.folder)
    return replace(blank_result(running.notebook, seconds), outcome="limit", reason=f"took more than {what}", cell=cell)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _memory_gib(pid: int) -> float:
    import psutil

    try:
        parent = psutil.Process(pid)
        return sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True))) / 2**30
    except psutil.NoSuchProcess:
        return 0.0


def _progress(folder: Path) -> int | None:
    try:
        return int((folder / "cell").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _child(notebook: Notebook, folder: Path) -> int:
    os.setsid()
    work = folder / "work"
    work.mkdir()
    os.chdir(work)
    log = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    answer = run_cells(notebook, folder)
    (folder / "result.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def run_cells(notebook: Notebook, folder: Path) -> dict[str, Any]:
    """Run the cells in order and return the fields of the result."""
    from tools.notebooks import stand_ins

    stand_ins.install()
    trainings = watch_trainers()
    scope: dict[str, Any] = {
        "__name__": "__main__", CUDA: stand_ins.notebook_cuda(), CAP: cap, "display": lambda *_, **__: None,
        "get_ipython": lambda: None, REWARD: varied_reward,
        PICTURE: stand_ins.picture(), SOUND: stand_ins.sound(),
    }  # fmt: skip
    python: list[str] = []
    refused: list[str] = []
    scope[SAVE] = functools.partial(_save, refused=refused)
    for number, cell in enumerate(notebook.cells):
        (folder / "cell").write_text(str(number))
        try:
            python.append(python_of(cell))
            tree = rewrite(python[-1])
        except SyntaxError as err:
            return {"outcome": "limit", "reason": f"the cell is no Python: {err}", "cell": number}
        try:
            exec(compile(tree, f"<cell {number}>", "exec"), scope)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as err:  # noqa: BLE001 - a notebook may end in any way, and each is a result
            traceback.print_exc()
            return {"cell": number, **_classify(err, reason_not_supported(notebook.code))}
    return {**_verdict("\n".join(python), trainings), "refused": refused}


def _save(save: Callable[[], object], call: str, *, refused: list[str]) -> None:
    """Save, and note what the product does not support: a notebook that leaves this out is none the worse for it."""
    try:
        save()
    except Exception as err:
        if not _says_unsupported(err):
            raise
        refused.append(re.sub(r"\s+", " ", f"{call}: {err}")[:300])


def _verdict(code: str, trainings: list[Training]) -> dict[str, Any]:
    """Return the fields of the result of a notebook whose cells all ran."""
    problem = problem_with(trainings) if trainings or trains(code) else None
    if problem is not None:
        return {"outcome": "error", "reason": problem}
    return {"outcome": "ok", "losses": [loss for training in trainings for loss in training.losses]}


def _classify(err: BaseException, by_design: str | None) -> dict[str, Any]:
    """Return the fields of the result of a notebook that ended with `err`.

    `by_design`: why the product does not support the notebook. That counts only if its error says so.
    """
    text = re.sub(r"\s+", " ", f"{type(err).__name__}: {err}")[:400]
    frames = traceback.extract_tb(err.__traceback__)[-_FRAMES:]
    where = " < ".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in reversed(frames))
    if by_design is not None and _says_unsupported(err):
        return {"outcome": "unsupported", "reason": by_design, "message": text, "where": where}
    if isinstance(err, TypeError) and _in_old_reward(err):
        return {"outcome": "limit", "reason": OLD_REWARDS, "message": text, "where": where}
    lacking = _lacking(err)
    if lacking is not None:
        return {"outcome": "limit", "reason": lacking, "message": text, "where": where}
    return {"outcome": "error", "reason": text, "where": where}


def _lacking(err: BaseException) -> str | None:
    """Return what the notebook needs that is not here; None if it ended for another reason."""
    if isinstance(err, ModuleNotFoundError) and not (err.name or "").startswith(_PRODUCT):
        return f"needs the package {err.name}"
    if isinstance(err, UnknownDataError):
        return str(err)
    if _needs_program(err):
        return f"needs the program {err.filename}"  # type: ignore[attr-defined]
    return "needs the network" if _needs_network(err) else None


def _in_old_reward(err: TypeError) -> bool:
    """Whether a reward function of the notebook cannot read the messages that TRL passes it."""
    frames = traceback.extract_tb(err.__traceback__)
    called = next((at for at, frame in enumerate(frames) if frame.name == "_calculate_rewards"), None)
    reads_text = "expected string or bytes-like object, got 'list'" in str(err)
    return reads_text and called is not None and any(frame.filename.startswith("<cell") for frame in frames[called:])


def _says_unsupported(err: BaseException) -> bool:
    """Whether it is an error of the product that names something it does not support."""
    from pantheraml.base.errors import PantheraError, UnsupportedModelError

    named = isinstance(err, PantheraError) and "not support" in str(err)
    return named or isinstance(err, UnsupportedModelError)


def _needs_network(err: BaseException) -> bool:
    kinds = {kind.__name__ for each in _causes(err) for kind in type(each).__mro__}
    unreachable = any("couldn't connect to 'https://huggingface.co'" in str(each) for each in _causes(err))
    return unreachable or bool(kinds & {"ConnectionError", "URLError", "ConnectError", "OfflineModeIsEnabled"})


def _needs_program(err: BaseException) -> bool:
    """Whether the notebook starts a program that is not installed, such as Ollama."""
    frames = [frame.name for frame in traceback.extract_tb(err.__traceback__)]
    return isinstance(err, FileNotFoundError) and "_execute_child" in frames and "/" not in str(err.filename)


def _causes(err: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while err is not None and err not in found:
        found.append(err)
        err = err.__cause__ or err.__context__
    return found


def _short(filename: str) -> str:
    return re.sub(r"^.*?(site-packages|src)/", "", filename)

"""Does `auto` find a good learning rate and rank? LoRA on three kinds of real text, against a search of 20 points.

A small Llama is trained from scratch on prose, then fine-tuned on one task after another: source code, documentation in
another style, and describing a function from its source. Each task is run as `pantheraml train` runs it with nothing
set (`auto`), and at every point of a grid of ten learning rates and two ranks. Reported is the evaluation loss of
`auto` relative to the best point.

    python benchmarks/run.py auto_defaults --set tasks=code --set minutes=8    on a GPU, for each task
    python benchmarks/run.py auto_defaults --set size=cpu           on a CPU: ten minutes for each task, on one core
    python benchmarks/run.py auto_defaults --set size=cpu-wide      twice as wide, which no rule was taken from
    python benchmarks/run.py auto_defaults --set size=tiny          on a CPU: a smoke test
"""

from __future__ import annotations

import ast
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import accuracy
import corpus
from table import Column, Table, markdown_table

from pantheraml.base.errors import NonFiniteError

NEEDS_GPU = True

TARGET = 0.02
RATES = (2e-5, 5e-5, 1e-4, 2e-4, 3.5e-4, 6e-4, 1e-3, 2e-3, 4e-3, 1e-2)
RANKS = (16, 64)
SHORTEST, LONGEST = 100, 1_500
"""Characters of a docstring that a function is described by, and of the source that it is described from."""

SIZES = {
    "small": replace(accuracy.SIZES["small"], hidden=1024, intermediate=2816),
    "cpu": replace(accuracy.SIZES["cpu"], steps=120),
    "cpu-wide": replace(accuracy.SIZES["cpu"], hidden=512, intermediate=1024, steps=120),
    "tiny": accuracy.SIZES["tiny"],
}


@dataclass(frozen=True)
class Point:
    """None: as `pantheraml train` has it if nothing is set."""

    rate: float | None
    rank: int | None


AUTO = Point(None, None)
GRID = tuple(Point(rate, rank) for rank in RANKS for rate in RATES)


def run(
    *, size: str = "small", tasks: str = "code,manual,describe", points: int = len(GRID), minutes: float = math.inf
) -> dict[str, Any]:
    """`points`: of the grid; fewer are a smoke test. `minutes`: no point is begun that would not end within them."""
    end = time.perf_counter() + 60 * minutes
    names = tasks.split(",")
    if not set(names) <= set(TASKS):
        raise SystemExit(f"tasks are {', '.join(TASKS)}")
    grid = GRID[:: max(1, len(GRID) // points)][:points]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), SIZES[size])
        facts = bench.train_base()
        results = [row for name in names for row in bench.search(name, grid, end)]
    parameters = {"size": size, "tasks": tasks, "points": points, **asdict(SIZES[size]), **facts}
    return {"parameters": parameters, "results": results}


class Bench(accuracy.Bench):
    """Base model as in `accuracy`, and a search for each task."""

    def __init__(self, folder: Path, size: accuracy.Size) -> None:
        super().__init__(folder, size, "lora", "llama")

    def search(self, task: str, grid: Sequence[Point], end: float) -> Iterator[dict[str, Any]]:
        """`end`: by time.perf_counter."""
        limit = int(self.size.code_megabytes * 1e6)
        domain = self.code if task == "code" else write_task(self.folder, task, limit)
        longest = 0.0
        for point in (AUTO, *grid):
            begin = time.perf_counter()
            if begin + longest > end:
                return
            rate, rank, loss = self._fine_tune(domain, task, point)
            row = {"task": task, "auto": point == AUTO, "rate": rate, "rank": rank, "eval_loss": loss}
            print(row, file=sys.stderr, flush=True)  # in case the run is cut short
            seconds = time.perf_counter() - begin
            longest = max(longest, seconds)
            yield row | {"seconds": seconds, "bytes": domain.bytes}

    def _fine_tune(self, domain: corpus.Domain, task: str, point: Point) -> tuple[float, int, float | None]:
        """Learning rate, rank and final evaluation loss; None: it diverged, as the largest rates may."""
        rate = {} if point.rate is None else {"learning_rate": point.rate}
        rank = {} if point.rank is None else {"rank": point.rank}
        config = self._config(
            domain,
            {
                "model": {"path": str(self.folder / "base" / "model"), "precision": "bf16"},
                "method": {"kind": "lora", **rank},
                "train": {"max_steps": self.size.steps, "global_batch_size": self.size.batch, "seed": 0, **rate},
            },
        )
        name = f"{task}-{'auto' if point == AUTO else f'{point.rate}-{point.rank}'}"
        try:
            events = accuracy.train(self.folder / name, config)
        except NonFiniteError:
            if point.rate is None:
                raise  # `auto` has to learn
            return point.rate, config.method.rank, None
        chosen = (event.value for event in events if event.kind == "choice" and event.name == "train.learning_rate")
        used = point.rate if point.rate is not None else float(next(chosen))
        return used, config.method.rank, accuracy.last_value(events, "eval.done", "loss")


# -- tasks


def _library_docstrings() -> Iterator[dict[str, str]]:
    return ({"text": text} for text in corpus.docstrings(corpus.library_files()))


def _descriptions() -> Iterator[dict[str, str]]:
    """Functions of the standard library without their docstrings, and the first paragraph of these."""
    for path in corpus.library_files():
        with warnings.catch_warnings(action="ignore"):
            try:
                tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
            except SyntaxError:
                continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            told = (ast.get_docstring(node) or "").partition("\n\n")[0]
            node.body = node.body[1:]
            if len(told) >= SHORTEST:
                yield {"prompt": f"{ast.unparse(node)[:LONGEST]}\n\n", "completion": told}


TASKS = {"code": None, "manual": _library_docstrings, "describe": _descriptions}
"""Name -> rows; code has a writer of its own."""


def write_task(folder: Path, task: str, limit_bytes: int) -> corpus.Domain:
    rows = TASKS[task]
    assert rows is not None
    return corpus.write_rows(folder, task, rows(), limit_bytes)


# -- page


def compared(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each task: `auto`, the best point, and the difference. None for one whose time ended before that."""
    lines = []
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["task"], []).append(row)
    for task, of_task in found.items():
        auto = next(row for row in of_task if row["auto"])
        ended = [row for row in of_task if not row["auto"] and row["eval_loss"] is not None]
        if not ended:
            continue
        best = min(ended, key=lambda row: row["eval_loss"])
        behind = auto["eval_loss"] / best["eval_loss"] - 1
        shown = [f"{row['eval_loss']:.4f} ({row['rate']:.2g}, rank {row['rank']})" for row in (auto, best)]
        lines.append(
            [task, *shown, str(len(of_task) - 1), f"{100 * behind:+.2f} %", "yes" if behind <= TARGET else "no"]
        )
    return lines


HEADS = ("task", "auto", "best", "points", "auto behind the best", f"within {100 * TARGET:g} %")


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """The newest result of each task and size."""
    newest: dict[tuple[str, str], list[str]] = {}
    for record in reversed(records):
        facts = record["parameters"]
        for line in compared(record["results"]):
            newest[facts["size"], line[0]] = line
    parts = []
    for size in dict.fromkeys(size for size, _ in newest):
        facts = next(each["parameters"] for each in records if each["parameters"]["size"] == size)
        head = f"Size {size}: {facts['layers']} layers of {facts['hidden']}, {facts['steps']} steps."
        parts += [head, "", *markdown_table(HEADS, [line for (of, _), line in newest.items() if of == size]), ""]
    return "\n".join(parts).rstrip()


TABLE = Table(
    title="Learning rate and rank that nobody set",
    how="LoRA on three kinds of real text with everything `auto`, against the best of 20 points (ten learning rates,"
    " two ranks): final evaluation loss. Until commit `ba82184`,"
    " models narrower than 1,024 got the usual 2e-4: at a width of 256 that ended 17.1, 5.6 and 9.8 % behind the best,"
    " so adapters now get the rate by hidden size from 256 on. A later record of these tasks confirms that, and is no"
    " test of it.",
    columns=(
        Column("task", "task"),
        Column("auto", "auto"),
        Column("learning rate", "rate", lambda value: f"{value:.2g}"),
        Column("rank", "rank"),
        Column("eval loss", "eval_loss", lambda value: f"{value:.4f}"),
        Column("seconds", "seconds", lambda value: f"{value:.0f}"),
        Column("size", "parameters.size"),
    ),
    summary=summary,
)

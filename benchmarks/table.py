"""How results become docs/benchmarks.md: each benchmark describes its columns, this writes them as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INTRODUCTION = """# Benchmarks

Made by `python benchmarks/run.py --table` from the files in `benchmarks/results/`; do not edit. Each row is one result
with the commit that it was measured on (`+` = with uncommitted changes) and the machine's load average just before.
Compare rows of one run on one machine. Cases of a suite whose turn did not come are in the files only.
"""

NOT_RUN = "not run"
"""The status of a case for which there was no time."""


@dataclass(frozen=True)
class Column:
    """A heading, the result's field (`parameters.NAME` for a parameter), and how to write its value."""

    title: str
    field: str
    write: Callable[[Any], str] = str


@dataclass(frozen=True)
class Table:
    """How one benchmark's results are shown: a title, one sentence on how they were measured, the columns."""

    title: str
    how: str
    columns: tuple[Column, ...]
    summary: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    """What the records, newest first, come to, in Markdown, above the rows; None: nothing."""


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plain_table(docstring: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """For a benchmark that describes no columns: its parameters and results as they are."""
    fields: dict[str, None] = {}
    for record in records:
        fields |= dict.fromkeys(f"parameters.{name}" for name in record["parameters"])
        for result in _results(record):
            fields |= dict.fromkeys(result)
    columns = tuple(Column(field.removeprefix("parameters.").replace("_", " "), field, plain) for field in fields)
    first_line = docstring.strip().splitlines()[0]
    return Table(first_line.rstrip("."), "Every parameter and result as measured.", columns)


def _results(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return record["results"] if isinstance(record["results"], list) else [record["results"]]


def render(tables: Mapping[str, Table], records: Sequence[Mapping[str, Any]]) -> str:
    """The whole page; newest results come first."""
    parts = [INTRODUCTION]
    for name, table in sorted(tables.items()):
        own = sorted((r for r in records if r["benchmark"] == name), key=lambda record: record["date"], reverse=True)
        parts.append(_table(name, table, own))
    return "\n".join(parts)


def _table(name: str, table: Table, records: Sequence[Mapping[str, Any]]) -> str:
    titles = [*(column.title for column in table.columns), "hardware", "load", "versions", "commit", "date"]
    script = records[0].get("script", f"benchmarks/{name}.py")
    lines = [f"## {table.title}", "", f"{table.how} (`{script}`)", ""]
    if table.summary is not None:
        lines += [table.summary(records), ""]
    rows = [
        [*_cells(table, record, result), *_origin(record, result)]
        for record in records
        for result in _results(record)
        if result.get("status") != NOT_RUN
    ]
    return "\n".join([*lines, *markdown_table(titles, rows)]) + "\n"


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(titles), "|" + "---|" * len(titles), *(_line(row) for row in rows)]


def result_rows(table: Table, record: Mapping[str, Any]) -> list[str]:
    """The results of one record alone, without where they are from."""
    rows = [_cells(table, record, result) for result in _results(record)]
    return markdown_table([column.title for column in table.columns], rows)


def _cells(table: Table, record: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    cells = []
    for column in table.columns:
        source, name = record["parameters"], column.field.removeprefix("parameters.")
        value = source.get(name) if column.field.startswith("parameters.") else result.get(name)
        cells.append("–" if value is None else column.write(value))
    return cells


def _origin(record: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Where a result is from; one measured later than its record was begun has its own date and commit."""
    hardware, versions = record["hardware"], record["versions"]
    head, date = (result.get(name) or record[name] for name in ("commit", "date"))
    gpus: list[str] = hardware["gpus"]
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else f"{hardware['cores']} cores of {hardware['cpu'] or 'unknown CPU'}"
    software = f"Python {versions['python']}" + (f", torch {versions['torch']}" if versions["torch"] else "")
    commit = f"`{head[:9]}`" + ("+" if record["dirty"] else "") if head else "–"
    return [machine, f"{record['load_before']:.1f}", software, commit, date[:10]]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

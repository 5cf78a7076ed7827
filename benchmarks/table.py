"""How results become docs/benchmarks.md and CSV files: each benchmark describes its columns, this writes them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INTRODUCTION = """# Benchmarks

Made by `python benchmarks/run.py --table` from the files in `benchmarks/results/`; do not edit. All results, with
hardware, load, versions and commit (`+` = with uncommitted changes), are in `benchmarks/history/`, one CSV file a
benchmark. Compare rows of one run on one machine.
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
    """The whole page: what benchmarks with a summary come to, and a list of the others."""
    known = {name: _newest_first(name, records) for name in tables}
    sections = [_section(name, table, known[name]) for name, table in tables.items() if table.summary is not None]
    rows = [_row(name, table, known[name][0]) for name, table in sorted(tables.items()) if table.summary is None]
    listed = [*markdown_table(["benchmark", "measured on", "newest", "all results"], rows), ""] if rows else []
    return "\n".join([INTRODUCTION, *sections, "## Others", "", *listed])


def history(name: str, table: Table, records: Sequence[Mapping[str, Any]]) -> str:
    """All results of one benchmark as CSV, newest first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*(column.title for column in table.columns), *ORIGIN])
    for record in _newest_first(name, records):
        writer.writerows([*_cells(table, record, result), *_origin(record, result)] for result in _measured(record))
    return out.getvalue()


ORIGIN = ("hardware", "load", "versions", "commit", "date")


def _newest_first(name: str, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    own = (record for record in records if record["benchmark"] == name)
    return sorted(own, key=lambda record: str(record["date"]), reverse=True)


def _measured(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [result for result in _results(record) if result.get("status") != NOT_RUN]


def _section(name: str, table: Table, records: Sequence[Mapping[str, Any]]) -> str:
    assert table.summary is not None
    script, csv_file = records[0].get("script", f"benchmarks/{name}.py"), f"benchmarks/history/{name}.csv"
    lines = [f"## {table.title}", "", f"{table.how} (`{script}`; all results: `{csv_file}`)", ""]
    return "\n".join([*lines, table.summary(records)]) + "\n"


def _row(name: str, table: Table, newest: Mapping[str, Any]) -> list[str]:
    machine, _, _, commit, date = _origin(newest, _measured(newest)[0])
    return [table.title, machine, f"{date}, {commit}", f"`benchmarks/history/{name}.csv`"]


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

"""What a suite's rows say about us and the peers: ratios against targets, and starts against limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from table import Column, markdown_table

Row = Mapping[str, Any]

COLUMNS = (
    Column("case", "case"),
    Column("system", "system"),
    Column("path", "path"),
    Column("model", "model"),
    Column("method", "method"),
    Column("precision", "precision"),
    Column("checkpointing", "checkpointing"),
    Column("data", "data"),
    Column("batch", "batch"),
    Column("seq", "seq"),
    Column("tokens/s", "tokens_per_second", lambda value: f"{value:,.0f}"),
    Column("peak", "peak_gib", lambda value: f"{value:.1f} GiB"),
    Column("first step", "seconds_to_first_step", lambda value: f"{value:.0f} s"),
    Column("first loss", "loss_first", lambda value: f"{value:.3f}"),
    Column("last loss", "loss_last", lambda value: f"{value:.3f}"),
    Column("status", "status"),
    Column("reason", "reason"),
)


@dataclass(frozen=True)
class Comparison:
    """One of our cases against peers: speed against the fastest of them, memory against the leanest."""

    setting: str
    ours: str
    peers: tuple[str, ...]
    speed: float | None
    """At least this many times the fastest peer's tokens/s; None: not compared."""
    memory: float | None
    """At most this share of the leanest peer's peak; None: not compared."""


@dataclass(frozen=True)
class StartLimit:
    setting: str
    case: str
    seconds: float


@dataclass(frozen=True)
class Targets:
    comparisons: tuple[Comparison, ...]
    starts: tuple[StartLimit, ...]

    def markdown(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Both tables, of records that are newest first; a cell whose cases were not measured says so.

        Systems are compared within the newest record that has us and a peer: machines differ from one day to the next.
        """
        runs = [measured_rows(record) for record in records]
        newest = newest_rows(records)
        compared = [_compared(each, _same_run(each, runs) or newest, newest) for each in self.comparisons]
        started = [_started(each, newest) for each in self.starts]
        heads = ["setting", "our case", "tokens/s", "fastest peer", "ratio", "target", "peak", "leanest peer", "ratio"]
        return "\n".join(
            [
                *markdown_table([*heads, "target"], compared),
                "",
                *markdown_table(["start to first step", "our case", "measured", "limit"], started),
            ]
        )


def measured_rows(record: Mapping[str, Any]) -> dict[str, Row]:
    """By case."""
    return {row["case"]: row for row in record["results"] if row["status"] == "measured"}


def newest_rows(records: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """The newest measurement of each case; `records` are newest first."""
    found: dict[str, Row] = {}
    for record in records:
        found = measured_rows(record) | found
    return found


def _same_run(wanted: Comparison, runs: Sequence[Mapping[str, Row]]) -> Mapping[str, Row] | None:
    return next((rows for rows in runs if wanted.ours in rows and any(peer in rows for peer in wanted.peers)), None)


def _compared(wanted: Comparison, rows: Mapping[str, Row], newest: Mapping[str, Row]) -> list[str]:
    """`rows` are of one run, `newest` of any: a peer that is not in the one may be ahead in another."""
    ours = rows.get(wanted.ours)
    peers = [{**rows[name], "from": name} for name in wanted.peers if name in rows]
    others = [name for name in wanted.peers if name not in rows]
    peers += [{**newest[name], "from": f"{name}, another run"} for name in others if name in newest]
    yes = "yes" if len(peers) == len(wanted.peers) else "so far yes"
    cells = [wanted.setting, wanted.ours]
    for field, target, best, form in (
        ("tokens_per_second", wanted.speed, max, "{:,.0f}"),
        ("peak_gib", wanted.memory, min, "{:.1f} GiB"),
    ):
        peer = best(peers, key=_by(field)) if peers and target is not None else None
        against = _against(ours, peer, field, form, target, at_least=best is max, yes=yes)
        cells += [_figure(ours, field, form), *against]
    return cells


def _by(field: str) -> Callable[[Row], Any]:
    return lambda row: row[field]


def _against(
    ours: Row | None, peer: Row | None, field: str, form: str, target: float | None, *, at_least: bool, yes: str
) -> list[str]:
    """The peer's figure, the ratio to it, and the target with whether it was reached."""
    if target is None:
        return ["–", "–", "–"]
    bound = f"{'at least' if at_least else 'at most'} {target:g}"
    theirs = _figure(peer, field, form) + (f" ({peer['from']})" if peer is not None else "")
    if ours is None or peer is None:
        return [theirs, "–", bound]
    ratio = ours[field] / peer[field]
    reached = ratio >= target if at_least else ratio <= target
    return [theirs, f"{ratio:.2f}", f"{bound}: {yes if reached else 'no'}"]


def _figure(row: Row | None, field: str, form: str) -> str:
    return "not measured" if row is None or row[field] is None else form.format(row[field])


def _started(limit: StartLimit, rows: Mapping[str, Row]) -> Sequence[str]:
    row = rows.get(limit.case)
    measured = _figure(row, "seconds_to_first_step", "{:.0f} s")
    reached = "" if row is None else f": {'yes' if row['seconds_to_first_step'] <= limit.seconds else 'no'}"
    return [limit.setting, limit.case, measured, f"{limit.seconds:g} s{reached}"]

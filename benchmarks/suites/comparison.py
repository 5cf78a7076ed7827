"""Compare our cases of a suite with the peers: ratios against targets, start-up times against limits."""

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
    Column("trainer", "trainer"),
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

MEMORY_COLUMNS = (
    Column("reserved", "reserved_gib", lambda value: f"{value:.2f} GiB"),
    Column("used, by the driver", "device_gib", lambda value: f"{value:.2f} GiB"),
    Column("after two steps", "probe_gib", lambda value: f"{value:.2f} GiB"),
)
"""Of our own runs: what the allocator held, what the driver counted, the allocated peak of the first two steps."""


HEADS = (
    *("setting", "our case", "tokens/s", "fastest peer", "ratio", "target"),
    *("peak GiB", "leanest peer", "ratio", "target"),
)


@dataclass(frozen=True)
class Comparison:
    """One of our cases against its peers: speed against the fastest, memory against the leanest."""

    setting: str
    ours: str
    peers: tuple[str, ...]
    speed: float | None
    """Minimum ratio to the fastest peer's tokens/s; None: not compared."""
    memory: float | None
    """Maximum ratio to the leanest peer's peak; None: not compared."""


@dataclass(frozen=True)
class StartLimit:
    setting: str
    case: str
    seconds: float


@dataclass(frozen=True)
class Limit:
    """Figures that one of our cases must reach by itself."""

    setting: str
    case: str
    tokens_per_second: int
    peak_gib: float


@dataclass(frozen=True)
class Longest:
    """The longest sequence among our cases that were measured, against the longest of the peers' cases."""

    setting: str
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    ratio: float


@dataclass(frozen=True)
class Targets:
    comparisons: tuple[Comparison, ...]
    starts: tuple[StartLimit, ...]
    longest: tuple[Longest, ...] = ()
    limits: tuple[Limit, ...] = ()

    def markdown(self, records: Sequence[Mapping[str, Any]]) -> str:
        """Render the tables; `records` are newest first. Comparisons without a measurement of ours are only counted.

        Systems are compared within the newest record that has our case and a peer: hosts differ from day to day.
        """
        runs = [measured_rows(record) for record in records]
        newest = newest_rows(records)
        known = [each for each in self.comparisons if each.ours in newest]
        compared = [_comparison_row(each, _same_run(each, runs) or newest, newest) for each in known]
        started = [_start_row(each, newest) for each in self.starts]
        lines = markdown_table(HEADS, compared)
        if any("*" in cell for row in compared for cell in row):
            lines += ["", "\\* measured in another run."]
        if len(known) < len(self.comparisons):
            lines += ["", f"{len(self.comparisons) - len(known)} more comparisons have not been measured yet."]
        if started:
            lines += ["", *markdown_table(["time to first step", "our case", "measured", "limit"], started)]
        limited = [_limit_row(each, newest[each.case]) for each in self.limits if each.case in newest]
        if limited:
            lines += [
                "",
                *markdown_table(["setting", "our case", "tokens/s", "at least", "peak GiB", "limit"], limited),
            ]
        reached = [row for each in self.longest if (row := _longest_row(each, newest)) is not None]
        if reached:
            lines += ["", *markdown_table(["longest sequence", "ours", "peers", "ratio", "target"], reached)]
        return "\n".join(lines)


def _limit_row(limit: Limit, row: Row) -> list[str]:
    speed, peak = row["tokens_per_second"], row["peak_gib"]
    fast, lean = ("yes" if reached else "no" for reached in (speed >= limit.tokens_per_second, peak <= limit.peak_gib))
    at_least, at_most = f"{limit.tokens_per_second:,}: {fast}", f"{limit.peak_gib:g}: {lean}"
    return [limit.setting, limit.case, f"{speed:,.0f}", at_least, f"{peak:.1f}", at_most]


def _longest_row(longest: Longest, rows: Mapping[str, Row]) -> list[str] | None:
    """Only lengths that were tried count: a system may train longer sequences than any case has."""
    ours, peers = (
        max((rows[name]["seq"] for name in names if name in rows), default=None)
        for names in (longest.ours, longest.peers)
    )
    if ours is None:
        return None
    bound = f"≥ {longest.ratio:g}"
    if peers is None:
        return [longest.setting, f"{ours:,}", "not measured", "–", bound]
    ratio = ours / peers
    return [
        longest.setting,
        f"{ours:,}",
        f"{peers:,}",
        f"{ratio:.2f}",
        f"{bound}: {'yes' if ratio >= longest.ratio else 'no'}",
    ]


def measured_rows(record: Mapping[str, Any]) -> dict[str, Row]:
    """Measured rows by case."""
    return {row["case"]: row for row in record["results"] if row["status"] == "measured"}


def newest_rows(records: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """Return the newest measurement of each case; `records` are newest first."""
    found: dict[str, Row] = {}
    for record in records:
        found = measured_rows(record) | found
    return found


def _same_run(comparison: Comparison, runs: Sequence[Mapping[str, Row]]) -> Mapping[str, Row] | None:
    return next(
        (rows for rows in runs if comparison.ours in rows and any(peer in rows for peer in comparison.peers)), None
    )


def _comparison_row(comparison: Comparison, rows: Mapping[str, Row], newest: Mapping[str, Row]) -> list[str]:
    """`rows` are of one run, `newest` of any run, for peers that are missing from `rows`."""
    ours = rows.get(comparison.ours)
    peers = [{**rows[name], "from": name} for name in comparison.peers if name in rows]
    others = [name for name in comparison.peers if name not in rows]
    peers += [{**newest[name], "from": f"{name} *"} for name in others if name in newest]
    yes = "yes" if len(peers) == len(comparison.peers) else "so far yes"
    cells, fastest = [comparison.setting, comparison.ours], None
    for field, target, best, form in (
        ("tokens_per_second", comparison.speed, max, "{:,.0f}"),
        ("peak_gib", comparison.memory, min, "{:.1f}"),
    ):
        peer = best(peers, key=_by(field)) if peers and target is not None else None
        ratio = _ratio_cells(ours, peer, field, form, target, at_least=best is max, yes=yes)
        if peer is not None and peer["case"] == fastest:
            ratio[0] = _figure(peer, field, form)  # the name stands beside its speed
        fastest = None if peer is None else peer["case"]
        cells += [_figure(ours, field, form), *ratio]
    return cells


def _by(field: str) -> Callable[[Row], Any]:
    return lambda row: row[field]


def _ratio_cells(
    ours: Row | None, peer: Row | None, field: str, form: str, target: float | None, *, at_least: bool, yes: str
) -> list[str]:
    """Cells: the peer's figure, the ratio to it, and the target with whether it was reached."""
    if target is None:
        return ["–", "–", "–"]
    bound = f"{'≥' if at_least else '≤'} {target:g}"
    theirs = _figure(peer, field, form) + (f" ({peer['from']})" if peer is not None else "")
    if ours is None or peer is None:
        return [theirs, "–", bound]
    ratio = ours[field] / peer[field]
    reached = ratio >= target if at_least else ratio <= target
    return [theirs, f"{ratio:.2f}", f"{bound}: {yes if reached else 'no'}"]


def _figure(row: Row | None, field: str, form: str) -> str:
    return "not measured" if row is None or row[field] is None else form.format(row[field])


def _start_row(limit: StartLimit, rows: Mapping[str, Row]) -> Sequence[str]:
    row = rows.get(limit.case)
    measured = _figure(row, "seconds_to_first_step", "{:.0f} s")
    reached = "" if row is None else f": {'yes' if row['seconds_to_first_step'] <= limit.seconds else 'no'}"
    return [limit.setting, limit.case, measured, f"{limit.seconds:g} s{reached}"]

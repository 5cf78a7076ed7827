"""The section of docs/service.md on what the service bears, from the newest results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BEGIN, END = "<!-- load: begin -->", "<!-- load: end -->"
MIB = 1 << 20


def section(records: Sequence[Mapping[str, Any]]) -> str:
    """`records` are oldest first."""
    newest = {record["benchmark"]: record for record in records}
    load, start = newest["service_load"], newest["service_start"]
    asked, found = load["parameters"], load["results"]
    began, upload = start["results"], start["parameters"]["mebibytes"]
    grown = (began["memory_peak_bytes"] - began["memory_before_bytes"]) / MIB
    lines = [
        f"Measured on {load['hardware']['cores']} cores with SQLite, the client on the same host "
        f"([benchmarks](benchmarks.md)){_conditions(load)}. Readers were connected before reads were timed; many that "
        "connect at once make answers slower:",
        "",
        f"- {asked['jobs']:,} queued jobs, {asked['readers']} live readers and {asked['reads_per_second']} mixed reads "
        "per second while a job trains:",
        f"  p99 {1000 * found['p99_seconds']:.0f} ms (worst of {asked['windows']} windows "
        f"{1000 * found['worst_p99_seconds']:.0f} ms), {found['failed']} failed. Training keeps "
        f"{100 * min(1.0, found['training_share']):.0f} % of its speed.",
        f"- Up in {began['start_seconds']:.1f} s.",
        f"- A file of {upload:,} MiB takes {began['upload_seconds']:.1f} s and {grown:.1f} MiB of memory; one whose "
        f"connection breaks leaves {began['broken_leaves_bytes']} bytes.",
    ]
    return "\n".join(lines)


def _conditions(record: Mapping[str, Any]) -> str:
    niceness = record["parameters"]["niceness"]
    if not niceness:
        return ""
    return f", at niceness {niceness} beside other work (load {record['load_before']:.0f})"


def with_section(page: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return docs/service.md with this section replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{section(records)}\n\n{END}{rest.partition(END)[2]}"

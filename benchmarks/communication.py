"""Collectives and bytes that a process sends per step, counted in every parallel mode with two processes, and theory.

A training step on a small Llama, on CPUs in float32. Counts do not depend on the hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ranks.launch import run_ranks
from ranks.theory import Case, Shape, expected
from table import Column, Table

MODES = ("ddp", "fsdp", "tp", "pp", "cp")


def _kib(value: float) -> str:
    return f"{value / 1024:,.1f} KiB"


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


TABLE = Table(
    title="Communication per step",
    how="Collectives and sends of one process in one training step, with two processes in float32, counted in torch's"
    " dispatcher, without one all-gather of a few numbers; theory follows from the model's shape. Sent: bytes that a"
    " ring, or a direct send, moves.",
    columns=(
        Column("mode", "mode"),
        Column("method", "method"),
        Column("hidden", "parameters.hidden"),
        Column("layers", "parameters.layers"),
        Column("tokens per process", "tokens"),
        Column("counted", "counts", _kinds),
        Column("theory", "expected_counts", _kinds),
        Column("tensors", "whole_bytes", _kib),
        Column("theory", "expected_whole_bytes", _kib),
        Column("sent", "sent_bytes", _kib),
    ),
)


def run(
    *, hidden: int = 256, layers: int = 4, vocabulary: int = 2048, seq_len: int = 128, batch: int = 4
) -> dict[str, Any]:
    size = {"hidden": hidden, "layers": layers, "vocabulary": vocabulary, "seq_len": seq_len, "batch": batch}
    # a pipeline would split a single micro-batch into two anyway, so that both processes have work
    cases = [Case(mode, method, passes=2 if mode == "pp" else 1) for method in ("lora", "full") for mode in MODES]
    found = run_ranks("communication", {"size": size, "cases": [asdict(case) for case in cases]})
    shape = Shape(hidden, layers, vocabulary, tokens=batch * seq_len)
    return {"parameters": size, "results": [_row(case, shape, rows) for case, rows in zip(cases, found, strict=True)]}


def _row(case: Case, shape: Shape, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Result row of the process that sent most."""
    most = max(ranks, key=lambda rank: rank["sent_bytes"])
    theory = expected(case, shape)
    return {
        "mode": case.mode,
        "method": case.method,
        "tokens": shape.tokens,
        "counts": dict(sorted(most["counts"].items())),
        "expected_counts": dict(sorted(theory.counts.items())),
        "whole_bytes": sum(most["whole_bytes"].values()),
        "expected_whole_bytes": theory.whole_bytes.total(),
        "sent_bytes": most["sent_bytes"],
    }

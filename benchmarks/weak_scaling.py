"""Weak scaling: twice the batch in two processes, relative to one process.

One thread per process, on CPUs: two single-threaded processes on two cores stand for two GPUs that share only what they
send. Ideally a step with twice the global batch takes as long as before. The same is measured for plain PyTorch DDP on
the same model, and for two processes that do not communicate, which shows what the host allows. `--set cores=0,1` pins
each process, with all its threads, to its own core.
"""

from __future__ import annotations

from typing import Any

from ranks.launch import run_ranks
from table import Column, Table, milliseconds, percent

TARGETS = {"lora": 0.95, "full": 0.85}
"""Target efficiency by method."""

TABLE = Table(
    title="Weak scaling",
    how="Step time of one single-threaded process divided by that of two with twice the global batch; median over"
    " rounds, and in brackets the same for the fastest rounds, which other load has disturbed least. Ours: the engine's"
    " step under DDP. Plain: PyTorch's DDP around the same model. Host: two processes that do not communicate. Relative"
    " to plain DDP: above 1 is faster, or less CPU time; the spread is the interquartile range over rounds, and smaller"
    " differences are not significant.",
    columns=(
        Column("method", "method"),
        Column("trainable", "trained", lambda value: f"{value / 1e6:.2f} M"),
        Column("tokens per process", "tokens"),
        Column("step, one process", "alone_seconds", milliseconds),
        Column("step, two processes", "together_seconds", milliseconds),
        Column("ours", "efficiency", percent),
        Column("(fastest)", "fastest_efficiency", percent),
        Column("target", "target", percent),
        Column("plain DDP", "plain_efficiency", percent),
        Column("(fastest)", "fastest_plain_efficiency", percent),
        Column("host", "machine_efficiency", percent),
        Column("(fastest)", "fastest_machine_efficiency", percent),
        Column("speed relative to plain DDP", "against_plain", lambda value: f"{value:.3f}x"),
        Column("spread", "against_plain_spread", lambda value: f"{value:.3f}"),
        Column("CPU time relative to plain DDP", "cpu_against_plain", lambda value: f"{value:.3f}x"),
    ),
)


def run(
    *,
    hidden: int = 512,
    layers: int = 6,
    vocabulary: int = 4096,
    seq_len: int = 256,
    batch: int = 4,
    repeats: int = 9,
    steps: int = 1,
    cores: str | list[int] | None = None,
) -> dict[str, Any]:
    size = {"hidden": hidden, "layers": layers, "vocabulary": vocabulary, "seq_len": seq_len, "batch": batch}
    pinned = [int(core) for core in cores.split(",")] if isinstance(cores, str) else cores
    request = {"size": size, "methods": list(TARGETS), "repeats": repeats, "steps": steps, "cores": pinned}
    found = run_ranks("weak_scaling", request)
    further = {"tokens": batch * seq_len}
    return {
        "parameters": {**size, "repeats": repeats, "steps": steps, "cores": pinned},
        "results": [{**row, **further, "target": TARGETS[row["method"]]} for row in found],
    }

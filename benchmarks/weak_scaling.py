"""How much of a second core a second process brings: twice the batch in two processes, against one process alone.

One thread for each process, on CPUs: two processes of one thread on two cores stand for two GPUs that share nothing but
what they send. Ideal is that a step with twice the global batch takes as long as before. The same is measured for plain
PyTorch DDP on the same model, and for two processes that do not talk at all, which is what the machine itself allows.
`--set cores=0,1` keeps each process on a core of its own, with all its threads.
"""

from __future__ import annotations

from typing import Any

from ranks.launch import run_ranks
from table import Column, Table, milliseconds, percent

TARGETS = {"lora": 0.95, "full": 0.85}
"""Of the ideal."""

TABLE = Table(
    title="Weak scaling",
    how="Step of one process with one thread, over that of two such processes with twice the global batch; median over"
    " turns in one run, and in brackets the same of the fastest turns, which other work has disturbed least. Ours: the"
    " engine's step under DDP. Plain: PyTorch's DDP around the same model. Machine: two processes that do not talk."
    " Against plain DDP: above 1 is faster, or less work; the spread is that between the"
    " quartiles of rounds, and a difference smaller than that says nothing.",
    columns=(
        Column("method", "method"),
        Column("trained", "trained", lambda value: f"{value / 1e6:.2f} M"),
        Column("tokens of a process", "tokens"),
        Column("step alone", "alone_seconds", milliseconds),
        Column("step of two", "together_seconds", milliseconds),
        Column("ours", "efficiency", percent),
        Column("(fastest)", "fastest_efficiency", percent),
        Column("target", "target", percent),
        Column("plain DDP", "plain_efficiency", percent),
        Column("(fastest)", "fastest_plain_efficiency", percent),
        Column("machine", "machine_efficiency", percent),
        Column("(fastest)", "fastest_machine_efficiency", percent),
        Column("speed against plain DDP", "against_plain", lambda value: f"{value:.3f}x"),
        Column("its spread", "against_plain_spread", lambda value: f"{value:.3f}"),
        Column("processor time against plain DDP", "cpu_against_plain", lambda value: f"{value:.3f}x"),
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

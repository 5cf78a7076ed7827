"""A case: one system doing one piece of work. A suite is a list of them, most important first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

System = Literal["pantheraml", "unsloth", "liger", "hf"]

# what a path through a system imports; a case whose packages are not there is skipped, with that as its reason
PACKAGES: dict[tuple[str, str], tuple[str, ...]] = {
    ("pantheraml", "cli"): (),
    ("pantheraml", "trl"): ("trl", "datasets"),
    ("unsloth", "trl"): ("unsloth", "unsloth_zoo", "trl", "datasets", "bitsandbytes"),
    ("liger", "trl"): ("liger_kernel", "trl", "datasets"),
    ("hf", "trl"): ("trl", "datasets"),
}

QUANTISED = "-quantised"
"""At the end of a model's name: the model of that shape, written anew by `pantheraml quantise`."""

FIELDS = (
    "case",
    "status",
    "reason",
    "system",
    "path",
    "model",
    "method",
    "precision",
    "checkpointing",
    "data",
    "batch",
    "seq",
    "cache",
    "tokens_per_second",
    "peak_gib",
    "seconds_to_first_step",
    "loss_first",
    "loss_last",
    "settings",
    "seconds",
    "date",
    "commit",
)
"""The fields of a result row, all of them in every row; what was not measured is None. `seconds` are those from the
case's turn to its end, without what its process did before."""


@dataclass(frozen=True)
class Case:
    """Batches are `batch` sequences of `seq` tokens, LoRA has rank 16 on all linear layers, and AdamW is fused."""

    name: str
    system: System
    path: Literal["cli", "trl"]
    model: str
    """A shape of `inputs.py`, or one with QUANTISED behind it."""
    method: Literal["lora", "qlora", "full"]
    precision: Literal["bf16", "fp8", "nf4", "fp32"]
    """Of the weights that are not trained; of all weights in a full fine-tune."""
    minutes: float
    """How long it should take, start and all: what a time budget counts with. Three times that long is a failure."""
    checkpointing: str = "none"
    """In the system's own words: what it is given as its setting."""
    data: Literal["full", "uneven"] = "full"
    """full: every sequence is full. uneven: documents of log-normal lengths, packed in the system's own way."""
    batch: int = 4
    seq: int = 2048
    steps: int = 13
    cache: Literal["kept", "fresh"] = "kept"
    """Whether compiled kernels of earlier cases of this system may be used, or all of them are removed before."""
    alone: bool = False
    """Nothing is started beside it: how long its start takes is a target of its own."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Command line only: further `--set`."""

    @property
    def shape(self) -> str:
        return self.model.removesuffix(QUANTISED)

    @property
    def packages(self) -> tuple[str, ...]:
        return PACKAGES[self.system, self.path]

    @property
    def can_wait(self) -> bool:
        """Whether its process may be there before its turn; a cache is emptied while no process has it open."""
        return self.path == "trl" and self.cache == "kept"

    def row(self, *, status: str, reason: str | None = None, **measured: Any) -> dict[str, Any]:
        """A result row. `status` is measured, failed, out of memory, timed out, skipped or not run."""
        fixed = {"case": self.name, "status": status, "reason": reason, "cache": None}
        own = dataclasses.asdict(self) | fixed | measured
        return {name: own.get(name) for name in FIELDS}

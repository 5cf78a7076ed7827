"""A case: one system in one setting. A suite is a list of cases, most important first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

System = Literal["pantheraml", "unsloth", "liger", "hf"]

# packages that a system and path import; a case is skipped if one is missing
PACKAGES: dict[tuple[str, str], tuple[str, ...]] = {
    ("pantheraml", "cli"): (),
    ("pantheraml", "trl"): ("trl", "datasets"),
    ("unsloth", "trl"): ("unsloth", "unsloth_zoo", "trl", "datasets", "bitsandbytes"),
    ("liger", "trl"): ("liger_kernel", "trl", "datasets"),
    ("hf", "trl"): ("trl", "datasets"),
}

QUANTIZED = "-quantized"
"""Suffix of a model's name: the model of that shape, quantized by `pantheraml quantize`."""

FIELDS = (
    "case",
    "status",
    "reason",
    "system",
    "path",
    "trainer",
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
    "reserved_gib",
    "device_gib",
    "probe_gib",
    "seconds_to_first_step",
    "loss_first",
    "loss_last",
    "settings",
    "seconds",
    "date",
    "commit",
)
"""Fields of a result row; those not measured are None. `seconds` counts from the case's turn to its end, without its
preparation. Of memory, `peak` is what torch allocated, `reserved` what its allocator held, `device` what the driver
counted as used by all processes, `probe` what was allocated at most in the first two steps."""


@dataclass(frozen=True)
class Case:
    """Batches are `batch` sequences of `seq` tokens, LoRA has rank 16 on all linear layers, and AdamW is fused."""

    name: str
    system: System
    path: Literal["cli", "trl"]
    model: str
    """A shape of `inputs.py`, optionally with the suffix QUANTIZED."""
    method: Literal["lora", "qlora", "full"]
    precision: Literal["bf16", "fp8", "nf4", "fp32"]
    """Format of frozen weights; in a full fine-tune, of all weights."""
    minutes: float
    """Expected time including start-up, used for time budgets. The timeout is three times that."""
    trainer: Literal["sft", "dpo", "grpo"] = "sft"
    """TRL's trainer (`trl_trainers.py`); our command line trains as `sft` does."""
    checkpointing: str = "none"
    """Value of the system's own setting."""
    data: Literal["full", "uneven"] = "full"
    """full: every sequence is full. uneven: documents of log-normal lengths, packed in the system's own way."""
    batch: int = 4
    """Sequences; pairs for `dpo`, completions of one prompt for `grpo`."""
    seq: int = 2048
    steps: int = 13
    cache: Literal["kept", "fresh"] = "kept"
    """Whether to keep or clear this system's cache of compiled kernels."""
    alone: bool = False
    """Start no other case meanwhile: its start-up time is a target."""
    experts: bool = False
    """LoRA on attention and on stacked experts, and on no other layers."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Additional `--set` options (command line only)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    @property
    def shape(self) -> str:
        return self.model.removesuffix(QUANTIZED)

    @property
    def packages(self) -> tuple[str, ...]:
        return PACKAGES[self.system, self.path]

    @property
    def can_wait(self) -> bool:
        """Whether its process may start ahead of its turn; a cache is cleared only while no process uses it."""
        return self.path == "trl" and self.cache == "kept"

    def row(self, *, status: str, reason: str | None = None, **measured: Any) -> dict[str, Any]:
        """Return a result row. `status` is measured, failed, out of memory, timed out, skipped or not run."""
        fixed = {"case": self.name, "status": status, "reason": reason, "cache": None}
        own = dataclasses.asdict(self) | fixed | measured
        return {name: own.get(name) for name in FIELDS}

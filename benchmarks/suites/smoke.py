"""Smoke test suite, small enough for a CPU; its figures are meaningless."""

from __future__ import annotations

from dataclasses import replace

from table import Table

from suites.case import QUANTIZED, Case
from suites.comparison import COLUMNS, Comparison, StartLimit, Targets

OURS = Case(
    "ours-tiny-lora",
    system="pantheraml",
    path="cli",
    model="tiny",
    method="lora",
    precision="bf16",
    minutes=1,
    batch=2,
    seq=64,
    steps=5,
)
HF = replace(OURS, name="hf-tiny-lora", system="hf", path="trl")

CASES = (
    OURS,
    replace(OURS, name="ours-tiny-uneven", method="full", precision="fp32", data="uneven", seq=512, steps=4),
    replace(OURS, name="ours-tiny-quantized", model="tiny" + QUANTIZED, method="qlora", precision="nf4"),
    HF,
    replace(HF, name="ours-trl-tiny-lora", system="pantheraml"),
    replace(HF, name="unsloth-tiny-lora", system="unsloth"),
    *(
        replace(HF, name=f"{name}-tiny-{trainer}{suffix}", system=system, trainer=trainer, data=data)
        for trainer in ("dpo", "grpo")
        for name, system in (("hf", "hf"), ("ours-trl", "pantheraml"))
        for suffix, data in (("", "full"), ("-uneven", "uneven"))
    ),
    *(
        replace(case, name=f"{name}-tiny-experts", model="tiny-moe", experts=True, system=system)
        for name, case, system in (("ours", OURS, "pantheraml"), ("hf", HF, "hf"), ("ours-trl", HF, "pantheraml"))
    ),
)

TARGETS = Targets(
    comparisons=(Comparison("tiny LoRA", "ours-tiny-lora", ("hf-tiny-lora",), 1.0, None),),
    starts=(StartLimit("tiny LoRA", "ours-tiny-lora", 60),),
)

TABLE = Table(title="Smoke", how="A tiny model on any device.", columns=COLUMNS, summary=TARGETS.markdown)

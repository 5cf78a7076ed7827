"""Suite of one H200: families other than Llama, each at the size most people train, against Unsloth.

Every family is to reach what Llama reaches: 1.6 times Unsloth's speed with 0.95 times its memory, in full sequences
and in uneven documents. Unsloth's fp8 is slower on packed documents, so there only its bf16 is measured.
"""

from __future__ import annotations

from dataclasses import replace

from table import Table

from suites.case import Case
from suites.comparison import COLUMNS, Comparison, Targets

OURS = Case("", system="pantheraml", path="cli", model="", method="lora", precision="fp8", minutes=1.0)
OURS_TRL = replace(OURS, path="trl", minutes=1.2)
UNSLOTH = replace(OURS_TRL, system="unsloth", precision="bf16", minutes=1.2)
UNSLOTH_FP8 = replace(UNSLOTH, precision="fp8", minutes=4)

MODELS = {
    "qwen3-4b": "Qwen3-4B",
    "gemma3-4b": "Gemma-3-4B",
    "qwen2.5-3b": "Qwen2.5-3B",
    "mistral-7b": "Mistral-7B",
}
"""Shapes of `inputs.py`, most important first, and what people call them."""

SPEED, MEMORY = 1.6, 0.95


def _cases(template: Case, suffix: str, name: str) -> tuple[Case, ...]:
    return tuple(replace(template, name=f"{name}-{model}-lora{suffix}", model=model) for model in MODELS)


CASES = (
    *_cases(OURS, "", "ours"),
    *_cases(UNSLOTH, "", "unsloth"),
    *_cases(replace(OURS, data="uneven"), "-uneven", "ours"),
    *_cases(replace(UNSLOTH, data="uneven"), "-uneven", "unsloth"),
    *_cases(UNSLOTH_FP8, "-fp8", "unsloth"),
    *_cases(OURS_TRL, "", "ours-trl"),
    *_cases(replace(OURS_TRL, data="uneven"), "-uneven", "ours-trl"),
    *_cases(replace(OURS, precision="bf16"), "-bf16", "ours"),
)


def _comparisons(model: str, title: str) -> tuple[Comparison, ...]:
    full = f"unsloth-{model}-lora", f"unsloth-{model}-lora-fp8"
    uneven = (f"unsloth-{model}-lora-uneven",)
    return (
        *(
            Comparison(f"{title} LoRA 4x2048", f"{ours}-{model}-lora", full, SPEED, MEMORY)
            for ours in ("ours", "ours-trl")
        ),
        *(
            Comparison(f"{title} LoRA, uneven documents, packed", f"{ours}-{model}-lora-uneven", uneven, SPEED, MEMORY)
            for ours in ("ours", "ours-trl")
        ),
        Comparison(f"{title} LoRA 4x2048, both bf16", f"ours-{model}-lora-bf16", full[:1], 1.1, None),
    )


TARGETS = Targets(
    comparisons=tuple(row for model, title in MODELS.items() for row in _comparisons(model, title)), starts=()
)

TABLE = Table(
    title="One H200: other families",
    how=(
        "As in the table of Llama, with the shapes of Qwen3-4B, the text part of Gemma-3-4B, Qwen2.5-3B and"
        " Mistral-7B-v0.3."
    ),
    columns=COLUMNS,
    summary=TARGETS.markdown,
)

"""The table in README.md: speed and memory relative to Unsloth, from the newest results of the H200 suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suites.comparison import measured_rows
from table import markdown_table

SUITES = ("h200", "h200-families")
BEGIN, END = "<!-- ratios: begin -->", "<!-- ratios: end -->"

# label -> our case, Unsloth's case
ROWS = {
    "Llama-3.1-8B LoRA, 4 x 2048, both fp8": ("ours-8b-lora-fp8", "unsloth-8b-lora-fp8"),
    "the same, Unsloth's default (bf16)": ("ours-8b-lora-fp8", "unsloth-8b-lora"),
    "the same, both bf16": ("ours-8b-lora-bf16", "unsloth-8b-lora"),
    "8B LoRA, documents of uneven length": ("ours-8b-lora-uneven", "unsloth-8b-lora-uneven"),
    "8B LoRA, activation checkpointing": ("ours-8b-lora-lean", "unsloth-8b-lora-lean"),
    "8B QLoRA, activation checkpointing": ("ours-8b-qlora-lean-quantized", "unsloth-8b-qlora-lean"),
    "8B LoRA, DPO": ("ours-trl-8b-dpo-fp8", "unsloth-8b-dpo"),
    "8B LoRA, GRPO without generation, 8 completions per prompt": ("ours-trl-8b-grpo-fp8", "unsloth-8b-grpo"),
    "Llama-3.2-1B LoRA": ("ours-1b-lora-fp8", "unsloth-1b-lora"),
    "Qwen3-4B LoRA": ("ours-qwen3-4b-lora", "unsloth-qwen3-4b-lora"),
    "Gemma-3-4B LoRA": ("ours-gemma3-4b-lora", "unsloth-gemma3-4b-lora"),
}


def ratios(records: Sequence[Mapping[str, Any]]) -> str:
    """Render the rows for which one run measured both systems; `records` are oldest first."""
    runs = [measured_rows(record) for record in reversed(records) if record["benchmark"] in SUITES]
    rows = []
    for label, (ours, theirs) in ROWS.items():
        both = next((run for run in runs if ours in run and theirs in run), None)
        if both is not None:
            us, them = both[ours], both[theirs]
            speeds, peaks = (us["tokens_per_second"], them["tokens_per_second"]), (us["peak_gib"], them["peak_gib"])
            rows.append(
                [
                    label,
                    f"**{speeds[0] / speeds[1]:.2f}x** ({speeds[0]:,.0f} / {speeds[1]:,.0f})",
                    f"{peaks[0] / peaks[1]:.2f}x ({peaks[0]:.1f} / {peaks[1]:.1f})",
                ]
            )
    return "\n".join(markdown_table(["one H200", "tokens/s, ours / Unsloth", "peak GiB, ours / Unsloth"], rows))


def with_ratios(readme: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return README.md with its table replaced."""
    head, _, rest = readme.partition(BEGIN)
    return f"{head}{BEGIN}\n{ratios(records)}\n{END}{rest.partition(END)[2]}"

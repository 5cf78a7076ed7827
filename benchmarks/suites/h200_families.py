"""Suite of one H200: families other than Llama, each at the size most people train, against Unsloth.

Every family is to reach what Llama reaches: 1.6 times Unsloth's speed with 0.95 times its memory, in full sequences
and in uneven documents. Unsloth's fp8 is slower on packed documents, so there only its bf16 is measured. Then mixtures
of experts, long sequences (each system in its leanest mode; a case that runs out of memory is a result), and a dense
model of half of Qwen3-32B. Most important first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from table import Table

from suites.case import Case
from suites.comparison import COLUMNS, Comparison, Limit, Longest, Targets

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

LLAMA = {"8b": "Llama-3.1-8B"}
"""For the figures of one run: its own suite, `h200`, has more of its settings."""
MORE = {"olmo3-7b": "OLMo-3-7B", "granite-8b": "Granite-3.3-8B", "smollm3-3b": "SmolLM3-3B"}
"""Families after these, each in full sequences only."""
EXPERTS = {"gpt-oss-20b": "gpt-oss-20b", "qwen3-30b-a3b-half": "half of Qwen3-30B-A3B"}
BIG = "qwen3-32b-half"

LENGTHS = {"32k": 32_768, "64k": 65_536, "128k": 131_072, "192k": 196_608, "256k": 262_144, "384k": 393_216}
REPORTED = ("32k", "64k", "128k")
"""Lengths at which speed is compared; the others are tried to find the longest."""

SPEED, MEMORY = 1.6, 0.95


def _cases(template: Case, suffix: str, name: str, models: Iterable[str] = MODELS) -> tuple[Case, ...]:
    return tuple(replace(template, name=f"{name}-{model}-lora{suffix}", model=model) for model in models)


def _lean(template: Case, method: Literal["lora", "qlora"]) -> Case:
    """Return the system's leanest mode."""
    ours = template.system == "pantheraml"
    precision = "nf4" if method == "qlora" else template.precision
    return replace(template, method=method, precision=precision, checkpointing="offload" if ours else "unsloth")


def _long(name: str, template: Case, method: Literal["lora", "qlora"], length: str) -> Case:
    """One long sequence per step. Attention takes most of the time, so that it grows with the square.

    To find the longest, two steps do: the second has the optimizer's states. A command on a rented machine may take ten
    minutes, in which the longest has but one; the states of its adapters are a third of a GiB.
    """
    seq, steps = LENGTHS[length], 5 if length in REPORTED else 2
    steps = 1 if seq > LENGTHS["256k"] else steps
    minutes = 1.5 + 0.45 * steps * (seq / LENGTHS["128k"]) ** 2
    return replace(
        _lean(template, method),
        name=f"{name}-8b-{method}-{length}", model="8b-long", batch=1, seq=seq, steps=steps, minutes=round(minutes, 1),
    )  # fmt: skip


SYSTEMS = (("ours", OURS), ("unsloth", UNSLOTH))
LONG = tuple(
    _long(name, template, method, length)
    for length in (*REPORTED, *(length for length in LENGTHS if length not in REPORTED))
    for method in ("qlora", "lora")
    for name, template in SYSTEMS
)
WITH_EXPERTS = replace(OURS, precision="bf16", experts=True, minutes=4)


OTHER_SHAPES = {"mistral-7b": ("1x8192", 1, 8192), "qwen2.5-3b": ("8x1024", 8, 1024)}
"""Shapes of batches that are compared besides 4 x 2048: name, batch, sequence."""


def _of_other_shape(template: Case, name: str, more: str = "") -> Iterator[Case]:
    for model, (shape, batch, seq) in OTHER_SHAPES.items():
        yield replace(template, name=f"{name}-{model}-lora-{shape}{more}", model=model, batch=batch, seq=seq)


CASES = (
    *_cases(OURS, "", "ours"),
    *_cases(UNSLOTH, "", "unsloth"),
    *_cases(OURS, "", "ours", LLAMA),
    *_cases(UNSLOTH, "", "unsloth", LLAMA),
    *_cases(replace(OURS, data="uneven"), "-uneven", "ours"),
    *_cases(replace(UNSLOTH, data="uneven"), "-uneven", "unsloth"),
    *_cases(UNSLOTH_FP8, "-fp8", "unsloth"),
    *_cases(UNSLOTH_FP8, "-fp8", "unsloth", LLAMA),
    *_of_other_shape(OURS, "ours"),
    *_of_other_shape(UNSLOTH, "unsloth"),
    *_of_other_shape(UNSLOTH_FP8, "unsloth", "-fp8"),
    *_cases(OURS_TRL, "", "ours-trl"),
    *_cases(OURS_TRL, "", "ours-trl", LLAMA),
    *_cases(replace(OURS_TRL, data="uneven"), "-uneven", "ours-trl"),
    *_cases(WITH_EXPERTS, "-experts", "ours", EXPERTS),
    *_cases(replace(UNSLOTH, experts=True, minutes=5), "-experts", "unsloth", EXPERTS),
    *(case for case in LONG if case.name.endswith(REPORTED)),
    *(
        replace(_lean(template, "qlora"), name=f"{name}-{BIG}-qlora-lean", model=BIG, minutes=4)
        for name, template in SYSTEMS
    ),
    *_cases(OURS, "", "ours", MORE),
    *_cases(UNSLOTH, "", "unsloth", MORE),
    *(case for case in LONG if not case.name.endswith(REPORTED)),
    *_cases(replace(WITH_EXPERTS, path="trl"), "-experts", "ours-trl", EXPERTS),
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


def _further_comparisons() -> Iterator[Comparison]:
    for model, title in LLAMA.items():
        peers = f"unsloth-{model}-lora", f"unsloth-{model}-lora-fp8"
        for ours in ("ours", "ours-trl"):
            yield Comparison(f"{title} LoRA 4x2048", f"{ours}-{model}-lora", peers, SPEED, MEMORY)
    for model, (shape, _, _) in OTHER_SHAPES.items():
        names = (f"unsloth-{model}-lora-{shape}", f"unsloth-{model}-lora-{shape}-fp8")
        yield Comparison(f"{MODELS[model]} LoRA {shape}", f"ours-{model}-lora-{shape}", names, SPEED, MEMORY)
    for model, title in EXPERTS.items():
        for ours in ("ours", "ours-trl"):
            peers = (f"unsloth-{model}-lora-experts",)
            yield Comparison(f"{title}, LoRA on attention and experts", f"{ours}-{model}-lora-experts", peers, 1.2, 1.0)
    for length in REPORTED:
        for method, name in (("qlora", "QLoRA"), ("lora", "LoRA")):
            peers = (f"unsloth-8b-{method}-{length}",)
            yield Comparison(f"8B {name} 1x{LENGTHS[length]:,}, lean", f"ours-8b-{method}-{length}", peers, 1.5, 0.7)
    yield Comparison(
        "half of Qwen3-32B, QLoRA, lean", f"ours-{BIG}-qlora-lean", (f"unsloth-{BIG}-qlora-lean",), 1.5, 0.9
    )
    for model, title in MORE.items():
        yield Comparison(f"{title} LoRA 4x2048", f"ours-{model}-lora", (f"unsloth-{model}-lora",), SPEED, MEMORY)


def _longest(method: str, title: str) -> Longest:
    ours, peers = (tuple(f"{name}-8b-{method}-{length}" for length in LENGTHS) for name in ("ours", "unsloth"))
    return Longest(f"8B {title}, lean, of {', '.join(LENGTHS)}", ours, peers, 1.3)


TARGETS = Targets(
    comparisons=(
        *(row for model, title in MODELS.items() for row in _comparisons(model, title)),
        *_further_comparisons(),
    ),
    starts=(),
    longest=(_longest("qlora", "QLoRA"), _longest("lora", "LoRA")),
    limits=(
        Limit("Qwen3-4B LoRA 4x2048", "ours-qwen3-4b-lora", 48_000, 24),
        Limit("Llama-3.1-8B LoRA 4x2048", "ours-8b-lora", 32_000, 36),
    ),
)

TABLE = Table(
    title="One H200: other families",
    how=(
        "As in the table of Llama, with the shapes of Qwen3-4B, the text part of Gemma-3-4B, Qwen2.5-3B and"
        " Mistral-7B-v0.3; mixtures of experts with LoRA on attention and experts; long sequences with an 8B model, of"
        " which only the lengths of the cases were tried."
    ),
    columns=COLUMNS,
    summary=TARGETS.markdown,
    page="benchmarks-families",
)

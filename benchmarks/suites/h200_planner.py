"""Suite of one H200 for the planner: settings that its predictions of memory and time are compared with.

The first half spans what people set; the second half was drawn at random when the formulas stood (`draw`). Every case
is `pantheraml train` as users start it. Cases of one model come together, so that no model is written twice.
docs/planner.md shows every row.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Literal

from table import Table

from suites.case import Case
from suites.comparison import COLUMNS, MEMORY_COLUMNS

SEED, DRAWN = 27, 16
BILLIONS = {"1b": 1.2, "qwen3-1.7b": 1.7, "3b": 3.2, "qwen3-4b": 4.0, "8b": 8.0, "qwen3-8b": 8.2}
"""Parameters of the shapes of `inputs.py`, in the order in which they are run."""
MOST_TOKENS = {"none": 131_072, "selective": 131_072, "full": 524_288, "offload": 524_288}
"""Tokens of a micro-batch times billions of parameters: about what fits without and with recomputation."""

OURS = Case("", system="pantheraml", path="cli", model="8b", method="lora", precision="fp8", minutes=0.8)
STATES = {
    "adamw": {},
    "adamw_bf16": {"train.weights": "bf16", "train.optimizer": "adamw_bf16"},
    "adamw8bit": {"train.weights": "bf16", "train.optimizer": "adamw8bit"},
}
PADDED = {"data.packing": "false"}


def _case(model: str, kind: str, batch: int, seq: int, checkpointing: str = "none", *, padded: bool = False) -> Case:
    """`kind`: such as `lora-fp8`, `qlora-nf4` or `full-bf16-adamw8bit`; the last part names the optimizer."""
    method, precision, *optimizer = kind.split("-")
    settings = (STATES[optimizer[0]] if optimizer else {}) | (PADDED if padded else {})
    words = [model, kind, f"{batch}x{seq}", *([] if checkpointing == "none" else [checkpointing])]
    given: dict[str, Any] = {"method": method, "precision": precision}
    return replace(
        OURS,
        name=f"plan-{'-'.join(words)}{'-padded' if padded else ''}",
        model=model,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        settings=settings,
        minutes=_minutes(model, batch * seq, seq, method),
        **given,
    )


def _minutes(model: str, tokens: int, seq: int, method: str) -> float:
    """Start-up, 13 steps at a third of the H200's speed, and the weights: some 12 bytes per parameter at 0.5 GB/s."""
    step = BILLIONS[model] * tokens / 120_000 * (1 + seq / 32_768)
    saving = 0.4 * BILLIONS[model] if method == "full" else 0.0
    return round(0.5 + BILLIONS[model] / 20 + 13 * step / 60 + saving, 1)


CHOSEN = (
    _case("1b", "lora-bf16", 1, 512),
    _case("1b", "lora-fp8", 16, 2048),
    _case("1b", "full-bf16-adamw_bf16", 8, 2048),
    _case("1b", "full-bf16-adamw", 2, 4096, "full"),
    _case("1b", "full-fp8-adamw_bf16", 4, 8192),
    _case("qwen3-1.7b", "full-bf16-adamw8bit", 4, 2048, "offload"),
    _case("qwen3-1.7b", "lora-bf16", 8, 1024, padded=True),
    _case("3b", "lora-fp8", 1, 32_768, "full"),
    _case("3b", "qlora-nf4", 8, 512),
    _case("3b", "full-bf16-adamw_bf16", 4, 2048, "selective"),
    _case("qwen3-4b", "lora-fp8", 2, 8192, "offload"),
    _case("qwen3-4b", "qlora-nf4", 4, 2048),
    _case("8b", "lora-bf16", 1, 8192, "selective"),
    _case("8b", "qlora-nf4", 1, 32_768, "offload"),
    _case("8b", "lora-fp8", 4, 1024, padded=True),
    _case("qwen3-8b", "lora-fp8", 4, 2048),
)
KINDS = (
    *("lora-bf16", "lora-fp8", "qlora-nf4"),
    *("full-bf16-adamw", "full-bf16-adamw_bf16", "full-bf16-adamw8bit", "full-fp8-adamw_bf16"),
)
MODES: tuple[Literal["none", "selective", "full", "offload"], ...] = ("none", "selective", "full", "offload")


def draw(seed: int = SEED, count: int = DRAWN) -> tuple[Case, ...]:
    """Settings drawn at random; those that one H200 cannot hold by a rule of thumb, or that were drawn, do not count.

    The rule knows nothing of the planner, so that the draw stays the same whatever becomes of its formulas.
    """
    rng, found = random.Random(seed), {case.name: case for case in CHOSEN}
    while len(found) < len(CHOSEN) + count:
        model, kind, mode = rng.choice(list(BILLIONS)), rng.choice(KINDS), rng.choice(MODES)
        seq, batch = rng.choice((512, 1024, 2048, 4096, 8192, 16_384, 32_768)), rng.choice((1, 2, 4, 8, 16))
        padded = rng.random() < 0.25
        tokens = batch * seq
        large = tokens > 65_536 or tokens * BILLIONS[model] > MOST_TOKENS[mode]
        states_too_large = kind.startswith("full") and BILLIONS[model] > 4
        if not (large or states_too_large):
            case = _case(model, kind, batch, seq, mode, padded=padded)
            found.setdefault(case.name, case)
    return tuple(found.values())[len(CHOSEN) :]


RANDOM = draw()
RANDOM_NAMES = frozenset(case.name for case in RANDOM)
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
EXPANDABLE = "-expandable"
"""End of the name of a case that torch's allocator serves with segments that grow, instead of many of fixed sizes."""


def _uneven(name: str, model: str, kind: str, checkpointing: str = "none") -> Case:
    """Rows of many widths, which leave holes between the allocator's blocks."""
    case = _case(model, kind, 4, 2048, checkpointing, padded=True)
    return replace(case, name=f"plan-{name}", data="uneven", steps=30)


COMPARED = (
    _uneven("8b-lora-fp8-uneven-padded", "8b", "lora-fp8"),
    _uneven("1b-full-uneven-padded-offload", "1b", "full-bf16-adamw_bf16", "offload"),
    next(case for case in CHOSEN if case.name == "plan-8b-qlora-nf4-1x32768-offload"),
    next(case for case in CHOSEN if case.name == "plan-qwen3-8b-lora-fp8-4x2048"),
)
"""Cases that run with and without such segments."""
SEGMENTS = (
    *COMPARED[:2],
    *(replace(case, name=f"{case.name}{EXPANDABLE}", environment=ALLOCATOR) for case in COMPARED),
)
NOT_COMPARED = frozenset(case.name for case in SEGMENTS)
"""Not compared with a prediction: theirs is for full rows, or that of the same case without such segments."""
CASES = tuple(case for model in BILLIONS for case in (*CHOSEN, *RANDOM, *SEGMENTS) if case.model == model)

TABLE = Table(
    title="One H200: what the planner predicts",
    how="`pantheraml train` in settings that people use and in settings drawn at random; docs/planner.md compares each"
    " with its prediction.",
    columns=(*COLUMNS, *MEMORY_COLUMNS),
)

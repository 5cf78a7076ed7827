"""The equality matrix: modes x methods x shares x accumulation x packing x clipping x families, as data.

`chosen` is the default selection: each mode with each method, the other properties distributed so that every value of
each meets every mode; plus each further method and dtype in the modes that affect it most. `full` is the full product
(`make equality`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan

PLAIN_MODES = {
    "ddp x2": ParallelDims(replicate=2),
    "fsdp x2": ParallelDims(shard=2),
    "tp x2": ParallelDims(tensor=2),
    "pp x2": ParallelDims(pipeline=2),
    "cp x2": ParallelDims(context=2),
    "ddp x4": ParallelDims(replicate=4),
    "hsdp 2x2": ParallelDims(replicate=2, shard=2),
    "fsdp 2 x tp 2": ParallelDims(shard=2, tensor=2),
    "dp 2 x pp 2": ParallelDims(replicate=2, pipeline=2),
}
OTHER_PRODUCTS = {
    "dp 2 x tp 2": ParallelDims(replicate=2, tensor=2),
    "dp 2 x cp 2": ParallelDims(replicate=2, context=2),
    "fsdp 2 x cp 2": ParallelDims(shard=2, context=2),
    "cp 2 x tp 2": ParallelDims(context=2, tensor=2),
}
TOO_LARGE_TO_CHOOSE = {"hsdp 2x2 x tp 2": ParallelDims(replicate=2, shard=2, tensor=2)}
MODES = PLAIN_MODES | OTHER_PRODUCTS | TOO_LARGE_TO_CHOOSE

METHODS = ("full", "lora")
FAMILIES = ("llama", "qwen3", "gpt2")
STEPS = 3

SPECIAL = {
    "dora": ("dora", "float32"),
    "nf4": ("lora", "nf4"),
    "int8": ("lora", "int8"),
    "fp8": ("lora", "fp8"),
    "full float64": ("full", "float64"),
    "lora float64": ("lora", "float64"),
}
"""Name -> method, dtype."""
CHOSEN_SPECIALS = {
    "ddp x2": ("int8", "fp8", "full float64"),
    "tp x2": ("fp8",),
    "pp x2": ("int8", "fp8"),
    "hsdp 2x2": ("dora", "nf4", "fp8"),
    "fsdp 2 x tp 2": ("dora", "nf4", "fp8"),
    "dp 2 x pp 2": ("dora", "nf4", "fp8", "lora float64"),
    "dp 2 x tp 2": ("dora", "nf4"),
}


@dataclass(frozen=True)
class Case:
    mode: str
    family: str
    method: str
    even: bool
    accumulated: bool
    packed: bool
    clipped: bool
    numbers: str = "float32"
    """Compute dtype; or, under float32 adapters, the quantization format of the base model."""

    def __str__(self) -> str:
        words = [
            self.mode,
            self.family,
            self.method,
            *([] if self.numbers == "float32" else [self.numbers]),
            "even" if self.even else "uneven",
            "accumulated" if self.accumulated else "at once",
            "packed" if self.packed else "padded",
            "clipped" if self.clipped else "unclipped",
        ]
        return " ".join(words)

    @property
    def dims(self) -> ParallelDims:
        return MODES[self.mode]

    @property
    def possible(self) -> bool:
        """GPT-2 has no tensor parallel plan."""
        return not (self.family == "gpt2" and self.dims.tensor > 1)

    @property
    def global_batch(self) -> int:
        """At least four samples per share, so that there can be four passes; uneven: the last share has one fewer."""
        return max(8, 4 * self.dims.data) - (0 if self.even else 1)

    def config(self, root: Path) -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "model": {"path": str(root / self.family)},
                "data": {
                    "path": str(root / "data.jsonl"),
                    "seq_len": 48,
                    "packing": self.packed,
                    "cache_dir": str(root / "cache"),
                },
                "method": {"kind": self.method, "rank": 4},
                "train": {
                    "global_batch_size": self.global_batch,
                    "max_steps": STEPS,
                    "learning_rate": 1e-2,
                    "max_grad_norm": 0.5 if self.clipped else 0,
                },
                "device": "cpu",
            }
        )

    def plan(self, config: TrainConfig, *, alone: bool = False) -> Plan:
        """Four passes or one; fewer on a rank with an uneven share. `alone`: a single process with one pass."""
        share = -(-self.global_batch // self.dims.data)
        micro = share // 4 if self.accumulated else share
        plan = make_plan(config) if alone else make_plan(config, dims=self.dims, micro=max(1, micro))
        packed = self.numbers if self.numbers in ("fp8", "int8", "nf4") else None
        return plan.model_copy(update={"frozen_weights": packed})

    def reference(self) -> tuple[Any, ...]:
        """Key of the single-process run that this case is compared with."""
        own = tuple(value for name, value in asdict(self).items() if name not in ("mode", "accumulated"))
        return (*own, self.global_batch)


def full() -> list[Case]:
    switches = itertools.product((True, False), repeat=4)
    product = itertools.product(MODES, FAMILIES, METHODS, switches)
    cases = [Case(mode, family, method, *values) for mode, family, method, values in product]
    return [case for case in cases if case.possible] + _special_cases({mode: tuple(SPECIAL) for mode in MODES})


def chosen() -> list[Case]:
    return [*_distributed_switches(), *_special_cases(CHOSEN_SPECIALS)]


def _distributed_switches() -> Iterator[Case]:
    """Two cases per mode and method, with opposite values of all four switches; one for combined modes whose parts are
    modes themselves."""
    for number, (mode, method) in enumerate(itertools.product(PLAIN_MODES | OTHER_PRODUCTS, METHODS)):
        switches = [bool(number >> bit & 1) for bit in range(4)]
        turns = (switches, [not value for value in switches])
        for turn, values in enumerate(turns if mode in PLAIN_MODES else turns[:1]):
            family = FAMILIES[(number // 2 + number % 2 + turn) % len(FAMILIES)]
            case = Case(mode, family, method, *values)
            yield case if case.possible else Case(mode, "llama", method, *values)


def _special_cases(wanted: dict[str, tuple[str, ...]]) -> list[Case]:
    """One case each, with uneven shares and several passes, alternating packing and clipping."""
    cases = []
    for row, (mode, names) in enumerate(wanted.items()):
        for column, name in enumerate(names):
            method, numbers = SPECIAL[name]
            packed = (row + column) % 2 == 0
            cases.append(Case(mode, "wide llama", method, False, True, packed, not packed, numbers))
    return cases


def write_inputs(root: Path) -> None:
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(120))
    toy.write_llama(root / "llama", num_hidden_layers=2)
    # wide enough that half rows consist of whole nf4 blocks
    toy.write_llama(root / "wide llama", hidden_size=128, intermediate_size=128, num_hidden_layers=2)
    toy.write_qwen3(root / "qwen3")
    toy.write_gpt2(root / "gpt2")

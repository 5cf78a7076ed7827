"""The equality matrix: modes x methods x shares x accumulation x packing x clipping x families, as data.

`chosen` is what every test run goes through: each mode with each method, the other properties dealt out so that every
value of each meets every mode. `full` is the whole product (`make equality`).
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

MODES = {
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
METHODS = ("full", "lora")
FAMILIES = ("llama", "qwen3", "gpt2")
STEPS = 3

WITHOUT_A_PLAN = {"tp x2", "cp x2", "fsdp 2 x tp 2"}
"""What GPT-2 cannot do: it has no tensor plan, and its attention drops scores."""


@dataclass(frozen=True)
class Case:
    mode: str
    family: str
    method: str
    even: bool
    accumulated: bool
    packed: bool
    clipped: bool

    def __str__(self) -> str:
        words = [
            self.mode,
            self.family,
            self.method,
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
        return not (self.family == "gpt2" and self.mode in WITHOUT_A_PLAN)

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
                    "global_batch_size": 8 if self.even else 7,
                    "max_steps": STEPS,
                    "learning_rate": 1e-2,
                    "max_grad_norm": 0.5 if self.clipped else 0,
                },
                "device": "cpu",
            }
        )

    def plan(self, config: TrainConfig) -> Plan:
        """Four passes, or one; a rank of an uneven batch then has fewer."""
        share = -(-config.train.global_batch_size // self.dims.data)
        return make_plan(config, dims=self.dims, micro=max(1, share // 4) if self.accumulated else share)

    def reference(self) -> tuple[Any, ...]:
        """Cases with the same one compare with the same run of one process."""
        return tuple(value for name, value in asdict(self).items() if name not in ("mode", "accumulated"))


def full() -> list[Case]:
    switches = itertools.product((True, False), repeat=4)
    product = itertools.product(MODES, FAMILIES, METHODS, switches)
    cases = (Case(mode, family, method, *values) for mode, family, method, values in product)
    return [case for case in cases if case.possible]


def chosen() -> list[Case]:
    return list(_dealt_out())


def _dealt_out() -> Iterator[Case]:
    """Two cases for every mode and method, each the other's opposite in all four switches."""
    for number, (mode, method) in enumerate(itertools.product(MODES, METHODS)):
        switches = [bool(number >> bit & 1) for bit in range(4)]
        for turn, values in enumerate((switches, [not value for value in switches])):
            family = FAMILIES[(number // 2 + number % 2 + turn) % len(FAMILIES)]
            case = Case(mode, family, method, *values)
            yield case if case.possible else Case(mode, "llama", method, *values)


def write_inputs(root: Path) -> None:
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(60))
    toy.write_llama(root / "llama", num_hidden_layers=2)
    toy.write_qwen3(root / "qwen3")
    toy.write_gpt2(root / "gpt2")

"""The cheapest changes of a configuration with which a run would fit, where none of the open settings is enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pantheraml.planner.candidates import Candidate, fits, needed_bytes
from pantheraml.planner.setting import Setting

NAMED = 3
"""Suggestions that an error names."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class _Change:
    text: str
    update: dict[str, Any]
    cost: int
    """Order of preference."""


def suggestions(leanest: Candidate) -> list[str]:
    """Changes that are predicted to fit, the cheapest first: single ones if there are any, else pairs."""
    changes = sorted(_changes(leanest.setting), key=lambda change: change.cost)
    for count in (1, 2):
        found = []
        for chosen in sorted(combinations(changes, count), key=lambda pair: sum(each.cost for each in pair)):
            if not _touches_once(chosen):
                continue
            update = {name: value for change in chosen for name, value in change.update.items()}
            setting = leanest.setting.model_copy(update=update)
            memory = leanest.problem.memory(setting)
            if memory is not None and fits(memory):
                words = " and ".join(change.text for change in chosen)
                found.append(f"{words} ({needed_bytes(memory) / 2**30:.1f} GiB)")
            if len(found) == NAMED:
                break
        if found:
            return found
    return []


def _touches_once(changes: tuple[_Change, ...]) -> bool:
    names = [name for change in changes for name in change.update]
    return len(names) == len(set(names))


def _changes(setting: Setting) -> Iterator[_Change]:
    yield from _of_activations(setting)
    yield from _of_weights(setting)
    if setting.dims.world_size == setting.dims.data:
        for cost, count in enumerate(MORE_GPUS):
            if count > setting.dims.world_size:
                dims = setting.dims.model_copy(update={"replicate": 1, "shard": count})
                update = {"dims": dims, "fused": False, "compile": False, "cuda_graph": False}
                yield _Change(f"parallel.shard={count} on {count} such GPUs", update, 10 + cost)


def _of_activations(setting: Setting) -> Iterator[_Change]:
    if setting.micro_batch > 1:
        yield _Change("train.micro_batch_size=1", {"micro_batch": 1}, 0)
    for cost, mode in ((1, "full"), (2, "offload")):
        if setting.activation_checkpointing not in (mode, "offload"):
            yield _Change(f"train.activation_checkpointing={mode}", {"activation_checkpointing": mode}, cost)
    for cost, part in ((8, 2), (9, 4)):
        if setting.seq_len // part >= 512:
            yield _Change(f"data.seq_len={setting.seq_len // part}", {"seq_len": setting.seq_len // part}, cost)


def _of_weights(setting: Setting) -> Iterator[_Change]:
    full = setting.method == "full"
    if full and setting.trained_weights == "fp32":
        yield _Change("train.weights=bf16", {"trained_weights": "bf16"}, 3)
    if full and setting.optimizer == "adamw":
        yield _Change("train.optimizer=adamw_bf16", {"optimizer": "adamw_bf16"}, 3)
    if full and setting.optimizer != "adamw8bit" and setting.dims.shard == setting.dims.tensor == 1:
        yield _Change("train.optimizer=adamw8bit", {"optimizer": "adamw8bit"}, 4)
    if full:
        lora = {"method": "lora", "trained_weights": "fp32", "optimizer": "adamw", "fp8_matmuls": False}
        yield _Change("method.kind=lora", lora, 6)
        yield _Change("method.kind=qlora", {**lora, "frozen_weights": "nf4"}, 7)
    elif setting.frozen_weights != "nf4":
        yield _Change("method.kind=qlora", {"frozen_weights": "nf4"}, 5)

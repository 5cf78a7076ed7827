"""The cheapest changes of a configuration with which a run would fit, where none of the open settings is enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pantheraml.planner.candidates import Candidate, fits, needed_bytes
from pantheraml.planner.setting import Setting

NAMED = 3
"""Suggestions that an error names."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)


FP8 = (9, 0)
"""planner.choose: fused layers over nf4 weights use fp8 matmuls, which need it."""


@dataclass(frozen=True)
class _Change:
    text: str
    update: tuple[tuple[str, Any], ...]
    """Fields of the setting to change."""
    cost: int
    """Order of preference."""
    more_gpus: bool = False


def suggestions(leanest: Candidate) -> list[str]:
    """Changes, or pairs of them, that are predicted to fit, the cheapest first."""
    setting, problem = leanest.setting, leanest.problem
    changes = list(_changes(setting, problem.capability))
    pairs = [pair for count in (1, 2) for pair in combinations(changes, count) if _touches_once(pair)]
    found: list[tuple[_Change, ...]] = []
    texts = []
    for chosen in sorted(pairs, key=lambda pair: sum(each.cost for each in pair)):
        if any(set(smaller) <= set(chosen) for smaller in found):
            continue
        hardware = any(each.more_gpus for each in chosen)
        if hardware and any(each.more_gpus for pair in found for each in pair):
            continue  # one way with more GPUs is enough
        changed = _changed(setting, {name: value for change in chosen for name, value in change.update})
        if changed.optimizer == "adamw8bit" and changed.dims.model_is_sharded:
            continue  # its blocks are of whole tensors
        memory = problem.memory(changed)
        if memory is not None and fits(memory):
            found.append(chosen)
            texts.append(f"{' and '.join(each.text for each in chosen)} ({needed_bytes(memory) / 2**30:.1f} GiB)")
        if len(found) == NAMED:
            break
    return texts


def _changed(setting: Setting, update: dict[str, Any]) -> Setting:
    """The setting with as many passes per step as its global batch takes then."""
    changed = setting.model_copy(update=update)
    if "accumulation" in update:
        return changed
    sequences = setting.dims.data * setting.micro_batch * setting.accumulation
    passes = math.ceil(sequences / (changed.dims.data * changed.micro_batch))
    return changed.model_copy(update={"accumulation": passes})


def _change(text: str, update: dict[str, Any], cost: int, *, more_gpus: bool = False) -> _Change:
    return _Change(text, tuple(update.items()), cost, more_gpus)


def _touches_once(changes: tuple[_Change, ...]) -> bool:
    names = [name for change in changes for name, _ in change.update]
    return len(names) == len(set(names))


def _changes(setting: Setting, capability: tuple[int, int] | None) -> Iterator[_Change]:
    yield from _of_activations(setting)
    yield from _of_weights(setting, capability)
    data, sequences = setting.dims.data, setting.dims.data * setting.micro_batch * setting.accumulation
    if setting.dims.shard > 1 and setting.accumulation > 1:
        # gradients of several passes are summed before they are sharded
        batch = setting.micro_batch * data
        yield _change(f"train.global_batch_size={batch}, one pass per step", {"accumulation": 1}, 6)
    if setting.dims.world_size == data:
        for cost, count in enumerate(each for each in MORE_GPUS if data < each <= sequences):
            dims = setting.dims.model_copy(update={"replicate": 1, "shard": count})
            update = {"dims": dims, "fused": False, "compile": False, "cuda_graph": False}
            yield _change(f"parallel.shard={count} on {count} such GPUs", update, 10 + cost, more_gpus=True)


def _of_activations(setting: Setting) -> Iterator[_Change]:
    if setting.micro_batch > 1:
        yield _change("train.micro_batch_size=1", {"micro_batch": 1}, 0)
    for cost, mode in ((1, "full"), (2, "offload")):
        if setting.activation_checkpointing not in (mode, "offload"):
            yield _change(f"train.activation_checkpointing={mode}", {"activation_checkpointing": mode}, cost)
    for cost, part in ((8, 2), (9, 4)):
        if setting.seq_len // part >= 512:
            yield _change(f"data.seq_len={setting.seq_len // part}", {"seq_len": setting.seq_len // part}, cost)


def _of_weights(setting: Setting, capability: tuple[int, int] | None) -> Iterator[_Change]:
    full = setting.method == "full"
    nf4 = {"frozen_weights": "nf4", "fused": setting.fused and (capability is None or capability >= FP8)}
    if full and setting.trained_weights == "fp32":
        yield _change("train.weights=bf16", {"trained_weights": "bf16"}, 3)
    if full and setting.optimizer == "adamw":
        yield _change("train.optimizer=adamw_bf16", {"optimizer": "adamw_bf16"}, 3)
    if full and setting.optimizer != "adamw8bit" and setting.dims.shard == setting.dims.tensor == 1:
        yield _change("train.optimizer=adamw8bit", {"optimizer": "adamw8bit"}, 4)
    if full:
        lora = {"method": "lora", "trained_weights": "fp32", "optimizer": "adamw", "fp8_matmuls": False}
        yield _change("method.kind=lora", lora, 20)
        yield _change("method.kind=qlora", {**lora, **nf4}, 21)
    elif setting.frozen_weights != "nf4":
        yield _change("method.kind=qlora", nf4, 5)

"""Recommend devices and settings, from the health of the GPUs and the planner, each with its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pantheraml.base.errors import PantheraError
from pantheraml.devices.inventory import Inventory, take_inventory
from pantheraml.devices.select import Selection, fit_here
from pantheraml.planner.choose import choose
from pantheraml.service.context import ServiceContext
from pantheraml.service.errors import ApiError
from pantheraml.specs.config_file import validate
from pantheraml.specs.gpu_config import GPUConfig
from pantheraml.specs.plan import DeviceSpec

_BATCH_SIZE = 16
_SEQ_LEN = 2048


async def recommend(context: ServiceContext, model_name: str | None) -> dict[str, Any]:
    """`model_name`: also how to train this model."""
    folder = None
    if model_name is not None:
        base = context.catalog.models().get(model_name)
        if base is None:
            raise ApiError(404, f"No such model: {model_name[:100]}", param="model_name", code="not_found")
        folder = base.path
    return await asyncio.to_thread(_recommend, context, folder)


def _recommend(context: ServiceContext, model: Path | None) -> dict[str, Any]:
    defaults = GPUConfig()
    selection, inventory = fit_here(free_share=defaults.memory_fraction), take_inventory()
    spec = context.dispatcher.inventory.spec
    found = _about_devices(selection, inventory, spec)
    config = GPUConfig(
        use_multi_gpu=len(selection.indices) > 1,
        gpu_ids=list(selection.indices),
        distributed_training=len(selection.indices) > 1,
        backend="nccl" if selection.indices else "gloo",
    )
    if model is not None:
        planned, micro_batch = _about_model(context, model, spec, selection)
        found += planned
        if micro_batch is not None:
            config = config.model_copy(update={"batch_size_per_gpu": micro_batch})
    return {"recommendations": found, "config": config.model_dump()}


def _about_devices(selection: Selection, inventory: Inventory, spec: DeviceSpec) -> list[dict[str, Any]]:
    found = []
    if selection.indices:
        found.append(_one("gpu_ids", list(selection.indices), selection.reason))
    elif not inventory.gpus:
        found.append(_one("device", "cpu", inventory.note or "no GPU is visible"))
        found.append(_one("backend", "gloo", f"CPU processes communicate over gloo; there are {spec.cpu_count} cores"))
    if len(selection.indices) > 1:
        reason = "one process per GPU is faster than one process for all"
        found.append(_one("training_type", "distributed", reason))
    for index, why in selection.passed_over.items():
        found.append(_one(f"gpu:{index}", "avoid", why))
    for gpu in inventory.gpus:
        if gpu.index not in selection.passed_over:
            found += [_one(f"gpu:{gpu.index}", gpu.health.status, why) for why in gpu.health.reasons]
    return found


def _about_model(
    context: ServiceContext, model: Path, spec: DeviceSpec, selection: Selection
) -> tuple[list[dict[str, Any]], int | None]:
    """Return the planner's choice for the model, and its micro-batch size; a reason if nothing fits."""
    usable = tuple(gpu for gpu in spec.gpus if not selection.indices or gpu.index in selection.indices)
    values = {
        "model": {"path": str(model)},
        "data": {"path": str(model / "data.jsonl"), "seq_len": _SEQ_LEN},
        "train": {"global_batch_size": _BATCH_SIZE * max(1, len(usable))},
        "device": "cuda" if usable else "cpu",
    }
    try:
        plan = choose(validate(values), spec.model_copy(update={"gpus": usable}))
    except PantheraError as err:
        return [_one("model", "does not fit", context.dispatcher.hide(f"{err.what} {err.fix or ''}".strip()))], None
    chosen = [choice for choice in plan.choices if choice.automatic]
    found = [_one(choice.name, choice.value, context.dispatcher.hide(choice.reason)) for choice in chosen]
    return found, plan.micro_batch_size


def _one(name: str, value: Any, reason: str) -> dict[str, Any]:
    return {"name": name, "value": value, "reason": reason}

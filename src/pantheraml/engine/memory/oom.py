"""Explain out-of-memory errors: what was requested, what the memory is used for, and what to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pantheraml.base.errors import OutOfMemoryError, PantheraError, PassTooLargeError
from pantheraml.engine.step.step import Stepper
from pantheraml.planner.model_shapes import ModelShapes, shapes_of_config
from pantheraml.planner.out_of_memory import MemoryUse, Shortage, memory_error
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = rf"([\d.]+) ({'|'.join(UNITS)})"


@contextlib.contextmanager
def explain_out_of_memory(
    stepper: Stepper, config: TrainConfig, plan: Callable[[], Plan], resume_hint: Callable[[], str]
) -> Iterator[None]:
    """Turn torch's out-of-memory errors into ones that say what to do. `plan` and `resume_hint` are called at that
    point, when the micro-batch size may have been reduced."""
    try:
        yield
    except torch.OutOfMemoryError as err:
        explained = explain(err, config, plan(), stepper)
        fix = f"{explained.fix} {resume_hint()}"
        raise OutOfMemoryError(explained.what, where=explained.where, fix=fix) from err


def explain(
    err: torch.OutOfMemoryError, config: TrainConfig, plan: Plan, stepper: Stepper | None = None
) -> OutOfMemoryError:
    """Build the error. Without a stepper (the model was still being built) the memory use is unknown."""
    use = None if stepper is None or stepper.world.device.type != "cuda" else memory_use(stepper)
    return memory_error(read_shortage(str(err)), use, config, plan, None if stepper is None else _shapes(stepper.model))


def _shapes(model: Any) -> ModelShapes | None:
    """Shapes of the model by its configuration; None if its family is not known."""
    try:
        return shapes_of_config(model.config.to_dict())
    except (AttributeError, PantheraError):
        return None


def pass_too_large(
    err: torch.OutOfMemoryError, stepper: Stepper, config: TrainConfig, plan: Plan, *, sequences: int
) -> PassTooLargeError:
    """Build the error of a rank whose peers are in mid-step: all ranks must restart with smaller micro-batches."""
    explained = explain(err, config, plan, stepper)
    where = f"On rank {stepper.world.rank}, with {sequences} sequences at a time,"
    what = f"{where} {explained.what[0].lower()}{explained.what[1:]}"
    return PassTooLargeError(what, where=explained.where, fix=explained.fix)


def read_shortage(message: str) -> Shortage:
    """Parse the numbers in torch's message; None for those it does not contain."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return Shortage(
        requested=_size(rf"Tried to allocate {SIZE}", message),
        free=_size(rf"of which {SIZE} is free", message),
        total=_size(rf"total capacity of {SIZE}", message),
        compute_capability=capability,
    )


def _size(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def memory_use(stepper: Stepper) -> MemoryUse:
    """Break down the allocator's peak. (The tensors of the failed step may be freed by now.)"""
    trained = [part for _, part in stepper.parts]
    everything = [*stepper.model.parameters(), *stepper.model.buffers()]
    weights, trained_weights = _bytes(everything), _bytes(trained)
    # DDP's buckets or the gradients: as large as the weights, whether already allocated or not.
    gradients = trained_weights
    states = _bytes([value for state in stepper.optimizer.state.values() for value in state.values()])
    peak = torch.cuda.max_memory_allocated(stepper.world.device)
    return MemoryUse(
        frozen_weights=weights - trained_weights,
        trained_weights=trained_weights,
        gradients=gradients,
        optimizer_states=states,
        activations=max(0, peak - weights - gradients - states),
        trainable_params=sum(parameter.numel() for parameter in trained),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Total size; shared storage (tied weights) counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(storages.values())

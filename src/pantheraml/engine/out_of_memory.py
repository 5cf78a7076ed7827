"""Running out of device memory, in words: what was asked for, what the memory is used for, what to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pantheraml.base.errors import OutOfMemoryError, PassTooLargeError
from pantheraml.engine.step import Stepper
from pantheraml.models.fast import second_layouts
from pantheraml.planner.out_of_memory import MemoryUse, Shortage, memory_error
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = rf"([\d.]+) ({'|'.join(UNITS)})"


@contextlib.contextmanager
def explained_out_of_memory(
    stepper: Stepper, config: TrainConfig, plan: Callable[[], Plan], going_on: Callable[[], str]
) -> Iterator[None]:
    """Turn torch's out-of-memory error inside the block into one that says what to do. `plan` and `going_on` (how to
    continue) are as things stand then: with the size of passes that was tried last."""
    try:
        yield
    except torch.OutOfMemoryError as err:
        told = explain(err, config, plan(), stepper)
        raise OutOfMemoryError(told.what, where=told.where, todo=f"{told.todo} {going_on()}") from err


def explain(
    err: torch.OutOfMemoryError, config: TrainConfig, plan: Plan, stepper: Stepper | None = None
) -> OutOfMemoryError:
    """Without a stepper (the model was still being made) it is not known what the memory is used for."""
    use = None if stepper is None or stepper.world.device.type != "cuda" else memory_use(stepper)
    return memory_error(read_shortage(str(err)), use, config, plan)


def pass_too_large(
    err: torch.OutOfMemoryError, stepper: Stepper, config: TrainConfig, plan: Plan, *, sequences: int
) -> PassTooLargeError:
    """For a rank whose peers are in the middle of the step: all of them have to begin anew, with smaller passes."""
    told = explain(err, config, plan, stepper)
    where = f"On rank {stepper.world.rank}, with {sequences} sequences at a time,"
    what = f"{where} {told.what[0].lower()}{told.what[1:]}"
    return PassTooLargeError(what, where=told.where, todo=told.todo)


def read_shortage(message: str) -> Shortage:
    """The numbers in torch's message; what it does not tell is None."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return Shortage(
        asked=_size(rf"Tried to allocate {SIZE}", message),
        free=_size(rf"of which {SIZE} is free", message),
        total=_size(rf"total capacity of {SIZE}", message),
        compute_capability=capability,
    )


def _size(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def memory_use(stepper: Stepper) -> MemoryUse:
    """What the allocator's peak was made of. (By now the failed step's own tensors may be gone.)"""
    trained = [part for _, part in stepper.parts]
    everything = [*stepper.model.parameters(), *stepper.model.buffers()]
    weights, trained_weights = _bytes(everything), _bytes(trained)
    second = _bytes(second_layouts(stepper.model))
    # DDP's buckets, or what backward is about to fill: as large as the weights, whether they are there yet or not.
    gradients = trained_weights
    states = _bytes([value for state in stepper.optimizer.state.values() for value in state.values()])
    peak = torch.cuda.max_memory_allocated(stepper.world.device)
    return MemoryUse(
        frozen_weights=weights - trained_weights,
        second_layout=second,
        trained_weights=trained_weights,
        gradients=gradients,
        optimizer_states=states,
        activations=max(0, peak - weights - second - gradients - states),
        trained_values=sum(parameter.numel() for parameter in trained),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Shared storage (tied weights) counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(storages.values())

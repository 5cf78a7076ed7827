"""State before a bad step (trainable weights, RNG state), saved next to its incident so that it can be replayed.

Checkpoints are older than that. Used for adapters only: the weights of a full model are as large as a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from pantheraml.base.errors import CheckpointError
from pantheraml.base.folders import storage_errors
from pantheraml.engine.step.step import Stepper
from pantheraml.parallel.gather import full_tensors, load_full

WEIGHT, RNG = "weight.", "generator."


def save_step_state(path: Path, stepper: Stepper) -> None:
    """Save the state; call before the optimizer step, while the weights are unchanged. A collective; rank 0 writes its
    own RNG state."""
    world = stepper.world
    weights = dict(full_tensors(stepper.parameters, world.layout, world.long_timeout_group))
    if not world.is_main:
        return
    tensors = {f"{WEIGHT}{name}": tensor.contiguous() for name, tensor in weights.items()}
    tensors |= {f"{RNG}{number}": state for number, state in enumerate(stepper.rng.saved)}
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)


def load_step_state(path: Path, stepper: Stepper) -> None:
    """Load the state, in a single process. Random numbers repeat if kind and number of devices are the same."""
    tensors = load_file(path)
    weights = {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    numbers = sorted(int(name.removeprefix(RNG)) for name in tensors if name.startswith(RNG))
    rng_states = [tensors[f"{RNG}{number}"] for number in numbers]
    if weights.keys() != dict(stepper.parameters).keys():
        raise CheckpointError(
            "The incident is from a run with other trainable weights.",
            where=str(path),
            fix="Restore the run's original config.yaml.",
        )
    load_full(stepper.parameters, weights)
    stepper.rng.set(rng_states)

"""What a step began from, kept beside its incident so that it can be run again: weights that train, random numbers.

Checkpoints are older than that. Only adapters are kept: all weights of a model would be as large as a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from pantheraml.base.errors import CheckpointError
from pantheraml.base.folders import storage_errors
from pantheraml.engine.step import Stepper
from pantheraml.parallel.gather import full_tensors, load_full

WEIGHT, GENERATOR = "weight.", "generator."


def keep_step_state(path: Path, stepper: Stepper) -> None:
    """A collective; rank 0 writes. The weights must be those that the step began from, as they are until it is taken;
    the generators are rank 0's."""
    world = stepper.world
    weights = dict(full_tensors(stepper.parameters, world.layout, world.patient_group))
    if not world.is_main:
        return
    tensors = {f"{WEIGHT}{name}": tensor.contiguous() for name, tensor in weights.items()}
    tensors |= {f"{GENERATOR}{number}": state for number, state in enumerate(stepper.generators.remembered)}
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)


def load_step_state(path: Path, stepper: Stepper) -> None:
    """In one process. Random numbers come again where the kind and number of devices are those of then."""
    tensors = load_file(path)
    weights = {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    generators = [tensors[name] for name in sorted(tensors) if name.startswith(GENERATOR)]
    if weights.keys() != dict(stepper.parameters).keys():
        raise CheckpointError(
            "The incident was kept of a run that trains other weights.",
            where=str(path),
            todo="Put the run's config.yaml back to what it was.",
        )
    load_full(stepper.parameters, weights)
    stepper.generators.set(generators)

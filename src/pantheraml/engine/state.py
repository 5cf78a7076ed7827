"""What a run is, between two steps: progress numbers, weights, optimizer, loss scale, random generators.

`capture` and `restore` are each other's inverse; together with the order contract of the data they make a resumed run
continue as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from pantheraml import __version__
from pantheraml.base.errors import CheckpointError
from pantheraml.checkpoint.host_copy import HostCopies
from pantheraml.checkpoint.store import Checkpoint, Tensors
from pantheraml.engine import optim
from pantheraml.engine.step import Stepper
from pantheraml.parallel.gather import full_tensors, load_full, own_part, spread_like
from pantheraml.specs.resume import Change, is_allowed

STATE_VERSION = 4

SEEDS_PER_STEP = 1_000_003
"""More than there are processes, each of which has a seed of its own."""


@dataclass
class Progress:
    """The run's place, in numbers. All ranks hold the same."""

    step: int = 0
    """Optimizer steps behind us (skipped ones included: their samples are used up)."""
    best_eval_loss: float | None = None
    best_step: int | None = None
    evaluated: int | None = None
    """The step of the last evaluation that was not broken off."""
    evals_without_gain: int = 0
    micro_batch: int | None = None
    """What fits into memory, if that is less than planned."""
    shares: dict[str, Any] | None = None
    """What adaptive batch shares go by; None if they are not adaptive."""


def capture(
    stepper: Stepper, progress: Progress, identity: Mapping[str, Any], copies: HostCopies | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and JSON state of a checkpoint. A collective: every rank calls it, rank 0 saves the result.

    With `copies` the result stays as it is when training goes on; without, it may share memory with the run.
    """
    gathered = partial(full_tensors, layout=stepper.world.layout, group=stepper.world.patient_group)
    if copies is not None:
        gathered = partial(gathered, to_host=copies.take)
    tensors: Tensors = {
        "weights": dict(gathered(stepper.parameters)),
        "optimizer": dict(gathered(_spread_moments(stepper))),
        "rng": _gather_generators(stepper),
    }
    if copies is not None:
        copies.wait()
    state = {
        "version": STATE_VERSION,
        "progress": asdict(progress),
        "scaler": stepper.scaler.state_dict(),
        "guard": stepper.guard.to_state(),
        "dims": stepper.world.layout.dims.model_dump(),
        "identity": dict(identity),
        "versions": library_versions(),
    }
    return tensors, state


def library_versions() -> dict[str, str]:
    """Of what the numbers of a run depend on."""
    return {"pantheraml": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


def restore(
    stepper: Stepper, checkpoint: Checkpoint, identity: Mapping[str, Any], *, allowed: Sequence[str] = ()
) -> Progress:
    """Put a checkpoint back; `identity` (what makes the samples and the model) has to be the one it was taken under,
    except where a change is `allowed`."""
    if checkpoint.state["version"] != STATE_VERSION:
        raise CheckpointError(
            f"The checkpoint has format {checkpoint.state['version']}; this version reads {STATE_VERSION}.",
            todo="Resume with the PantheraML version that wrote it.",
        )
    refused = [change for change in identity_changes(checkpoint, identity) if not is_allowed(change.key, allowed)]
    if refused:
        raise CheckpointError(
            f"The run changed since its checkpoint and cannot be continued exactly: {'; '.join(map(str, refused))}.",
            todo="Undo the change, start a new run in another folder, or insist with"
            f" {' '.join(f'--allow-change {change.key}' for change in refused)}.",
        )
    load_weights(stepper, checkpoint)
    optim.load_optimizer_tensors(stepper.optimizer, stepper.parts, _own_moments(stepper, checkpoint))
    if checkpoint.state["scaler"]:
        stepper.scaler.load_state_dict(checkpoint.state["scaler"])
    stepper.guard.from_state(checkpoint.state["guard"])
    if checkpoint.state["dims"] == stepper.world.layout.dims.model_dump():
        _set_generators(checkpoint.tensors["rng"], stepper)
    else:
        # Nobody's generator is this process's; its own would drop at step k what it dropped at the run's first step.
        torch.manual_seed(torch.initial_seed() + SEEDS_PER_STEP * checkpoint.step)
    return Progress(**checkpoint.state["progress"])


def identity_changes(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> list[Change]:
    before = checkpoint.state["identity"]
    return [Change(key, before.get(key), value) for key, value in identity.items() if before.get(key) != value]


def load_weights(stepper: Stepper, checkpoint: Checkpoint) -> None:
    saved, wanted = checkpoint.tensors["weights"], dict(stepper.parameters)
    # A stage of a pipeline holds some of the weights only.
    odd = sorted(
        wanted.keys() - saved.keys() if stepper.world.layout.dims.pipeline > 1 else saved.keys() ^ wanted.keys()
    )
    if odd:
        raise CheckpointError(
            f"The checkpoint holds other trainable weights than this run ({len(odd)} differ, first: {odd[0]}).",
            todo="Resume with the method and target modules that the checkpoint was trained with.",
        )
    for name, parameter in wanted.items():
        if saved[name].shape != parameter.shape:
            shapes = f"{tuple(saved[name].shape)} in the checkpoint, {tuple(parameter.shape)} here"
            raise CheckpointError(
                f"`{name}` has another shape: {shapes}.",
                todo="Resume with the model and the rank that the checkpoint was trained with.",
            )
    load_full(stepper.parameters, saved)


def _spread_moments(stepper: Stepper) -> list[tuple[str, Tensor]]:
    """The optimizer's tensors, those that have a value for each of a parameter's spread as it is."""
    parameters, parts = dict(stepper.parameters), dict(stepper.parts)
    found = []
    for full_name, tensor in optim.optimizer_tensors(stepper.optimizer, stepper.parts).items():
        name, _, _ = full_name.rpartition(optim.SEPARATOR)
        like = parameters[name]
        found.append((full_name, spread_like(tensor, like) if tensor.shape == parts[name].shape else tensor))
    return found


def _own_moments(stepper: Stepper, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """This process's part of the saved optimizer tensors."""
    parameters = dict(stepper.parameters)
    staged = stepper.world.layout.dims.pipeline > 1
    own = {}
    for full_name, whole in checkpoint.tensors["optimizer"].items():
        name, _, _ = full_name.rpartition(optim.SEPARATOR)
        like = parameters.get(name)
        if like is None and staged:
            continue
        own[full_name] = whole if like is None or whole.shape != like.shape else own_part(whole, like)
    return own


def _own_generators(stepper: Stepper) -> dict[str, Tensor]:
    """The state of this process's generators. Sample order needs none (it is counter-based); dropout does."""
    found = {"torch": torch.get_rng_state()}
    if stepper.world.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(stepper.world.device)
    return found


def _gather_generators(stepper: Stepper) -> dict[str, Tensor]:
    mine = _own_generators(stepper)
    everyone: list[dict[str, Tensor]] = [mine]
    if stepper.world.size > 1:
        everyone = [{} for _ in range(stepper.world.size)]
        dist.all_gather_object(everyone, mine)
    return {f"rank{rank}.{name}": tensor for rank, own in enumerate(everyone) for name, tensor in own.items()}


def _set_generators(tensors: Mapping[str, Tensor], stepper: Stepper) -> None:
    prefix = f"rank{stepper.world.rank}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    torch.set_rng_state(own["torch"])
    if "cuda" in own and stepper.world.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], stepper.world.device)

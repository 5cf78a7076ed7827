"""What a run is, between two steps: progress numbers, weights, optimizer, loss scale, random generators.

`capture` and `restore` are each other's inverse; together with the order contract of the data they make a resumed run
continue as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from pantheraml import __version__
from pantheraml.base.errors import CheckpointError
from pantheraml.checkpoint.host_copy import HostCopies
from pantheraml.checkpoint.parts import Groups, Part, whole
from pantheraml.checkpoint.store import Checkpoint
from pantheraml.engine import optim
from pantheraml.engine.step import Stepper
from pantheraml.parallel.exchange import all_gather_json
from pantheraml.parallel.gather import first_holder, held, own_offsets, spread_like
from pantheraml.specs.resume import Change, is_allowed

STATE_VERSION = 5

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
    undone: list[tuple[int, int]] = field(default_factory=list)
    """Roll backs: the weights of the first step took the place of all that came after it, up to and with the second,
    whose samples are used up."""


def capture(
    stepper: Stepper, progress: Progress, identity: Mapping[str, Any], copies: HostCopies | None = None
) -> tuple[Groups, dict[str, Any]]:
    """Tensors and JSON state of a checkpoint: of the former what this rank is to save, none for others than rank 0
    unless the model is spread. A collective.

    With `copies` the result stays as it is when training goes on; without, it may share memory with the run.
    """
    world = stepper.world
    to_host = _to_cpu if copies is None else copies.take
    groups: Groups = {
        group: {name: Part(to_host(name, held(tensor)), own_offsets(tensor)) for name, tensor in tensors}
        for group, tensors in zip(("weights", "optimizer"), _to_be_saved(stepper), strict=True)
    }
    generators = _gather_generators(stepper)
    groups = {**groups, "rng": whole(generators) if world.is_main else {}}
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
    return groups, state


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
    moments = _own_moments(stepper, checkpoint)
    optim.load_optimizer_tensors(stepper.optimizer, stepper.parts, moments)
    for name, tensor in optim.optimizer_tensors(stepper.optimizer, stepper.parts).items():
        if name not in moments:  # the first step made it, and the checkpoint is older than that
            tensor.zero_()
    if checkpoint.state["scaler"]:
        stepper.scaler.load_state_dict(checkpoint.state["scaler"])
    stepper.guard.from_state(checkpoint.state["guard"])
    if checkpoint.state["dims"] == stepper.world.layout.dims.model_dump():
        _set_generators(checkpoint.tensors.read_group("rng"), stepper)
    else:
        # Nobody's generator is this process's; its own would drop at step k what it dropped at the run's first step.
        torch.manual_seed(torch.initial_seed() + SEEDS_PER_STEP * checkpoint.step)
    return Progress(**checkpoint.state["progress"])


def identity_changes(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> list[Change]:
    before = checkpoint.state["identity"]
    return [Change(key, before[key], now) for key, now in identity.items() if key in before and before[key] != now]


def load_weights(stepper: Stepper, checkpoint: Checkpoint) -> None:
    saved, wanted = checkpoint.tensors.group("weights"), dict(stepper.parameters)
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
    targets = {name: Part(held(parameter.detach()), own_offsets(parameter)) for name, parameter in wanted.items()}
    checkpoint.tensors.read_into(targets)


def _to_be_saved(stepper: Stepper) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Weights and optimizer tensors that this rank saves: those of which it is the first to hold a part. A collective
    where the model is spread."""
    world = stepper.world
    if world.layout.dims.model_copies_apart:
        first = set(first_holder(stepper.parameters, world.patient_group, world.size))
    else:
        first = set(dict(stepper.parameters)) if world.is_main else set()
    weights = {name: parameter for name, parameter in stepper.parameters if name in first}
    parts, moments = dict(stepper.parts), []
    for full_name, tensor in optim.optimizer_tensors(stepper.optimizer, stepper.parts).items():
        name = _owner(full_name)
        if name not in weights:
            continue
        if tensor.shape == parts[name].shape:  # a value for each of the parameter's
            moments.append((full_name, spread_like(tensor, weights[name])))
        elif not any(own_offsets(weights[name])):
            moments.append((full_name, tensor))
    return list(weights.items()), moments


def _own_moments(stepper: Stepper, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """This process's part of the saved optimizer tensors, in host memory."""
    parameters = dict(stepper.parameters)
    staged = stepper.world.layout.dims.pipeline > 1
    own: dict[str, Part] = {}
    for name, (shape, dtype) in checkpoint.tensors.group("optimizer").items():
        like = parameters.get(_owner(name))
        if like is None and staged:
            continue
        size, offsets = shape, (0,) * len(shape)
        if like is not None and shape == like.shape:
            size, offsets = held(like).shape, own_offsets(like)
        own[name] = Part(torch.empty(size, dtype=dtype), offsets)
    checkpoint.tensors.read_into(own)
    return {name: part.values for name, part in own.items()}


def _owner(full_name: str) -> str:
    """Of the parameter that a tensor of the optimizer belongs to."""
    return full_name.rpartition(optim.SEPARATOR)[0]


def _to_cpu(name: str, tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


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
        told = all_gather_json({name: state.numpy().tobytes().hex() for name, state in mine.items()})
        everyone = [{name: _state_of_generator(text) for name, text in own.items()} for own in told]
    return {f"rank{rank}.{name}": tensor for rank, own in enumerate(everyone) for name, tensor in own.items()}


def _state_of_generator(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _set_generators(tensors: Mapping[str, Tensor], stepper: Stepper) -> None:
    prefix = f"rank{stepper.world.rank}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    torch.set_rng_state(own["torch"])
    if "cuda" in own and stepper.world.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], stepper.world.device)

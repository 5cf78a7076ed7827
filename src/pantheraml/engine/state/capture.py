"""Training state between two steps: progress, weights, optimizer, loss scale, RNG state.

`capture` and `restore` are inverses. Together with the deterministic data order they make a resumed run continue as if
it had not stopped.
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
from pantheraml.checkpoint.sharded_files import Groups, TensorShard, unsharded
from pantheraml.checkpoint.store import Checkpoint
from pantheraml.engine.optim import optimizer as optim
from pantheraml.engine.step.step import Stepper
from pantheraml.parallel.gather import dedup_shards, local_offsets, local_tensor, shard_like
from pantheraml.parallel.json_gather import all_gather_json
from pantheraml.specs.resume import Change, is_allowed

STATE_VERSION = 5

SEEDS_PER_STEP = 1_000_003
"""Larger than any world size, since each rank has its own seed."""


@dataclass
class RunProgress:
    """Progress counters, equal on all ranks."""

    step: int = 0
    """Optimizer steps done, including skipped ones (their samples are consumed)."""
    best_eval_loss: float | None = None
    best_step: int | None = None
    evaluated: int | None = None
    """Step of the last completed evaluation."""
    evals_without_gain: int = 0
    micro_batch: int | None = None
    """Micro-batch size that fits into memory, if smaller than planned."""
    shares: dict[str, Any] | None = None
    """State of adaptive batch shares; None if they are not adaptive."""
    undone: list[tuple[int, int]] = field(default_factory=list)
    """Rollbacks as (restored step, bad step): the weights after the first replaced those of all steps up to and
    including the second. The samples are not repeated."""


def capture(
    stepper: Stepper, progress: RunProgress, identity: Mapping[str, Any], copies: HostCopies | None = None
) -> tuple[Groups, dict[str, Any]]:
    """Return the tensors that this rank saves (none on ranks other than 0 unless the model is sharded) and the JSON
    state of a checkpoint. A collective.

    With `copies` the result is a snapshot; without, it may share memory with the training state.
    """
    world = stepper.world
    to_host = _to_cpu if copies is None else copies.take
    groups: Groups = {
        group: {
            name: TensorShard(to_host(name, local_tensor(tensor)), local_offsets(tensor)) for name, tensor in tensors
        }
        for group, tensors in zip(("weights", "optimizer"), _to_be_saved(stepper), strict=True)
    }
    rng = _gather_rng(stepper)
    groups = {**groups, "rng": unsharded(rng) if world.is_main else {}}
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
    """Versions of the libraries that affect the numbers of a run."""
    return {"pantheraml": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


def restore(
    stepper: Stepper, checkpoint: Checkpoint, identity: Mapping[str, Any], *, allowed: Sequence[str] = ()
) -> RunProgress:
    """Restore a checkpoint. `identity` (what determines samples and model) must equal the saved one, except for
    `allowed` changes."""
    if checkpoint.state["version"] != STATE_VERSION:
        raise CheckpointError(
            f"The checkpoint has format {checkpoint.state['version']}; this version reads {STATE_VERSION}.",
            fix="Resume with the PantheraML version that wrote it.",
        )
    refused = [change for change in identity_changes(checkpoint, identity) if not is_allowed(change.key, allowed)]
    if refused:
        raise CheckpointError(
            f"The run changed since its checkpoint and cannot be resumed exactly: {'; '.join(map(str, refused))}.",
            fix="Undo the change, start a new run in another folder, or allow it with"
            f" {' '.join(f'--allow-change {change.key}' for change in refused)}.",
        )
    load_weights(stepper, checkpoint)
    moments = _own_moments(stepper, checkpoint)
    optim.load_optimizer_tensors(stepper.optimizer, stepper.parts, moments)
    for name, tensor in optim.optimizer_tensors(stepper.optimizer, stepper.parts).items():
        if name not in moments:  # created by the first step, and the checkpoint is older than that
            tensor.zero_()
    if checkpoint.state["scaler"]:
        stepper.scaler.load_state_dict(checkpoint.state["scaler"])
    stepper.guard.from_state(checkpoint.state["guard"])
    if checkpoint.state["dims"] == stepper.world.layout.dims.model_dump():
        _set_rng(checkpoint.tensors.read_group("rng"), stepper)
    else:
        # No saved RNG state fits another layout, and the initial one would repeat the dropout masks of step 0.
        torch.manual_seed(torch.initial_seed() + SEEDS_PER_STEP * checkpoint.step)
    return RunProgress(**checkpoint.state["progress"])


def identity_changes(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> list[Change]:
    before = checkpoint.state["identity"]
    return [Change(key, before[key], now) for key, now in identity.items() if key in before and before[key] != now]


def load_weights(stepper: Stepper, checkpoint: Checkpoint) -> None:
    saved, parameters_here = checkpoint.tensors.group("weights"), dict(stepper.parameters)
    # A pipeline stage holds only some of the weights.
    mismatched = sorted(
        parameters_here.keys() - saved.keys()
        if stepper.world.layout.dims.pipeline > 1
        else saved.keys() ^ parameters_here.keys()
    )
    if mismatched:
        raise CheckpointError(
            "The checkpoint has other trainable weights than this run"
            f" ({len(mismatched)} differ, first: {mismatched[0]}).",
            fix="Resume with the method and target modules that the checkpoint was trained with.",
        )
    for name, parameter in parameters_here.items():
        if saved[name].shape != parameter.shape:
            shapes = f"{tuple(saved[name].shape)} in the checkpoint, {tuple(parameter.shape)} here"
            raise CheckpointError(
                f"`{name}` has a different shape: {shapes}.",
                fix="Resume with the model and the LoRA rank that the checkpoint was trained with.",
            )
    targets = {
        name: TensorShard(local_tensor(parameter.detach()), local_offsets(parameter))
        for name, parameter in parameters_here.items()
    }
    checkpoint.tensors.read_into(targets)


def _to_be_saved(stepper: Stepper) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Weights and optimizer tensors that this rank saves: those of which it is the first holder. A collective if the
    model is sharded."""
    world = stepper.world
    if world.layout.dims.model_is_sharded:
        first = set(dedup_shards(stepper.parameters, world.long_timeout_group, world.size))
    else:
        first = set(dict(stepper.parameters)) if world.is_main else set()
    weights = {name: parameter for name, parameter in stepper.parameters if name in first}
    parts, moments = dict(stepper.parts), []
    for full_name, tensor in optim.optimizer_tensors(stepper.optimizer, stepper.parts).items():
        name = _owner(full_name)
        if name not in weights:
            continue
        if tensor.shape == parts[name].shape:  # elementwise state, such as moments
            moments.append((full_name, shard_like(tensor, weights[name])))
        elif not any(local_offsets(weights[name])):
            moments.append((full_name, tensor))
    return list(weights.items()), moments


def _own_moments(stepper: Stepper, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """This rank's shards of the saved optimizer tensors, in host memory."""
    parameters = dict(stepper.parameters)
    staged = stepper.world.layout.dims.pipeline > 1
    own: dict[str, TensorShard] = {}
    for name, (shape, dtype) in checkpoint.tensors.group("optimizer").items():
        like = parameters.get(_owner(name))
        if like is None and staged:
            continue
        size, offsets = shape, (0,) * len(shape)
        if like is not None and shape == like.shape:
            size, offsets = local_tensor(like).shape, local_offsets(like)
        own[name] = TensorShard(torch.empty(size, dtype=dtype), offsets)
    checkpoint.tensors.read_into(own)
    return {name: part.values for name, part in own.items()}


def _owner(full_name: str) -> str:
    """Name of the parameter that an optimizer tensor belongs to."""
    return full_name.rpartition(optim.SEPARATOR)[0]


def _to_cpu(name: str, tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _own_rng(stepper: Stepper) -> dict[str, Tensor]:
    """RNG state of this process, for dropout. Sample order does not need it: it is counter-based."""
    found = {"torch": torch.get_rng_state()}
    if stepper.world.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(stepper.world.device)
    return found


def _gather_rng(stepper: Stepper) -> dict[str, Tensor]:
    mine = _own_rng(stepper)
    ranks: list[dict[str, Tensor]] = [mine]
    if stepper.world.size > 1:
        gathered = all_gather_json({name: state.numpy().tobytes().hex() for name, state in mine.items()})
        ranks = [{name: _rng_state(text) for name, text in own.items()} for own in gathered]
    return {f"rank{rank}.{name}": tensor for rank, own in enumerate(ranks) for name, tensor in own.items()}


def _rng_state(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _set_rng(tensors: Mapping[str, Tensor], stepper: Stepper) -> None:
    prefix = f"rank{stepper.world.rank}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    torch.set_rng_state(own["torch"])
    if "cuda" in own and stepper.world.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], stepper.world.device)

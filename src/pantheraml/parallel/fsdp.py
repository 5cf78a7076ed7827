"""FSDP2: shard weights, gradients and optimizer state over data-parallel ranks.

Each decoder layer is one FSDP group, unsharded only while it computes; the rest (embedding, final norm, head) is the
root group, unsharded from the forward to the end of backward. Gradients are reduce-scattered as a *sum* over ranks.
Between steps, and after a forward without gradients, every parameter is a sharded DTensor under its original name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pantheraml.base.errors import UnsupportedModelError


def _none(_module: nn.Module) -> Iterable[str]:
    return ()


def _nothing(_module: nn.Module) -> None:
    """No-op default of `prepare`."""


def shard_parameters(
    root: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    quantized_buffers: Callable[[nn.Module], Iterable[str]] = _none,
    prepare: Callable[[nn.Module], None] = _nothing,
) -> None:
    """Shard the parameters of `root` in place over `mesh`: (shard,), or (replicate, shard) for HSDP.

    `root` is the module that the training step calls; its forward may read any parameter outside `layers` directly.
    `quantized_buffers` names the buffers of a module that hold frozen weights; they become frozen parameters, so that
    they are sharded too. `prepare` is called with each layer right before it is sharded and may load its weights only
    then, so that at most one layer is unsharded at a time. All parameters are replaced: look them up anew.
    """
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [(name, parameter) for name, parameter in root.named_parameters() if id(parameter) not in in_layers]
    # validate all groups before changing any
    policies = [_policy(layer.named_parameters()) for layer in layers]
    root_policy = _policy(rest)
    for layer, policy in zip(layers, policies, strict=True):
        prepare(layer)
        _make_parameters(layer, quantized_buffers(layer))
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    prepare(root)
    _make_parameters(root, quantized_buffers(root))
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-scaled reduction (PREMUL_SUM)
    root.register_forward_hook(_reshard_unless_training)


@contextmanager
def without_sync(root: nn.Module) -> Iterator[None]:
    """Skip gradient synchronization inside: for all micro-batches of a step but the last.

    Each rank then holds unsharded gradients of every trainable weight. Without this, each micro-batch reduce-scatters
    its gradients and accumulates shards only, with the same result.
    """
    assert isinstance(root, FSDPModule)
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def _make_parameters(root: nn.Module, buffers: Iterable[str]) -> None:
    for full_name in buffers:
        owner, _, name = full_name.rpartition(".")
        module = root.get_submodule(owner)
        buffer = module.get_buffer(name)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(buffer.contiguous(), requires_grad=False))


def _policy(group: Iterable[tuple[str, nn.Parameter]]) -> MixedPrecisionPolicy:
    """Reduce a group's gradients in float32 at least, rounding to the weights' dtype once."""
    dtypes = set()
    for name, parameter in group:
        if parameter.ndim == 0:
            raise UnsupportedModelError(
                f"FSDP shards weights by rows, and {name} is a scalar.",
                fix="Use parallel.shard=1 (DDP) for this model.",
            )
        if parameter.requires_grad:
            dtypes.add(parameter.dtype)
    if len(dtypes) > 1:
        listing = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UnsupportedModelError(
            f"FSDP needs the trainable weights of a layer to have one dtype, but they have {listing}.",
            fix="Load the model in one dtype, or use parallel.shard=1 (DDP).",
        )
    wide = [torch.promote_types(dtype, torch.float32) for dtype in dtypes]
    return MixedPrecisionPolicy(reduce_dtype=wide[0] if wide else None, cast_forward_inputs=False)


def _reshard_unless_training(root: nn.Module, _args: Any, _output: Any) -> None:
    """Reshard after a no-grad forward: no backward follows to do it, and the optimizer only sees sharded parameters."""
    if not torch.is_grad_enabled():
        assert isinstance(root, FSDPModule)
        root.reshard()

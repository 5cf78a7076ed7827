"""Sharding weights, gradients and optimizer state over ranks that see other samples: torch's FSDP2.

Each decoder layer is one group of parameters, whole only while it computes; the rest (embedding, last norm, head) is
the root's group, whole from the forward pass to the end of backward. Gradients come out as the *sum* over ranks, each
rank with its part. Between steps, and after a pass without gradients, every parameter is a sharded DTensor under the
name it had.
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
    """There is nothing to prepare."""


def shard_parameters(
    root: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    packed_buffers: Callable[[nn.Module], Iterable[str]] = _none,
    prepare: Callable[[nn.Module], None] = _nothing,
) -> None:
    """Shard the parameters of `root` in place over `mesh`: (shard,), or (replicate, shard) with copies of the shards.

    `root` is what the training step calls: its forward pass may read any parameter outside `layers` directly.
    `packed_buffers` has the names, in a module, of buffers that hold frozen weights; they become frozen parameters, so
    that they are sharded too. `prepare` is called with each layer right before it is cut, and may put its weights in
    their places only then: no more than one layer is whole at a time. All parameters of a model are replaced: take them
    by name again afterwards.
    """
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [(name, parameter) for name, parameter in root.named_parameters() if id(parameter) not in in_layers]
    # all looked at before the first is changed
    policies = [_policy(layer.named_parameters()) for layer in layers]
    root_policy = _policy(rest)
    for layer, policy in zip(layers, policies, strict=True):
        prepare(layer)
        _make_parameters(layer, packed_buffers(layer))
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    prepare(root)
    _make_parameters(root, packed_buffers(root))
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no reduction that scales on the way
    root.register_forward_hook(_reshard_unless_training)


@contextmanager
def without_sync(root: nn.Module) -> Iterator[None]:
    """Backward passes inside keep their gradients local: for all micro-batches of a step but the last.

    Local means whole: a rank then holds the gradient of every trainable weight. Without this, each micro-batch sends
    its gradients and adds up their part only, with the same result.
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
    """Gradients of a group are added up in float32 at least, and rounded to the weights' dtype once."""
    dtypes = set()
    for name, parameter in group:
        if parameter.ndim == 0:
            raise UnsupportedModelError(
                f"Sharding cuts weights by rows, and {name} is a single number.",
                todo="Use parallel.shard=1 (copies of the whole model) for this model.",
            )
        if parameter.requires_grad:
            dtypes.add(parameter.dtype)
    if len(dtypes) > 1:
        listing = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UnsupportedModelError(
            f"Sharding needs trainable weights of one dtype in a layer, and here they are {listing}.",
            todo="Load the model in one dtype, or use parallel.shard=1 (copies of the whole model).",
        )
    wide = [torch.promote_types(dtype, torch.float32) for dtype in dtypes]
    return MixedPrecisionPolicy(reduce_dtype=wide[0] if wide else None, cast_forward_inputs=False)


def _reshard_unless_training(root: nn.Module, _args: Any, _output: Any) -> None:
    """No backward pass follows that would free the whole parameters, and a step would not reach them."""
    if not torch.is_grad_enabled():
        assert isinstance(root, FSDPModule)
        root.reshard()

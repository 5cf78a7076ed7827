"""Context parallelism (Ulysses): sequences are sharded contiguously over the ranks of a group.

Everything in a decoder layer except attention is per token and runs on the local sequence shard. An all-to-all before
attention swaps the sharding from sequence to heads (`sequence_to_heads`), and one after it swaps back
(`heads_to_sequence`), so attention itself is unchanged: full sequences, a subset of the heads. A layer takes two
all-to-alls forward and two backward at any degree, and the bytes sent per rank shrink as the degree grows.

A step's loss is the sum of the ranks' losses, and its gradient the sum of their gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pantheraml.base.errors import UnsupportedModelError


def shard_sequence(tensor: Tensor, group: dist.ProcessGroup, *, dim: int = 1) -> Tensor:
    """Return this rank's sequence shard of `tensor` along `dim`."""
    width, degree = tensor.shape[dim], group.size()
    if width % degree:
        raise ValueError(f"a sequence length of {width} is not divisible by {degree} context-parallel ranks")
    part = width // degree
    return tensor.narrow(dim, group.rank() * part, part).contiguous()


def check_heads(heads: int, degree: int, *, tensor: int = 1) -> None:
    """Raise UnsupportedModelError unless the heads left per rank by tensor parallelism divide evenly by `degree`.

    Heads that `tensor` does not divide are reported by tensor parallelism itself.
    """
    left, rest = divmod(heads, tensor)
    if rest or left % degree == 0:
        return
    divisors = ", ".join(str(number) for number in range(2, left + 1) if left % number == 0)
    with_tp = f" with tensor parallelism over {tensor}" if tensor > 1 else ""
    raise UnsupportedModelError(
        f"Context parallelism over {degree} ranks{with_tp} would divide {heads} attention heads unevenly.",
        fix=f"Use a parallel.context that divides {left}: {divisors}." if divisors else "Use parallel.context=1.",
    )


def sequence_to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all from [B, heads, S / degree, D] to [B, heads / degree, S, D]; heads and D may differ per tensor."""
    degree = group.size()
    check_heads(query.shape[1], degree)
    # GQA with fewer KV heads than ranks: repeat KV heads until they divide evenly. The number of query heads is a
    # multiple of both, so each rank gets exactly the KV heads that its query heads use.
    repeats = degree // math.gcd(key.shape[1], degree)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    tensors = (query, key, value)
    shapes = [(tensor.shape[1] // degree, tensor.shape[3]) for tensor in tensors]
    # [degree, B, S / degree, heads / degree * D], by destination rank
    parts = [tensor.unflatten(1, (degree, -1)).permute(1, 0, 3, 2, 4).flatten(3) for tensor in tensors]
    received = _all_to_all(torch.cat(parts, dim=-1), group)
    full = received.transpose(0, 1).flatten(1, 2).split([heads * size for heads, size in shapes], dim=-1)
    query, key, value = (one.unflatten(-1, shape).transpose(1, 2) for one, shape in zip(full, shapes, strict=True))
    return query, key, value


def heads_to_sequence(mixed: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of the attention output from [B, S, heads / degree, D] to [B, S / degree, heads, D]."""
    parts = mixed.unflatten(1, (group.size(), -1)).transpose(0, 1)
    received = _all_to_all(parts, group)  # [degree, B, S / degree, heads / degree, D], by source rank
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `parts[i]` to rank i; result[i] is what rank i sent here."""
    received: Tensor = _AllToAll.apply(parts, group)
    return received


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all; its backward is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.forward(ctx, grad, ctx.group), None

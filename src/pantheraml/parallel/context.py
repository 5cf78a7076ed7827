"""Context parallelism: every sequence is cut into contiguous parts, and each process of a group works on one.

All of a decoder layer but attention works on tokens one by one, and does not notice. Around attention the processes
trade: before it, each gives away its tokens' queries, keys and values of all heads but some, and gets those heads for
all tokens (`sequence_to_heads`); after it, the results go the same way back (`heads_to_sequence`). So attention itself
is the ordinary one, over whole sequences and a part of the heads, and knows nothing of this. A layer takes two
all-to-alls forward and two backward, whatever the degree; what a process sends shrinks as the degree grows.

The loss of a step is the sum of the processes' losses, and its gradient the sum of theirs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pantheraml.base.errors import UnsupportedModelError


def cut_sequence(tensor: Tensor, group: dist.ProcessGroup, *, dim: int = 1) -> Tensor:
    """This process's part of `tensor`, whose dimension `dim` counts the tokens of a row."""
    width, degree = tensor.shape[dim], group.size()
    if width % degree:
        raise ValueError(f"rows of {width} tokens cannot be cut into {degree} equal parts")
    part = width // degree
    return tensor.narrow(dim, group.rank() * part, part).contiguous()


def check_heads(heads: int, degree: int, *, tensor: int = 1) -> None:
    """UnsupportedModelError unless each of `degree` processes can have the same number of attention heads, of those
    that tensor parallelism over `tensor` processes leaves one of them. (Where that leaves fractions, it refuses.)"""
    left, rest = divmod(heads, tensor)
    if rest or left % degree == 0:
        return
    fitting = ", ".join(str(number) for number in range(2, left + 1) if left % number == 0)
    beside = f", beside tensor parallelism over {tensor}," if tensor > 1 else ""
    raise UnsupportedModelError(
        f"Context parallelism over {degree} processes{beside} would divide {heads} attention heads unevenly.",
        todo=f"Use a parallel.context that divides {left}: {fitting}." if fitting else "Use parallel.context=1.",
    )


def sequence_to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """From [B, heads, S / degree, D] to [B, heads / degree, S, D], each with its own heads and D; one all-to-all."""
    degree = group.size()
    check_heads(query.shape[1], degree)
    # Query heads share key/value heads evenly, and their number is a multiple of `degree`; so this many copies of each
    # key/value head are shared evenly too, and fall on processes just as the query heads which use them.
    copies = degree // math.gcd(key.shape[1], degree)
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    tensors = (query, key, value)
    shapes = [(tensor.shape[1] // degree, tensor.shape[3]) for tensor in tensors]
    # [degree, B, S / degree, heads / degree * D]: by the process they go to
    parts = [tensor.unflatten(1, (degree, -1)).permute(1, 0, 3, 2, 4).flatten(3) for tensor in tensors]
    came = _exchange(torch.cat(parts, dim=-1), group)
    whole = came.transpose(0, 1).flatten(1, 2).split([heads * size for heads, size in shapes], dim=-1)
    query, key, value = (one.unflatten(-1, shape).transpose(1, 2) for one, shape in zip(whole, shapes, strict=True))
    return query, key, value


def heads_to_sequence(mixed: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From attention's result [B, S, heads / degree, D] to [B, S / degree, heads, D]; one all-to-all."""
    parts = mixed.unflatten(1, (group.size(), -1)).transpose(0, 1)
    came = _exchange(parts, group)  # [degree, B, S / degree, heads / degree, D]: by the process they come from
    return came.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`parts[i]` goes to process i; what comes back has at [i] what process i sent here."""
    came: Tensor = _Exchange.apply(parts, group)
    return came


class _Exchange(torch.autograd.Function):
    """A gradient goes back where its value came from, which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        came = torch.empty_like(parts)
        dist.all_to_all_single(came, parts, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, grad, ctx.group), None

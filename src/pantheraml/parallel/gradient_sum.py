"""Summing gradients over a group of processes where DDP's wrapper cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20
"""DDP's own size: large enough for full bandwidth, small enough that the copies do not matter."""


def sum_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """All ranks of `group` get the sum of their gradients; a rank without one counts as zero.

    A collective: every rank has to bring the same parameters in the same order. Of a sharded gradient each rank has the
    same part as its peers in `group`, and those are summed.
    """
    for bucket in _buckets(_local_gradients(parameters), bucket_bytes):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _local_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """In the memory of the gradients themselves."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def _buckets(gradients: Iterable[Tensor], limit: int) -> Iterator[Sequence[Tensor]]:
    """In order, each of one dtype and at most `limit` bytes, or of one gradient."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > limit):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket

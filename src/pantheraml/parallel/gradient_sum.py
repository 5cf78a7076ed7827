"""Bucketed all-reduce of gradients where the DDP wrapper cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20
"""DDP's default bucket size: large enough for full bandwidth, small enough that the flat copies do not matter."""


def sum_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """All-reduce (sum) gradients over `group`; a missing gradient counts as zero.

    Collective: every rank must pass the same parameters in the same order. For sharded gradients, `group` must consist
    of ranks that hold the same shard.
    """
    for bucket in _buckets(_local_gradients(parameters), bucket_bytes):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _local_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield local gradient shards as views of the gradients."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def _buckets(gradients: Iterable[Tensor], limit: int) -> Iterator[Sequence[Tensor]]:
    """Group gradients in order into buckets of one dtype and at most `limit` bytes (or a single gradient)."""
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

"""Gradient aggregation over ranks, as DDP communication hooks.

    mean            over all tokens: DDP's own all-reduce, since the engine scales each rank's loss by tokens
    weighted        the same, where a token of rank i counts weights[i] times
    median          elementwise, of the ranks' mean token gradients (even count: midpoint of the middle two)
    trimmed_mean    the same, without the largest and smallest values

The median needs every rank's value in one place, and excluding a rank with a non-finite gradient is only possible once
its last bucket is ready, after other buckets were sent. Both therefore exchange slices: during backward an all-to-all
gives rank r slice r of each bucket from every rank; then the ranks agree on who participates in the step; then each
rank reduces its slices and all-gathers the results. This moves as many bytes as a ring all-reduce, half of them
overlapped with backward, and costs one extra copy of the gradients. Nothing ever has to be undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pantheraml.specs.aggregation import Method, check_method

TRIM = 0.1
"""Fraction of ranks that `trimmed_mean` drops at each end; at least one rank."""


class Finish(Protocol):
    """Collective that completes the aggregation after a step's last backward; all ranks then hold the same gradients.

    This rank's loss was the sum over its `target_tokens` times `factor`, which is the same on all ranks. Returns the
    global ranks that were excluded. If no rank's gradient is finite, none is excluded and the aggregate is not finite.
    """

    def __call__(self, *, target_tokens: float, factor: float) -> tuple[int, ...]: ...


def attach(
    model: nn.Module, method: Method, *, weights: Sequence[float] | None = None, leave_out_nonfinite: bool = False
) -> Finish:
    """Register the communication hook for `method` on a freshly DDP-wrapped `model`; no-op without DDP.

    `weights` (one per rank of DDP's group) are for `weighted`. With `leave_out_nonfinite`, a rank whose gradient is not
    finite is excluded from that step and the other ranks' weights are renormalized.
    """
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    check_method(method, 1 if group is None else dist.get_world_size(group), weights)
    if not isinstance(model, DistributedDataParallel) or (method == "mean" and not leave_out_nonfinite):
        return no_op_finish
    if method == "weighted" and not leave_out_nonfinite:
        assert weights is not None, "checked above"
        exchange: _WeightedSums | _Slices = _WeightedSums(model.process_group, weights)
    else:
        exchange = _Slices(model.process_group, _COMBINE[method], weights, leave_out_nonfinite)
    # DDP checks a hook's annotations against classes, and this module's annotations are strings; a lambda has none.
    model.register_comm_hook(None, lambda _, bucket: exchange.send(bucket))
    return exchange.finish


def no_op_finish(*, target_tokens: float, factor: float) -> tuple[int, ...]:
    return ()


def _gather(values: list[Tensor], group: dist.ProcessGroup) -> list[list[float]]:
    """All-gather `values` in rank order. The only host-device sync in this module."""
    mine = torch.stack([value.double() for value in values])
    everyone = mine.new_empty(dist.get_world_size(group), len(values))
    dist.all_gather(list(everyone), mine, group=group)
    return cast(list[list[float]], everyone.tolist())


class _WeightedSums:
    """All-reduce of weighted gradients, overlapped with backward, normalized at the end by the total token weight."""

    def __init__(self, group: dist.ProcessGroup, weights: Sequence[float]) -> None:
        self._group = group
        self._weight = weights[dist.get_rank(group)] / max(weights)  # at most 1, so that no gradient overflows
        self._parameters: list[Tensor] = []

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._parameters.clear()
        self._parameters += bucket.parameters()
        weighted = bucket.buffer().mul_(self._weight)
        work = dist.all_reduce(weighted, group=self._group, async_op=True)
        return _then_return(work, weighted)

    def finish(self, *, target_tokens: float, factor: float) -> tuple[int, ...]:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._parameters.clear()
        own = torch.tensor(self._weight * target_tokens, dtype=torch.float64, device=gradients[0].device)
        total = math.fsum(mass for (mass,) in _gather([own], self._group))
        torch._foreach_mul_(gradients, 1 / (factor * total) if total else 1.0)
        return ()


@dataclass(frozen=True)
class _Bucket:
    """A DDP bucket in flight."""

    parameters: list[Tensor]
    sent: Tensor
    rows: Tensor
    """This rank's slice of the bucket, one row per rank."""
    work: dist.Work


class _Slices:
    def __init__(
        self,
        group: dist.ProcessGroup,
        combine: Callable[[Tensor, Tensor], Tensor],
        weights: Sequence[float] | None,
        leave_out_nonfinite: bool,
    ) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self._combine = combine
        self._weights = [1.0] * self._size if weights is None else list(weights)
        self._leave_out_nonfinite = leave_out_nonfinite
        self._buckets: list[_Bucket] = []
        self._finite: list[Tensor] = []

    def send(self, bucket: GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:  # discard leftovers of a failed backward
            self._buckets.clear()
            self._finite.clear()
        own = bucket.buffer()
        self._finite.append(own.isfinite().all())
        excess = -own.numel() % self._size
        sent = F.pad(own, (0, excess)) if excess else own
        rows = torch.empty_like(sent).view(self._size, -1)
        work = dist.all_to_all_single(rows.view(-1), sent, group=self._group, async_op=True)
        assert work is not None, "it is asynchronous"
        self._buckets.append(_Bucket(bucket.parameters(), sent, rows, work))
        return _then_return(work, own)

    def finish(self, *, target_tokens: float, factor: float) -> tuple[int, ...]:
        buckets, finite = self._buckets, torch.stack(self._finite).all()
        self._buckets, self._finite = [], []
        tokens = torch.tensor(target_tokens, dtype=torch.float64, device=finite.device)
        everyone = _gather([tokens, finite], self._group)
        masses = [weight * count for weight, (count, _) in zip(self._weights, everyone, strict=True)]
        present = [rank for rank, mass in enumerate(masses) if mass > 0]
        sound = [rank for rank in present if everyone[rank][1]]
        partakers = sound if self._leave_out_nonfinite and sound else present
        # row * scale is that rank's mean token gradient
        scales = torch.tensor([1 / (factor * everyone[rank][0]) for rank in partakers], dtype=torch.float64)
        shares = torch.tensor([masses[rank] for rank in partakers], dtype=torch.float64)
        for bucket in buckets:
            self._replace_gradients(bucket, partakers, scales, shares / shares.sum())
        left_out = sorted(set(present) - set(partakers))
        return tuple(dist.get_global_rank(self._group, rank) for rank in left_out)

    def _replace_gradients(self, bucket: _Bucket, partakers: list[int], scales: Tensor, shares: Tensor) -> None:
        bucket.work.wait()
        wide = torch.promote_types(bucket.rows.dtype, torch.float32)
        if partakers:
            rows = bucket.rows[partakers].to(wide) * scales.to(bucket.rows.device, wide).unsqueeze(1)
            own = self._combine(rows, shares.to(bucket.rows.device, wide).unsqueeze(1)).to(bucket.rows.dtype)
        else:
            own = torch.zeros_like(bucket.rows[0])
        whole = torch.empty_like(bucket.sent)
        # Gather into views: the single-tensor all_gather was renamed after torch 2.12.
        dist.all_gather(list(whole.view(self._size, -1)), own, group=self._group)
        offset = 0
        for parameter in bucket.parameters:
            gradient = parameter.grad
            if gradient is not None:  # None if no rank used the parameter
                part = whole[offset : offset + gradient.numel()]
                gradient.copy_(part.as_strided(gradient.size(), gradient.stride()))  # a bucket keeps the strides
            offset += parameter.numel()


def _then_return(work: dist.Work | None, tensor: Tensor) -> Future[Tensor]:
    assert work is not None, "it is asynchronous"
    return work.get_future().then(lambda _: tensor)


def mean(rows: Tensor, shares: Tensor) -> Tensor:
    """Weighted mean of one row per rank; `shares` sum to 1."""
    return (rows * shares).sum(0)


def median(rows: Tensor, shares: Tensor) -> Tensor:
    """Elementwise median; `shares` are ignored."""
    ordered, count = rows.sort(dim=0).values, len(rows)
    return _where_finite(rows, (ordered[(count - 1) // 2] + ordered[count // 2]) / 2)


def trimmed_mean(rows: Tensor, shares: Tensor) -> Tensor:
    """Elementwise mean without the `TRIM` largest and smallest values; plain mean of one or two rows."""
    count = len(rows)
    drop = min(max(1, int(TRIM * count)), (count - 1) // 2)
    return _where_finite(rows, rows.sort(dim=0).values[drop : count - drop].mean(0))


def _where_finite(rows: Tensor, combined: Tensor) -> Tensor:
    """Propagate non-finite values that the reduction dropped, so that the step's non-finite check sees them."""
    return torch.where(rows.isfinite().all(0), combined, torch.nan)


_COMBINE: dict[Method, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean,
    "weighted": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
}

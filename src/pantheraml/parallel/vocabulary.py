"""Vocab-parallel input embedding and cross-entropy loss.

Each rank holds the embeddings, and computes the logits, of a shard of the vocabulary. Full logits are never gathered:
for each token a rank sends the log-sum-exp of its logits, and the target's logit if it owns that id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pantheraml.kernels.linear_cross_entropy.head import (
    DensePass,
    HeadRows,
    LinearHead,
    NeededGrads,
    chunk_rows,
    scale_gradient,
    scatter_rows,
    select_rows,
    target_rows,
)
from pantheraml.kernels.linear_cross_entropy.softmax import Scores
from pantheraml.parallel.tp_mappings import LocalParameters, ParameterSlot, distribute, reduce_from_tp, to_local

AXIS = "tensor"
"""Mesh dimension over which the vocabulary is sharded."""


def is_vocab_parallel(layer: nn.Module) -> bool:
    """Return True if a linear head's weight is sharded over the vocabulary, so that its loss is `sharded_head_loss`."""
    weight = getattr(layer, "weight", None)
    if type(layer) is not nn.Linear or not isinstance(weight, DTensor):
        return False
    names = weight.device_mesh.mesh_dim_names or ()
    return AXIS in names and weight.placements[names.index(AXIS)].is_shard(0)


def sharded_head_loss(layer: nn.Linear, hidden: Tensor, targets: Tensor, target_count: int | None = None) -> Tensor:
    """Return the summed cross entropy of a vocab-parallel head, identical on all its ranks."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, DTensor)
    return vocab_parallel_loss(
        hidden,
        weight.to_local(),
        targets,
        weight.device_mesh[AXIS].get_group(),
        vocabulary=weight.shape[0],
        bias=bias.to_local() if isinstance(bias, DTensor) else bias,
        target_count=target_count,
    )


def vocab_parallel_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    *,
    vocabulary: int,
    bias: Tensor | None = None,
    target_count: int | None = None,
) -> Tensor:
    """Return the sum of -log p(target) over non-negative targets; `target_count` is their number, if known.

    `hidden` and `targets` are identical on all ranks of `group`; `weight` [ids, width] and `bias` are this rank's rows
    out of `vocabulary`, sharded as DTensor does. Each chunk of tokens all-gathers two numbers per token, and backward
    all-reduces the gradient of `hidden`.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    # captured here: inside an autograd.Function, grad mode is always off
    call = _Call(targets.flatten(), target_count, group, vocabulary, torch.is_grad_enabled())
    with torch.autocast(kind, enabled=False):
        total: Tensor = _VocabularyLoss.apply(hidden.flatten(0, -2), weight, bias, call)
    return total


class _Call(NamedTuple):
    """Non-differentiable arguments of the loss."""

    targets: Tensor
    target_count: int | None
    group: dist.ProcessGroup
    vocabulary: int
    gradients: bool


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        kept = target_rows(call.targets, call.target_count)
        rows = HeadRows(select_rows(hidden, kept), select_rows(call.targets, kept), kept)
        wanted = NeededGrads(*(call.gradients and need for need in ctx.needs_input_grad[:3]))
        run = _VocabularyPass(rows, LinearHead(weight, bias), wanted, call)
        total = run.scores(details=False).losses.sum()
        ctx.save_for_backward(run.d_rows, run.d_weight, run.d_bias, kept)
        ctx.count, ctx.group = hidden.shape[0], call.group
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight, d_bias, kept = ctx.saved_tensors
        (scale,) = grads
        weight_dtype, bias_dtype = ctx.dtypes
        if d_rows is not None:
            d_rows = scale_gradient(d_rows, scale, d_rows.dtype)
            dist.all_reduce(d_rows, group=ctx.group)
        return (
            None if d_rows is None else scatter_rows(d_rows, kept, ctx.count),
            None if d_weight is None else scale_gradient(d_weight, scale, weight_dtype),
            None if d_bias is None else scale_gradient(d_bias, scale, bias_dtype),
            None,
        )


class _VocabularyPass(DensePass):
    """Chunked pass of a head with a vocabulary shard."""

    def __init__(self, rows: HeadRows, head: LinearHead, wanted: NeededGrads, call: _Call) -> None:
        super().__init__(rows, head, wanted)
        self._group = call.group
        share = _share(call.vocabulary, dist.get_world_size(call.group))
        self._first = dist.get_rank(call.group) * share
        # the same on every rank, even one with fewer ids: each chunk is a collective
        self._chunk = chunk_rows(share, trained=wanted.weight)

    def _softmax(self, logits: Tensor, labels: Tensor, scores: Scores, gradient: Tensor | None) -> None:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        local, mine = _local_ids(labels, self._first, logits.shape[1])
        target = wide.gather(1, local[:, None]).squeeze(1).where(mine, 0)
        parts = _gathered(torch.stack([wide.logsumexp(dim=1), target]), self._group)
        log_z = parts[:, 0].logsumexp(dim=0)
        counted = labels >= 0
        scores.losses.copy_((log_z - parts[:, 1].sum(dim=0)).where(counted, 0))
        if gradient is None:
            return
        d = (wide - log_z[:, None]).exp_()
        d.scatter_add_(1, local[:, None], -mine[:, None].to(d.dtype))
        gradient.copy_(d.where(counted[:, None], 0))


def shard_embedding(embedding: nn.Embedding, mesh: DeviceMesh, weight: nn.Parameter | None) -> None:
    """Shard the embedding over the vocabulary, or tie it to `weight`, which is sharded already."""
    if weight is None:
        weight = distribute(embedding.get_parameter("weight"), mesh, Shard(0))
    embedding.register_parameter("weight", weight)
    LocalParameters(embedding, [ParameterSlot(embedding, "weight", to_local)])
    _LocalLookup(embedding, mesh)


class _LocalLookup:
    """Masked lookup: ids of other ranks give zeros, and an all-reduce sums the ranks' results."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        share = _share(embedding.num_embeddings, mesh.size())
        self._first = mesh.get_local_rank() * share
        self._count = min(share, embedding.num_embeddings - self._first)
        self._mine: Tensor | None = None
        if embedding.padding_idx is not None:  # this row gets no gradient
            local = embedding.padding_idx - self._first
            embedding.padding_idx = local if 0 <= local < self._count else None
        embedding.register_forward_pre_hook(self._to_local_ids)
        embedding.register_forward_hook(self._all_reduce)

    def _to_local_ids(self, _embedding: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        local, self._mine = _local_ids(args[0], self._first, self._count)
        return (local,)

    def _all_reduce(self, _embedding: nn.Module, _args: Any, output: Tensor) -> Tensor:
        mine, self._mine = self._mine, None
        assert mine is not None
        return reduce_from_tp(output.where(mine[..., None], 0), self._mesh)


def _share(vocabulary: int, ranks: int) -> int:
    """Return ids per rank; the last rank has fewer if they do not divide evenly."""
    return -(-vocabulary // ranks)


def _local_ids(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return ids relative to this rank's first (0 for those of other ranks), and a mask of this rank's ids."""
    local = ids - first
    mine = (local >= 0) & (local < count) & (ids >= 0)
    return local.where(mine, 0), mine


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather to [ranks, ...]."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows)

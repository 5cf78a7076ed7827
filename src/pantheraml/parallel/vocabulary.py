"""The two ends of a model whose vocabulary is cut over ranks: input embedding and loss.

A rank has the embeddings of some ids, and finds the logits of some. The logits of all are never in one place: for each
token, a rank sends the logarithm of its part of the normaliser, and the target's logit if that is its own.
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
    LinearHead,
    Rows,
    Wanted,
    chunk_rows,
    kept_rows,
    put_back,
    scaled,
    taken,
)
from pantheraml.kernels.linear_cross_entropy.softmax import Scores
from pantheraml.parallel.borders import LocalParameters, Place, add_up, distribute, own_part

AXIS = "tensor"
"""The name of the dimension of a mesh over which vocabularies are cut."""


def is_vocabulary_parallel(layer: nn.Module) -> bool:
    """Whether a linear layer has the rows of some ids alone, so that its loss is `sharded_head_loss`."""
    weight = getattr(layer, "weight", None)
    if type(layer) is not nn.Linear or not isinstance(weight, DTensor):
        return False
    names = weight.device_mesh.mesh_dim_names or ()
    return AXIS in names and weight.placements[names.index(AXIS)].is_shard(0)


def sharded_head_loss(layer: nn.Linear, hidden: Tensor, targets: Tensor, target_count: int | None = None) -> Tensor:
    """Summed cross entropy of a head for which `is_vocabulary_parallel` holds; the same on all ranks that share it."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, DTensor)
    return vocabulary_parallel_loss(
        hidden,
        weight.to_local(),
        targets,
        weight.device_mesh[AXIS].get_group(),
        vocabulary=weight.shape[0],
        bias=bias.to_local() if isinstance(bias, DTensor) else bias,
        target_count=target_count,
    )


def vocabulary_parallel_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    *,
    vocabulary: int,
    bias: Tensor | None = None,
    target_count: int | None = None,
) -> Tensor:
    """Sum of -log p(target) over the targets that are not negative, of which `target_count` is the number, if known.

    `hidden` and `targets` are the same on all ranks of `group`; `weight` [ids, width] and `bias` are this rank's rows
    of the `vocabulary` ones, cut as DTensor cuts. For each chunk of tokens a rank sends two numbers a token (one
    all-gather), and in the backward pass its share of the gradient of `hidden` (one all-reduce).
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    # a Function cannot tell whether gradients are on: inside it they are always off
    call = _Call(targets.flatten(), target_count, group, vocabulary, torch.is_grad_enabled())
    with torch.autocast(kind, enabled=False):
        total: Tensor = _VocabularyLoss.apply(hidden.flatten(0, -2), weight, bias, call)
    return total


class _Call(NamedTuple):
    """What the loss is asked, besides hidden states, weight and bias."""

    targets: Tensor
    target_count: int | None
    group: dist.ProcessGroup
    vocabulary: int
    gradients: bool


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        kept = kept_rows(call.targets, call.target_count)
        rows = Rows(taken(hidden, kept), taken(call.targets, kept), kept)
        wanted = Wanted(*(call.gradients and need for need in ctx.needs_input_grad[:3]))
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
            d_rows = scaled(d_rows, scale, d_rows.dtype)
            dist.all_reduce(d_rows, group=ctx.group)
        return (
            None if d_rows is None else put_back(d_rows, kept, ctx.count),
            None if d_weight is None else scaled(d_weight, scale, weight_dtype),
            None if d_bias is None else scaled(d_bias, scale, bias_dtype),
            None,
        )


class _VocabularyPass(DensePass):
    """The chunks of a head that has some of the ids."""

    def __init__(self, rows: Rows, head: LinearHead, wanted: Wanted, call: _Call) -> None:
        super().__init__(rows, head, wanted)
        self._group = call.group
        share = _share(call.vocabulary, dist.get_world_size(call.group))
        self._first = dist.get_rank(call.group) * share
        # as many on every rank, also on one with fewer ids: each chunk is a collective
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


def cut_embedding(embedding: nn.Embedding, mesh: DeviceMesh, weight: nn.Parameter | None) -> None:
    """Leave this rank the embeddings of its ids: those of `weight`, which is cut already, or its own."""
    if weight is None:
        weight = distribute(embedding.get_parameter("weight"), mesh, Shard(0))
    embedding.register_parameter("weight", weight)
    LocalParameters(embedding, [Place(embedding, "weight", own_part)])
    _LocalLookup(embedding, mesh)


class _LocalLookup:
    """Ids of other ranks give zeros, and the results of all ranks are added up."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        share = _share(embedding.num_embeddings, mesh.size())
        self._first = mesh.get_local_rank() * share
        self._count = min(share, embedding.num_embeddings - self._first)
        self._mine: Tensor | None = None
        if embedding.padding_idx is not None:  # a row that gets no gradient
            local = embedding.padding_idx - self._first
            embedding.padding_idx = local if 0 <= local < self._count else None
        embedding.register_forward_pre_hook(self._localise)
        embedding.register_forward_hook(self._add_up)

    def _localise(self, _embedding: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        local, self._mine = _local_ids(args[0], self._first, self._count)
        return (local,)

    def _add_up(self, _embedding: nn.Module, _args: Any, found: Tensor) -> Tensor:
        mine, self._mine = self._mine, None
        assert mine is not None
        return add_up(found.where(mine[..., None], 0), self._mesh)


def _share(vocabulary: int, ranks: int) -> int:
    """Ids a rank; the last has fewer if they do not divide."""
    return -(-vocabulary // ranks)


def _local_ids(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Ids counted from this rank's first one (0 for those of other ranks), and which are this rank's."""
    local = ids - first
    mine = (local >= 0) & (local < count) & (ids >= 0)
    return local.where(mine, 0), mine


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]"""
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return torch.stack(everybody)

"""Shard the user's DataLoader over the ranks: a global step is one batch per rank, and every sample is read once.

torch's own DistributedSampler repeats or drops samples so that all ranks get equally many. Here the samples of the last
step are divided as they are, and `weigh_gradients` gives each sample the same weight in the mean over the global batch:
ranks then train like one process with a batch of (ranks * batch size) in the same order.

The order is that of the user's own sampler on rank 0, sent to all ranks at the start of each epoch, so any sampler
keeps its meaning and ranks need not share RNG states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.parallel.json_gather import broadcast_json

logger = log.get_manager()

Indices = list[Any]
Share = tuple[Indices, float]
"""Samples of one rank in one step, and their number relative to the mean over ranks; 0: a repeated sample."""


class BatchWeight:
    """Weight of this rank's current batch in gradients that are averaged over ranks."""

    def __init__(self) -> None:
        self.share = 1.0
        """Samples of the batch relative to the mean over ranks; set by the loaders."""
        self.sum_over: int | None = None
        """Number of ranks, if the user's loss is a sum over samples instead of a mean."""

    @property
    def factor(self) -> float:
        if self.sum_over is None:
            return self.share
        return float(self.sum_over) if self.share > 0 else 0.0


def split_step(batches: Sequence[Indices], ranks: int) -> list[Share]:
    """Divide the samples of one step: a batch per rank, or equal shares if there are fewer batches than ranks.

    A rank that gets none repeats the first sample with weight 0, because it must take part in the collectives.
    """
    samples = [index for batch in batches for index in batch]
    shares = list(batches)
    if len(batches) != ranks:
        small, larger = divmod(len(samples), ranks)
        ends = [small * (rank + 1) + min(rank + 1, larger) for rank in range(ranks)]
        shares = [samples[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [(share or samples[:1], len(share) * ranks / len(samples)) for share in shares]


def shares_of_rank(batches: Iterable[Indices], rank: int, ranks: int, *, drop_last: bool) -> list[Share]:
    """Return the share of `rank` in every step."""
    found, step = [], []
    for batch in batches:
        step.append(list(batch))
        if len(step) == ranks:
            found.append(split_step(step, ranks)[rank])
            step = []
    if step and not drop_last:
        found.append(split_step(step, ranks)[rank])
    return found


class _EpochOrder:
    """This rank's shares of an epoch: rank 0 runs the user's sampler and sends its batches to all. A collective."""

    def __init__(self, batches: Iterable[Indices], *, drop_last: bool) -> None:
        self._batches, self._drop_last = batches, drop_last
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.factors: list[float] = []
        """Weights of the batches of the current epoch."""

    def draw(self) -> list[Indices]:
        batches = broadcast_json([list(batch) for batch in self._batches] if self.rank == 0 else None)
        shares = shares_of_rank(batches, self.rank, self.ranks, drop_last=self._drop_last)
        self.factors = [factor for _, factor in shares]
        if 0.0 in self.factors:
            logger.warning("the last batch has fewer samples than ranks: rank %d repeats one with weight 0", self.rank)
        return [indices for indices, _ in shares]


class ShardedSampler(DistributedSampler[Any]):
    """The samples of this rank, in the order of `source`; iterating is a collective."""

    def __init__(self, dataset: Any, source: Any, batch_size: int, *, drop_last: bool) -> None:
        batches = BatchSampler(source, batch_size, drop_last)
        self._source, self._batch_size = source, batch_size
        self._order = _EpochOrder(batches, drop_last=drop_last)
        super().__init__(
            dataset, self._order.ranks, self._order.rank, shuffle=False, seed=torch.initial_seed() % 2**31,
            drop_last=drop_last,
        )  # fmt: skip
        self._epoch_was_set = False

    @property
    def factors(self) -> list[float]:
        return self._order.factors

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch; without it, a random sampler draws a new one for each epoch."""
        super().set_epoch(epoch)
        self._epoch_was_set = True
        own: Any = getattr(self._source, "set_epoch", None)
        if own is not None:
            own(epoch)

    def __iter__(self) -> Iterator[Any]:
        source: Any = self._source
        if self._epoch_was_set and hasattr(source, "generator"):
            source.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        for share in self._order.draw():
            yield from share

    def __len__(self) -> int:
        full, rest = divmod(len(self._source), self._order.ranks * self._batch_size)
        count = full * self._batch_size
        if rest and not self.drop_last:
            samples = list(range(rest))
            step = [samples[start : start + self._batch_size] for start in range(0, rest, self._batch_size)]
            count += len(split_step(step, self._order.ranks)[self._order.rank][0])
        return count


class ShardedBatchSampler(Sampler[Indices]):
    """The batches of this rank, for a user's own batch sampler; iterating is a collective."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._order = _EpochOrder(batches, drop_last=bool(getattr(batches, "drop_last", False)))

    @property
    def factors(self) -> list[float]:
        return self._order.factors

    def set_epoch(self, epoch: int) -> None:
        for part in (self._batches, getattr(self._batches, "sampler", None)):
            own: Any = getattr(part, "set_epoch", None)
            if own is not None:
                own(epoch)

    def __iter__(self) -> Iterator[Indices]:
        return iter(self._order.draw())

    def __len__(self) -> int:
        count, ranks = len(self._batches), self._order.ranks
        return count // ranks if self._order._drop_last else -(-count // ranks)


class ShardedLoader(DataLoader[Any]):
    """A DataLoader that says how much its current batch weighs. `set_epoch` is that of its sampler."""

    def __init__(self, weight: BatchWeight, order: ShardedSampler | ShardedBatchSampler, **arguments: Any) -> None:
        self._weight, self._order = weight, order
        super().__init__(**arguments)

    def set_epoch(self, epoch: int) -> None:
        self._order.set_epoch(epoch)

    def __iter__(self) -> Any:
        outside = self._weight.share
        try:
            for number, batch in enumerate(super().__iter__()):
                self._weight.share = self._order.factors[number]
                yield batch
        finally:  # an evaluation between two training batches must not change the weight of the training batch
            self._weight.share = outside


KEPT = (
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
"""Arguments of a DataLoader that do not choose samples."""


def loader_arguments(loader: DataLoader[Any], **changed: Any) -> dict[str, Any]:
    """Return the arguments of `loader` that do not choose samples, to make another one."""
    return {name: getattr(loader, name) for name in KEPT} | changed


def has_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the loader was given a batch sampler, which then chooses samples and batch size."""
    made_by_torch = loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
    return loader.batch_sampler is not None and not made_by_torch


def rebuilt_loader(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """Return a DataLoader of the same batches with the arguments `changed`."""
    arguments = loader_arguments(loader, **changed)
    if has_own_batches(loader):
        return DataLoader(batch_sampler=loader.batch_sampler, **arguments)
    arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset):  # which draws its own order
        arguments["sampler"] = loader.sampler
    return DataLoader(**arguments)


def shard_loader(loader: DataLoader[Any], weight: BatchWeight, **changed: Any) -> DataLoader[Any]:
    """Return `loader` with the samples of this rank, its own batch size (per rank) and the arguments `changed`."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "The DataLoader's dataset is iterable: it cannot be divided over the ranks by index.",
            fix="Divide it by rank yourself (datasets.distributed.split_dataset_by_node) and use your DataLoader as it"
            " is, or pass a dataset with __getitem__ and __len__.",
        )
    if isinstance(loader, ShardedLoader):
        return loader
    if isinstance(loader.sampler, DistributedSampler):
        logger.info("the DataLoader has a %s already: it is kept", type(loader.sampler).__name__)
        return loader
    arguments = loader_arguments(loader, **changed)
    if has_own_batches(loader):
        batches = ShardedBatchSampler(loader.batch_sampler)
        return ShardedLoader(weight, batches, batch_sampler=batches, **arguments)
    sampler = ShardedSampler(loader.dataset, loader.sampler, loader.batch_size or 1, drop_last=loader.drop_last)
    drop_last = loader.drop_last and loader.batch_size is not None
    return ShardedLoader(
        weight, sampler, sampler=sampler, batch_size=loader.batch_size, drop_last=drop_last, **arguments
    )


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def weigh_gradients(model: nn.Module, weight: BatchWeight, scale: float = 1.0) -> None:
    """Multiply the gradients of `model`'s outputs by the batch's weight and `scale`.

    All gradients of the model are linear in those, so uneven batches count by their samples, for any loss that is a
    mean over them, in each backward pass of an accumulated step.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a hook of a compiled model would be traced
    def hook(module: nn.Module, _args: Any, output: Any) -> Any:
        factor = weight.factor * scale
        if factor == 1.0 or not torch.is_grad_enabled():
            return None
        scaled = 0

        def apply(value: Tensor) -> Tensor:
            nonlocal scaled
            scaled += value.requires_grad
            return _ScaleGradient.apply(value, factor) if value.requires_grad else value

        changed = tree_map_only(Tensor, apply, output)
        if not scaled and module.training:
            raise UnsupportedModelError(
                f"The output of the model, a {type(output).__name__}, has no tensor with a gradient, so a batch of"
                f" weight {factor:g} cannot be weighed.",
                fix="Return tensors, a tuple or a dict of them, or a transformers ModelOutput; or use drop_last=True.",
            )
        return changed

    model.register_forward_hook(hook)

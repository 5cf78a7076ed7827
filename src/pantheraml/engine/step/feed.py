"""Batches for the training loop, prefetched by a thread while the device works on the current step.

The prefetch thread and the training thread share the GIL, so where the GPU waits for launches, prefetching should start
after them: the loop chooses the moment by calling `prefetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import torch

from pantheraml.data.batch import Batch, collate
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.order import step_samples
from pantheraml.parallel.process_group import World
from pantheraml.parallel.shard_batch import Ids, shards

POLL_SECONDS = 0.001
"""Interval at which `prefetched` checks its `until` condition."""


@dataclass(frozen=True)
class StepBatches:
    """One rank's part of a global batch."""

    sample_ids: Ids
    """All samples of the global batch, over all ranks, in order."""
    target_tokens: int
    """Loss-bearing tokens of the global batch."""
    micro_batches: list[Batch]
    """At least one: a rank without samples gets a dummy batch without targets, so that it still joins collectives."""
    own_samples: list[Ids]
    """Samples of each micro-batch, without the dummy batches."""
    max_sequences: int | None = None
    """Largest number of sequences in a micro-batch; None: unknown."""

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.micro_batches)


class Feed:
    def __init__(
        self,
        dataset: TokenDataset,
        world: World,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        limit: int | None,
        weights_at: Callable[[int], Sequence[float] | None] = lambda step: None,
    ) -> None:
        """`weights_at`: relative batch shares of the data ranks at a step; None: equal."""
        self._dataset, self._world, self._weights_at = dataset, world, weights_at
        self._seed, self._global_batch, self._micro_batch, self._limit = seed, global_batch, micro_batch, limit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[StepBatches]] | None = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def step(self, step: int) -> StepBatches:
        """Return the batches of `step` and start prefetching the next step's."""
        batches = self.take(step)
        self.prefetch(step + 1)
        return batches

    def take(self, step: int) -> StepBatches:
        """Return the batches of `step`, without prefetching others."""
        ahead, self._ahead = self._ahead, None
        return ahead[1].result() if ahead is not None and ahead[0] == step else self._make(step)

    def prefetch(self, step: int) -> None:
        """Start preparing the batches of `step` for a later `take`."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._thread.submit(self._make, step))

    def prefetched(self, until: Callable[[], bool]) -> StepBatches | None:
        """Wait for the prefetched batches; None if `until` becomes true first. Errors are left for `take` to raise."""
        if self._ahead is None:
            return None
        ahead = self._ahead[1]
        while not ahead.done():
            if until():
                return None
            wait([ahead], timeout=POLL_SECONDS)
        return ahead.result() if ahead.exception() is None else None

    @property
    def micro_batch(self) -> int:
        return self._micro_batch

    def use_micro_batch(self, size: int) -> None:
        """Use micro-batches of `size` sequences from the next call of `step` on."""
        self._micro_batch, self._ahead = size, None

    def samples(self, step: int) -> Ids:
        size = len(self._dataset)
        return step_samples(self._dataset.fingerprint, self._seed, size, self._global_batch, step, self._limit)

    def _make(self, step: int) -> StepBatches:
        ids, layout, micro_batch = self.samples(step), self._world.layout, self._micro_batch
        everyone = shards(ids, layout.dims.data, micro_batch=micro_batch, weights=self._weights_at(step))
        mine = everyone[layout.data_rank]
        batches = [read_batch(self._dataset, part, self._world) for part in mine]
        # With sharded weights all ranks must run equally many passes; otherwise at least one, to reduce gradients.
        required = max(map(len, everyone)) if layout.dims.shard > 1 else 1
        if len(ids) and len(batches) < required:
            dummy = read_batch(self._dataset, ids[:1], self._world).without_targets()
            batches += [dummy] * (required - len(batches))
        targets = int(self._dataset.target_tokens(ids).sum())
        return StepBatches(ids, targets, batches, mine, micro_batch)


def read_batch(dataset: TokenDataset, ids: Ids, world: World) -> Batch:
    """Collate sequences, in pinned memory if the device is a GPU."""
    sequences = [dataset.sequence(int(index)) for index in ids]
    batch = collate(
        sequences,
        pad_id=dataset.pad_id,
        width=dataset.seq_len if dataset.packed else None,
        parts=world.layout.dims.context,
    )
    return batch.pin_memory() if world.device.type == "cuda" else batch


def eval_batches(dataset: TokenDataset, world: World, *, micro_batch: int) -> Iterator[Batch]:
    """Yield this rank's evaluation batches in order, then dummy batches up to the same number on all ranks."""
    ids, layout = torch.arange(len(dataset)).numpy(), world.layout
    everyone = shards(ids, layout.dims.data, micro_batch=micro_batch)
    mine = everyone[layout.data_rank]
    for part in mine:
        yield read_batch(dataset, part, world)
    for _ in range(max(map(len, everyone)) - len(mine)):
        yield read_batch(dataset, ids[:1], world).without_targets()

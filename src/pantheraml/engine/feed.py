"""Batches for the loop: the next step's are read and collated by a thread while the device works on this one's.

That thread and the one that trains execute Python in turns, so where a GPU waits for the next step to be launched it is
better begun on afterwards: a loop may say when, by `read_ahead`.
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

LOOK_AGAIN_SECONDS = 0.001
"""Between two looks at whether somebody is still willing to wait for batches."""


@dataclass(frozen=True)
class StepBatches:
    """One rank's part of one global batch."""

    sample_ids: Ids
    """All samples of the global batch, over all ranks, in order."""
    target_tokens: int
    """Loss-bearing tokens of the global batch."""
    micro_batches: list[Batch]
    """At least one: a rank that got no sample computes on one without targets, since its peers meet it in the step."""
    own_samples: list[Ids]
    """Those of each micro-batch, less the ones without targets."""
    most_at_a_time: int | None = None
    """How many sequences a micro-batch may have; None: not known."""

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
        """`weights_at`: how the batch of a step is shared among the data ranks; None is evenly."""
        self._dataset, self._world, self._weights_at = dataset, world, weights_at
        self._seed, self._global_batch, self._micro_batch, self._limit = seed, global_batch, micro_batch, limit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[StepBatches]] | None = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def step(self, step: int) -> StepBatches:
        """The batches of step `step`; starts on those of the next one."""
        batches = self.take(step)
        self.read_ahead(step + 1)
        return batches

    def take(self, step: int) -> StepBatches:
        """The batches of step `step`, without starting on others."""
        ahead, self._ahead = self._ahead, None
        return ahead[1].result() if ahead is not None and ahead[0] == step else self._make(step)

    def read_ahead(self, step: int) -> None:
        """Start on the batches of step `step`, which `take` is going to be asked for."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._thread.submit(self._make, step))

    def came_ahead(self, until: Callable[[], bool]) -> StepBatches | None:
        """What `read_ahead` was asked for, as soon as it is there; None if `until` comes true before. What went wrong
        with it is for `take` to raise."""
        if self._ahead is None:
            return None
        ahead = self._ahead[1]
        while not ahead.done():
            if until():
                return None
            wait([ahead], timeout=LOOK_AGAIN_SECONDS)
        return ahead.result() if ahead.exception() is None else None

    @property
    def micro_batch(self) -> int:
        return self._micro_batch

    def use_micro_batch(self, size: int) -> None:
        """From the next call of `step` on."""
        self._micro_batch, self._ahead = size, None

    def samples(self, step: int) -> Ids:
        size = len(self._dataset)
        return step_samples(self._dataset.fingerprint, self._seed, size, self._global_batch, step, self._limit)

    def _make(self, step: int) -> StepBatches:
        ids, layout, micro_batch = self.samples(step), self._world.layout, self._micro_batch
        everyone = shards(ids, layout.dims.data, micro_batch=micro_batch, weights=self._weights_at(step))
        mine = everyone[layout.data_rank]
        batches = [read_batch(self._dataset, part, self._world) for part in mine]
        # Ranks that hold parts of each other's weights have to run equally often; others once, to exchange gradients.
        wanted = max(map(len, everyone)) if layout.dims.shard > 1 else 1
        if len(ids) and len(batches) < wanted:
            idle = read_batch(self._dataset, ids[:1], self._world).without_targets()
            batches += [idle] * (wanted - len(batches))
        targets = int(self._dataset.target_tokens(ids).sum())
        return StepBatches(ids, targets, batches, mine, micro_batch)


def read_batch(dataset: TokenDataset, ids: Ids, world: World) -> Batch:
    """Collated sequences, in page-locked memory if they are to travel to a GPU."""
    sequences = [dataset.sequence(int(index)) for index in ids]
    batch = collate(
        sequences,
        pad_id=dataset.pad_id,
        width=dataset.seq_len if dataset.packed else None,
        parts=world.layout.dims.context,
    )
    return batch.pin_memory() if world.device.type == "cuda" else batch


def eval_batches(dataset: TokenDataset, world: World, *, micro_batch: int) -> Iterator[Batch]:
    """This rank's share of the evaluation data, in order; one with less than others ends with batches of no targets."""
    ids, layout = torch.arange(len(dataset)).numpy(), world.layout
    everyone = shards(ids, layout.dims.data, micro_batch=micro_batch)
    mine = everyone[layout.data_rank]
    for part in mine:
        yield read_batch(dataset, part, world)
    for _ in range(max(map(len, everyone)) - len(mine)):
        yield read_batch(dataset, ids[:1], world).without_targets()

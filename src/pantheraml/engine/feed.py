"""Batches for the loop: the next step's are read and collated by a thread while the device works on this one's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch

from pantheraml.data.batch import Batch, collate
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.order import step_samples
from pantheraml.parallel.data import Ids, shard
from pantheraml.parallel.process_group import World


@dataclass(frozen=True)
class StepBatches:
    """One rank's part of one global batch."""

    sample_ids: Ids
    """All samples of the global batch, over all ranks, in order."""
    target_tokens: int
    """Loss-bearing tokens of the global batch."""
    micro_batches: list[Batch]
    counted: bool
    """False on a rank that got no sample of a short batch: it computes on a stand-in whose loss has weight zero."""

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.micro_batches) if self.counted else 0


class Feed:
    def __init__(
        self, dataset: TokenDataset, world: World, *, seed: int, global_batch: int, micro_batch: int, limit: int | None
    ) -> None:
        self._dataset, self._world = dataset, world
        self._seed, self._global_batch, self._micro_batch, self._limit = seed, global_batch, micro_batch, limit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[StepBatches]] | None = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def step(self, step: int) -> StepBatches:
        """The batches of step `step`; starts on those of the next one."""
        ahead, self._ahead = self._ahead, None
        batches = ahead[1].result() if ahead is not None and ahead[0] == step else self._make(step)
        self._ahead = (step + 1, self._thread.submit(self._make, step + 1))
        return batches

    def samples(self, step: int) -> Ids:
        size = len(self._dataset)
        return step_samples(self._dataset.fingerprint, self._seed, size, self._global_batch, step, self._limit)

    def _make(self, step: int) -> StepBatches:
        ids = self.samples(step)
        mine = shard(ids, rank=self._world.rank, size=self._world.size, micro_batch=self._micro_batch)
        counted = bool(mine)
        if not counted:
            mine = [ids[:1]] if len(ids) else []
        return StepBatches(
            sample_ids=ids,
            target_tokens=int(self._dataset.target_tokens(ids).sum()),
            micro_batches=[read_batch(self._dataset, part, self._world.device) for part in mine],
            counted=counted,
        )


def read_batch(dataset: TokenDataset, ids: Ids, device: torch.device) -> Batch:
    """Collated sequences, in page-locked memory if they are to travel to a GPU."""
    sequences = [dataset.sequence(int(index)) for index in ids]
    batch = collate(sequences, pad_id=dataset.pad_id, width=dataset.seq_len if dataset.packed else None)
    return batch.pin_memory() if device.type == "cuda" else batch


def eval_batches(dataset: TokenDataset, world: World, *, micro_batch: int) -> Iterator[Batch]:
    """This rank's share of the evaluation data, in order."""
    ids = torch.arange(len(dataset)).numpy()
    for part in shard(ids, rank=world.rank, size=world.size, micro_batch=micro_batch):
        yield read_batch(dataset, part, world.device)

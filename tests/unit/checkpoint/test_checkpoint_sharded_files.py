"""Sharded checkpoints, written by several ranks (here: threads) and read back with another sharding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from pantheraml.base.errors import DamagedCheckpointError, StorageError
from pantheraml.checkpoint.sharded_files import Groups, TensorShard, unsharded
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.checkpoint.writer import CheckpointWriter, SavedCheckpoint
from pantheraml.checkpoint.writer_ranks import WriterRanks

RANKS = 3
MATRIX = torch.arange(35, dtype=torch.float32).view(7, 5)
HALF = torch.arange(8).to(torch.bfloat16)
T = TypeVar("T")


class Threads:
    """Ranks as threads of one process, with an all-gather."""

    def __init__(self) -> None:
        self._slots: list[Any] = [None] * RANKS
        self._barrier = threading.Barrier(RANKS)

    def ranks(self, rank: int) -> WriterRanks:
        def exchange(value: Any) -> list[Any]:
            self._slots[rank] = value
            self._barrier.wait(timeout=100)
            gathered = list(self._slots)
            self._barrier.wait(timeout=100)
            return gathered

        return WriterRanks(rank, exchange, single=False)

    def each(self, action: Callable[[int, WriterRanks], T]) -> list[T | StorageError]:
        """Run `action` on every rank; return results or errors."""

        def guarded(rank: int) -> T | StorageError:
            try:
                return action(rank, self.ranks(rank))
            except StorageError as err:
                return err

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(guarded, range(RANKS)))


def groups(rank: int) -> Groups:
    """Return one rank's shards: rows of the matrix (3, 3, 1), tensors that only some ranks have, and one unsharded
    tensor on rank 0."""
    rows = MATRIX[3 * rank : 3 * rank + 3]
    weights = {"matrix": TensorShard(rows, (3 * rank, 0))}
    if rank < 2:
        weights["columns"] = TensorShard(MATRIX[:, 3 * rank : 3 * rank + 3 - rank], (0, 3 * rank))
    moments = {"half::m": TensorShard(HALF[4 * rank - 4 : 4 * rank], (4 * rank - 4,))} if rank else {}
    return {"weights": weights, "optimizer": moments, "rng": unsharded({"count": torch.tensor(3)}) if rank == 0 else {}}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    Threads().each(lambda rank, ranks: store.save(1, groups(rank), {"rank": rank}, ranks=ranks))
    return store


def test_sharded_save_is_one_checkpoint(store: CheckpointStore) -> None:
    loaded = store.load(1)
    assert loaded.state == {"rank": 0}
    assert loaded.tensors.group("weights") == {
        "matrix": (MATRIX.shape, torch.float32),
        "columns": (MATRIX.shape, torch.float32),
    }
    assert torch.equal(loaded.tensors.read_group("weights")["matrix"], MATRIX)
    assert torch.equal(loaded.tensors.read_group("weights")["columns"], MATRIX)
    assert torch.equal(loaded.tensors.read_group("optimizer")["half::m"], HALF)
    assert loaded.tensors.read_group("rng")["count"] == 3
    assert sorted(path.name for path in store.path(1).iterdir()) == [
        "manifest.json",
        "optimizer-00001.safetensors",
        "optimizer-00002.safetensors",
        "rng-00000.safetensors",
        "state.json",
        "weights-00000.safetensors",
        "weights-00001.safetensors",
        "weights-00002.safetensors",
    ]


@pytest.mark.parametrize(
    "region",
    [(slice(2, 5), slice(0, 5)), (slice(0, 7), slice(1, 3)), (slice(6, 7), slice(4, 5)), (slice(3, 3), slice(0, 5))],
)
def test_any_region_can_be_read(store: CheckpointStore, region: tuple[slice, slice]) -> None:
    for name in ("matrix", "columns"):
        part = TensorShard(torch.full(MATRIX[region].shape, -1.0), tuple(s.start for s in region))
        store.load(1).tensors.read_into({name: part})
        assert torch.equal(part.values, MATRIX[region])


def test_torch_dcp_reads_the_files(store: CheckpointStore) -> None:
    reader, planner = HuggingFaceStorageReader(str(store.path(1))), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    targets: dict[str, Tensor] = {"matrix": torch.zeros(7, 5), "half::m": torch.zeros(8, dtype=torch.bfloat16)}
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    assert torch.equal(targets["matrix"], MATRIX)
    assert torch.equal(targets["half::m"], HALF)


@pytest.mark.parametrize("rank", range(RANKS))
def test_damage_is_detected_by_the_rank_that_checks_the_file(store: CheckpointStore, rank: int) -> None:
    file = store.path(1) / f"weights-{rank:05d}.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} fails its checksum"):
        store.load(1)
    detected = 0
    for share in range(RANKS):
        try:
            store.load(1, rank=share, world_size=RANKS)
        except DamagedCheckpointError:
            detected += 1
    assert detected == 1
    file.write_bytes(data[:-1])
    for share in range(RANKS):
        with pytest.raises(DamagedCheckpointError, match=f"{file.name} has .* bytes"):
            store.load(1, rank=share, world_size=RANKS)


def test_missing_or_overlapping_shards_raise(store: CheckpointStore) -> None:
    for parts in ((0, 2), (0, 1, 1, 2)):
        store.save(
            2,
            {f"weights{number}": {"matrix": groups(rank)["weights"]["matrix"]} for number, rank in enumerate(parts)},
            {},
        )
        with pytest.raises(DamagedCheckpointError, match="missing or overlapping shards of `matrix`"):
            store.load(2).tensors.read_into(unsharded({"matrix": torch.zeros(7, 5)}))


def test_disk_error_on_one_rank_raises_on_all_and_keeps_the_last_checkpoint(store: CheckpointStore) -> None:
    blocked = ["weights-00002.safetensors"]

    def save(rank: int, ranks: WriterRanks) -> Path:
        def exchange(value: Any) -> list[Any]:
            gathered = ranks.exchange(value)
            if rank == 2 and blocked:  # simulate a disk error: a folder with the name of the file
                (scratch,) = store.root.glob(".partial-step-00000002.*")
                (scratch / blocked.pop()).mkdir()
            return gathered

        return store.save(2, groups(rank), {}, ranks=WriterRanks(rank, exchange, single=False))

    errors = Threads().each(save)
    assert [str(err) for err in errors] == [str(errors[0])] * RANKS
    assert all(isinstance(err, StorageError) and "Saving step-00000002 failed" in err.what for err in errors)
    assert store.steps() == [1]
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    store.load(1)


def test_writers_of_all_ranks_prune_together(store: CheckpointStore) -> None:
    def write(rank: int, ranks: WriterRanks) -> list[SavedCheckpoint | None]:
        writer = CheckpointWriter(store, keep=2, ranks=ranks)
        written = []
        for step in (2, 3, 4):
            writer.start(step, groups(rank), {}, also_keep={2})
            written.append(writer.collect(wait=True))
        writer.close()
        return written

    results = Threads().each(write)
    assert store.steps() == [2, 3, 4]
    for steps in results:
        assert isinstance(steps, list)
        assert [written.removed for written in steps if written] == [[], [1], []]
        assert [written.bytes for written in steps if written] == [store.bytes(4)] * 3

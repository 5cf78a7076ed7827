"""Checkpoints that several ranks write together, here threads of one process, and that are read in another division."""

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
from pantheraml.checkpoint.parts import Groups, Part, whole
from pantheraml.checkpoint.peers import Peers
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.checkpoint.writer import CheckpointWriter, Written

RANKS = 3
MATRIX = torch.arange(35, dtype=torch.float32).view(7, 5)
HALF = torch.arange(8).to(torch.bfloat16)
T = TypeVar("T")


class Threads:
    """Ranks of one process that tell each other what they have."""

    def __init__(self) -> None:
        self._slots: list[Any] = [None] * RANKS
        self._barrier = threading.Barrier(RANKS)

    def peers(self, rank: int) -> Peers:
        def exchange(mine: Any) -> list[Any]:
            self._slots[rank] = mine
            self._barrier.wait(timeout=100)
            found = list(self._slots)
            self._barrier.wait(timeout=100)
            return found

        return Peers(rank, exchange, alone=False)

    def each(self, action: Callable[[int, Peers], T]) -> list[T | StorageError]:
        """What every rank's action came to."""

        def guarded(rank: int) -> T | StorageError:
            try:
                return action(rank, self.peers(rank))
            except StorageError as err:
                return err

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(guarded, range(RANKS)))


def groups(rank: int) -> Groups:
    """The matrix by rows (three, three, one), what only some have, and something whole that the first alone saves."""
    rows = MATRIX[3 * rank : 3 * rank + 3]
    weights = {"matrix": Part(rows, (3 * rank, 0))}
    if rank < 2:
        weights["columns"] = Part(MATRIX[:, 3 * rank : 3 * rank + 3 - rank], (0, 3 * rank))
    moments = {"half::m": Part(HALF[4 * rank - 4 : 4 * rank], (4 * rank - 4,))} if rank else {}
    return {"weights": weights, "optimizer": moments, "rng": whole({"count": torch.tensor(3)}) if rank == 0 else {}}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    Threads().each(lambda rank, peers: store.save(1, groups(rank), {"rank": rank}, peers=peers))
    return store


def test_what_ranks_save_is_one_checkpoint(store: CheckpointStore) -> None:
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
def test_any_part_can_be_read(store: CheckpointStore, region: tuple[slice, slice]) -> None:
    for name in ("matrix", "columns"):
        part = Part(torch.full(MATRIX[region].shape, -1.0), tuple(s.start for s in region))
        store.load(1).tensors.read_into({name: part})
        assert torch.equal(part.values, MATRIX[region])


def test_torch_reads_the_files_by_itself(store: CheckpointStore) -> None:
    reader, planner = HuggingFaceStorageReader(str(store.path(1))), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    wanted: dict[str, Tensor] = {"matrix": torch.zeros(7, 5), "half::m": torch.zeros(8, dtype=torch.bfloat16)}
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    assert torch.equal(wanted["matrix"], MATRIX)
    assert torch.equal(wanted["half::m"], HALF)


@pytest.mark.parametrize("rank", range(RANKS))
def test_damage_to_any_ranks_file_is_found_by_the_rank_that_looks_at_it(store: CheckpointStore, rank: int) -> None:
    file = store.path(1) / f"weights-{rank:05d}.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} has another checksum"):
        store.load(1)
    found = 0
    for share in range(RANKS):
        try:
            store.load(1, share=share, shares=RANKS)
        except DamagedCheckpointError:
            found += 1
    assert found == 1
    file.write_bytes(data[:-1])
    for share in range(RANKS):
        with pytest.raises(DamagedCheckpointError, match=f"{file.name} has .* bytes"):
            store.load(1, share=share, shares=RANKS)


def test_a_part_that_nobody_saved_is_not_made_up(store: CheckpointStore) -> None:
    for parts in ((0, 2), (0, 1, 1, 2)):
        store.save(
            2,
            {f"weights{number}": {"matrix": groups(rank)["weights"]["matrix"]} for number, rank in enumerate(parts)},
            {},
        )
        with pytest.raises(DamagedCheckpointError, match="does not hold all of `matrix`, or some of it twice"):
            store.load(2).tensors.read_into(whole({"matrix": torch.zeros(7, 5)}))


def test_if_one_ranks_disk_fails_all_say_so_and_the_checkpoint_before_stays(store: CheckpointStore) -> None:
    in_the_way = ["weights-00002.safetensors"]

    def save(rank: int, peers: Peers) -> Path:
        def exchange(mine: Any) -> list[Any]:
            found = peers.exchange(mine)
            if rank == 2 and in_the_way:  # its disk refuses: a folder is where the file goes
                (scratch,) = store.root.glob(".partial-step-00000002.*")
                (scratch / in_the_way.pop()).mkdir()
            return found

        return store.save(2, groups(rank), {}, peers=Peers(rank, exchange, alone=False))

    found = Threads().each(save)
    assert [str(err) for err in found] == [str(found[0])] * RANKS
    assert all(isinstance(err, StorageError) and "Saving step-00000002 failed" in err.what for err in found)
    assert store.steps() == [1]
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    store.load(1)


def test_writers_of_all_ranks_keep_the_newest_together(store: CheckpointStore) -> None:
    def write(rank: int, peers: Peers) -> list[Written | None]:
        writer = CheckpointWriter(store, keep=2, peers=peers)
        written = []
        for step in (2, 3, 4):
            writer.start(step, groups(rank), {}, also_keep={2})
            written.append(writer.collect(wait=True))
        writer.close()
        return written

    found = Threads().each(write)
    assert store.steps() == [2, 3, 4]
    for steps in found:
        assert isinstance(steps, list)
        assert [written.removed for written in steps if written] == [[], [1], []]
        assert [written.bytes for written in steps if written] == [store.bytes(4)] * 3

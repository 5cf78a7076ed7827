from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from pantheraml.base.errors import CheckpointError, StorageError
from pantheraml.checkpoint.store import CheckpointStore


def tensors(value: float, size: int = 4) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": {"a": torch.full((size,), value)}, "optimizer": {"a::codes": torch.ones(3, dtype=torch.uint8)}}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(7, tensors(2.0), {"progress": {"step": 7}})
    loaded = store.load(7)
    assert loaded.state == {"progress": {"step": 7}}
    torch.testing.assert_close(loaded.tensors["weights"]["a"], torch.full((4,), 2.0))
    assert loaded.tensors["optimizer"]["a::codes"].dtype == torch.uint8
    assert store.steps() == [7]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damage_is_found_before_it_is_used(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, tensors(1.0), {})
    weights = path / "weights.safetensors"
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        weights.unlink()
    else:
        (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        store.load(1)


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 7):
        store.save(step, tensors(step), {})
    assert store.prune(keep=2, also={3}) == [1, 2, 4]
    assert store.steps() == [3, 5, 6]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000005", "step-00000006"]


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(1.0), {})
    partial = tmp_path / ".partial-step-00000002"
    partial.mkdir()
    (tmp_path / "step-00000003").mkdir()  # no manifest: not committed
    assert store.steps() == [1]
    store.save(2, tensors(2.0), {})
    assert store.steps() == [1, 2]
    assert not partial.exists()


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(1.0, size=100), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StorageError):
            store.save(2, tensors(2.0, size=100_000), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.steps() == [1]
    assert store.load(1).tensors["weights"]["a"][0] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, tensors(1.0), {"x": 1})
    listed = set(json.loads((path / "manifest.json").read_text())["files"])
    assert listed == {p.name for p in path.iterdir()} - {"manifest.json"}

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pantheraml.base.errors import DamagedCheckpointError, StorageError
from pantheraml.checkpoint.sharded_files import Groups, unsharded
from pantheraml.checkpoint.store import CheckpointStore


def tensors(value: float, size: int = 4) -> Groups:
    weights, codes = {"a": torch.full((size,), value)}, {"a::codes": torch.ones(3, dtype=torch.uint8)}
    return {"weights": unsharded(weights), "optimizer": unsharded(codes)}


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(7, tensors(2.0), {"progress": {"step": 7}})
    loaded = store.load(7)
    assert loaded.state == {"progress": {"step": 7}}
    assert loaded.tensors.group("weights") == {"a": (torch.Size([4]), torch.float32)}
    assert loaded.tensors.read_group("weights")["a"].tolist() == [2.0] * 4
    assert loaded.tensors.read_group("optimizer")["a::codes"].dtype == torch.uint8
    assert store.steps() == [7]


def flip_last_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flip": (lambda folder: flip_last_bit(folder / "weights.safetensors"), "fails its checksum"),
    "flip in state": (lambda folder: flip_last_bit(folder / "state.json"), "fails its checksum"),
    "cut": (lambda folder: (folder / "weights.safetensors").write_bytes(b"x"), "has 1 bytes, not"),
    "file gone": (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "manifest cut": (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "manifest empty": (lambda folder: (folder / "manifest.json").write_text("[]"), "does not list"),
    "manifest gone": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    "manifest of another kind": (lambda folder: (folder / "manifest.json").write_text('{"version": 9}'), "version 9"),
}


@pytest.mark.seed("S4-138")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_detected_on_load(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    inflict, words = DAMAGES[damage]
    inflict(store.save(1, tensors(1.0), {}))
    with pytest.raises(DamagedCheckpointError, match=f"step-00000001 is damaged: .*{words}"):
        store.load(1)


def test_every_flipped_manifest_bit_is_detected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    manifest = store.save(1, tensors(1.0), {"x": 1}) / "manifest.json"
    original = manifest.read_bytes()
    blanks = set(b" \n\t\r")
    for index in range(len(original)):
        changed = bytearray(original)
        changed[index] ^= 4
        manifest.write_bytes(changed)
        if {original[index], changed[index]} <= blanks:
            store.load(1)
        else:
            with pytest.raises(DamagedCheckpointError):
                store.load(1)


def test_a_damaged_checkpoint_can_be_set_aside_and_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, tensors(step), {})
    for _ in range(2):  # a second one of the same step replaces the first
        aside = store.set_aside(2)
        assert (aside / "weights.safetensors").is_file()
        assert store.steps() == [1]
        store.save(2, tensors(2.0), {})
    assert store.load(2).tensors.read_group("weights")["a"][0] == 2.0


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
    assert store.steps() == [1]
    store.save(2, tensors(2.0), {})
    assert store.steps() == [1, 2]
    assert not partial.exists()


def test_a_full_disk_keeps_the_last_checkpoint_intact(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(1.0, size=100), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StorageError, match="the disk is full"):
            store.save(2, tensors(2.0, size=100_000), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.steps() == [1]
    assert store.load(1).tensors.read_group("weights")["a"][0] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="Saving step-00000001 failed"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, tensors(1.0), {})


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, tensors(1.0), {"x": 1})
    listed = set(json.loads((path / "manifest.json").read_text())["files"])
    assert listed == {p.name for p in path.iterdir()} - {"manifest.json"}


def test_store_does_not_recreate_a_missing_run_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        CheckpointStore(tmp_path / "run" / "checkpoints").save(1, tensors(1.0), {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../secret", "{tmp}/secret", "sub/../../secret"])
def test_a_manifest_cannot_name_files_outside_the_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not part of the checkpoint")
    store = CheckpointStore(tmp_path / "checkpoints")
    manifest = store.save(1, tensors(1.0), {}) / "manifest.json"
    known = json.loads(manifest.read_text())
    known["files"][name.format(tmp=tmp_path)] = {"bytes": 3, "blake2b": "0"}
    manifest.write_text(json.dumps(known))
    with pytest.raises(DamagedCheckpointError, match="lists files outside of the checkpoint"):
        store.load(1)


def test_a_symlink_is_not_accepted_as_a_checkpoint_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    weights = store.save(1, tensors(1.0), {}) / "weights.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpointError, match=r"weights\.safetensors is missing"):
        store.load(1)

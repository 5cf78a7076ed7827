"""A model folder is untrusted data: nothing outside it is read, and nothing is unpickled."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pantheraml.base.errors import ModelError
from pantheraml.models.loader import check_model, load_model, load_tokenizer, weights_fingerprint
from pantheraml.specs.train import ModelConfig

HERE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
SECRET = "root:$6$very-secret-hash:19000:0:99999:7:::"


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))


def index_all_as(folder: Path, name: str, *, index: str = "model.safetensors.index.json") -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}))


def assert_rejected(folder: Path, match: str, **settings: Any) -> None:
    config = ModelConfig.model_validate({"path": str(folder), **settings})
    for use in (check_model, weights_fingerprint, lambda config: load_model(config, **HERE)):
        with pytest.raises(ModelError, match=match) as caught:
            use(config)
        assert "secret" not in str(caught.value)


def test_a_safetensors_index_may_not_name_a_pickle(folder: Path, tmp_path: Path) -> None:
    index_all_as(folder, "shard.bin")
    (folder / "model.safetensors").unlink()
    torch.save(Trap(tmp_path / "unpickled"), folder / "shard.bin")
    assert_rejected(folder, r"names 'shard.bin', which is not a \.safetensors file")
    assert_rejected(folder, r"names 'shard.bin', which is not a \.safetensors file", allow_pickle=True)
    assert not (tmp_path / "unpickled").exists()


def test_pickled_weights_run_no_code_even_if_allowed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(Trap(tmp_path / "unpickled"), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="objects other than tensors"):
        load_model(ModelConfig(path=str(folder), allow_pickle=True), **HERE)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    "how", ["../other/x.safetensors", "{tmp}/other/x.safetensors", "sub/../../other/x.safetensors"]
)
def test_an_index_may_not_name_files_outside_the_folder(how: str, folder: Path, tmp_path: Path) -> None:
    name = how.format(tmp=tmp_path)
    index_all_as(folder, name)
    (tmp_path / "other").mkdir()
    shutil.move(folder / "model.safetensors", tmp_path / "other" / "x.safetensors")
    assert_rejected(folder, "is outside the model folder")


@pytest.mark.parametrize("value", [7, None, ["x"], {"a": 1}])
def test_an_invalid_index_is_an_error(value: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": value}}))
    assert_rejected(folder, "weight index")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_symlinks_may_not_point_outside(name: str, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(os.path.relpath(secret, folder))
    assert_rejected(folder, f"{name} is a symlink that points outside it")
    with pytest.raises(ModelError, match="points outside"):
        load_tokenizer(ModelConfig(path=str(folder)))
    with pytest.raises(ModelError, match="points outside"):
        load_tokenizer(ModelConfig(path="nothing", tokenizer=str(folder)))


def test_symlinks_inside_and_a_symlinked_folder_are_allowed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    (tmp_path / "current").symlink_to(folder)
    load_model(ModelConfig(path=str(tmp_path / "current")), **HERE)
    (folder / "loop.json").symlink_to("loop.json")
    assert_rejected(folder, "loop.json is a symlink that points outside it")


def test_hub_snapshots_may_link_to_their_blobs(folder: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repo / "snapshots" / "0123abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    load_model(ModelConfig(path=str(snapshot)), **HERE)
    (snapshot / "notes.txt").symlink_to("../../refs/main")
    assert_rejected(snapshot, "notes.txt is a symlink that points outside it")


def test_file_contents_are_not_in_error_messages(folder: Path) -> None:
    config, header = ModelConfig(path=str(folder)), json.dumps({"weight": SECRET})
    framed = struct.pack("<Q", len(header)) + header.encode()
    for name, content in (("model.safetensors", SECRET.encode()), ("model.safetensors", framed),
                          ("config.json", SECRET.encode()), ("tokenizer.json", SECRET.encode())):  # fmt: skip
        (folder / name).write_bytes(content)
        for use in (load_tokenizer,) if name == "tokenizer.json" else (check_model, lambda c: load_model(c, **HERE)):
            with pytest.raises(ModelError) as caught:
                use(config)
            assert "secret" not in str(caught.value)


def test_transformers_is_not_redirected_to_other_files(folder: Path, tmp_path: Path) -> None:
    """When it loads the weights itself, it follows an adapter to its base, and config.json to other weights."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["surplus"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    base = shutil.copytree(folder, tmp_path / "elsewhere")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base)}))
    from pantheraml.models import loader
    from pantheraml.models.checkpoint_mapping import CannotStream

    def cannot(*arguments: Any, **others: Any) -> Any:
        raise CannotStream("a test says so")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "stream_model", cannot)
        with pytest.raises(ModelError, match="it also contains an adapter"):
            load_model(ModelConfig(path=str(folder)), **HERE)
        (folder / "adapter_config.json").unlink()
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "transformers_weights": "other.safetensors"}))
        with pytest.raises(ModelError, match="transformers_weights"):
            load_model(ModelConfig(path=str(folder)), **HERE)

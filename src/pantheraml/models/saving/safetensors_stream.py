"""Write safetensors shards one tensor after the other; the library itself needs a whole file in memory.

The format: the length of the header as 8 bytes, the header as JSON (name -> dtype, shape and byte range), the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pantheraml.models.saving.file_tensors import TensorGroup

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
SHARD_BYTES = 5_000_000_000


def write_shards(folder: Path, groups: Sequence[TensorGroup], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or several shards of at most `shard_bytes` (but at least one group) and an index."""
    shards = _split(groups, shard_bytes)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        weight_map |= {key: name for group in shard for key in group.metas}
    index = {"metadata": {"total_size": sum(map(_size, groups))}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _size(group: TensorGroup) -> int:
    return sum(meta.nbytes for meta in group.metas.values())


def _split(groups: Sequence[TensorGroup], shard_bytes: int) -> list[list[TensorGroup]]:
    shards: list[list[TensorGroup]] = [[]]
    filled = 0
    for group in groups:
        if shards[-1] and filled + _size(group) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += _size(group)
    return shards


def _write_file(path: Path, groups: Sequence[TensorGroup]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for group in groups:
        for name, meta in group.metas.items():
            end = start + meta.nbytes
            header[name] = {"dtype": _NAMES[meta.dtype], "shape": list(meta.shape), "data_offsets": [start, end]}
            start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of 8, as the library writes them
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for group in groups:
            _write_group(file, group.metas, group.read())


def _write_group(file: Any, metas: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, meta in metas.items():
        tensor = tensors[name]
        assert (tensor.shape, tensor.dtype) == (meta.shape, meta.dtype), name
        tensor.reshape(-1).view(torch.uint8).numpy().tofile(file)

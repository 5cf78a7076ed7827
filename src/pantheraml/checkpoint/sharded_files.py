"""Sharded tensor files: each rank writes its own shards, and any other sharding can be read back (resharding).

The files are safetensors in the layout of torch.distributed.checkpoint (DCP), whose load planner maps requested regions
to saved shards. Writing is done here because DCP's writer assembles a rank's file in memory, which would take that
rank's shards a second time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pantheraml.base.errors import DamagedCheckpointError

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class TensorShard:
    """A rectangular region of a tensor, and its offset in the full tensor."""

    values: Tensor
    offsets: tuple[int, ...]


Groups = Mapping[str, Mapping[str, TensorShard]]
"""Checkpoint group (`weights`, ...) -> tensor name -> this rank's shard."""


def unsharded(tensors: Mapping[str, Tensor]) -> dict[str, TensorShard]:
    return {name: TensorShard(tensor, (0,) * tensor.ndim) for name, tensor in tensors.items()}


def write_shards(folder: Path, groups: Groups, *, rank: int | None) -> list[Path]:
    """Write one file per group: `weights.safetensors`, or `weights-00003.safetensors` for rank 3.

    A rank without shards of a group writes no file for it.
    """
    files = []
    for group, shards in groups.items():
        if rank is not None and not shards:
            continue
        file = folder / (f"{group}{SUFFIX}" if rank is None else f"{group}-{rank:05d}{SUFFIX}")
        offsets = {name: {"saved_offsets": list(shard.offsets)} for name, shard in shards.items()}
        save_file(
            {name: shard.values.detach().contiguous() for name, shard in shards.items()},
            file,
            metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"},
        )
        files.append(file)
    return files


class TensorInfo(NamedTuple):
    """Shape and dtype of a saved tensor."""

    shape: torch.Size
    dtype: torch.dtype


class SavedTensors:
    """The tensors of a checkpoint, read on demand. Names are unique across groups."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """`files` are the checkpoint's file names, already verified."""
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata: Metadata = self._reader.read_metadata()
        self._groups: dict[str, dict[str, TensorInfo]] = {}
        for file in files:
            if file.endswith(SUFFIX):
                group = self._groups.setdefault(file.removesuffix(SUFFIX).partition("-")[0], {})
                with safe_open(folder / file, framework="pt") as opened:
                    group |= {name: self._info(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)

    def group(self, name: str) -> Mapping[str, TensorInfo]:
        return self._groups.get(name, {})

    def read_into(self, targets: Mapping[str, TensorShard]) -> None:
        """Fill `targets` in place, reading only the regions they cover."""
        planner = _ShardsPlanner(targets)
        planner.set_up_planner({}, self._metadata, is_coordinator=False)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()

    def read_group(self, name: str) -> dict[str, Tensor]:
        """Read a whole group of full tensors; for small groups."""
        tensors = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in self.group(name).items()}
        self.read_into(unsharded(tensors))
        return tensors

    def _info(self, name: str) -> TensorInfo:
        saved = self._metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        return TensorInfo(saved.size, saved.properties.dtype)


class _ShardsPlanner(DefaultLoadPlanner):
    """Load planner for plain tensors that are regions of saved ones."""

    def __init__(self, targets: Mapping[str, TensorShard]) -> None:
        super().__init__()
        self._targets = targets

    def create_local_plan(self) -> LoadPlan:
        items = []
        assert self.metadata is not None, "set_up_planner was called"
        for name, shard in self._targets.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            region = ChunkStorageMetadata(torch.Size(shard.offsets), shard.values.shape)
            reads = create_read_items_for_chunk_list(name, saved, [region])
            if sum(math.prod(item.lengths) for item in reads) != shard.values.numel():
                raise DamagedCheckpointError(
                    f"The checkpoint has missing or overlapping shards of `{name}`.",
                    fix="Resume from another checkpoint.",
                )
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._targets[index.fqn].values.detach()

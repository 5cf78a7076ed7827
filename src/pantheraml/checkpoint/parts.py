"""Tensors in files, whole or in parts that lie in several: written by each rank for itself, read in any other division.

The files are safetensors in the form of torch.distributed.checkpoint, whose planner finds the saved parts that make up
a wanted one. They are written here, because torch's writer puts a rank's file together in memory, which would take that
rank's share a second time.
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
class Part:
    """Values of a tensor, and the place of the first of them in it."""

    values: Tensor
    offsets: tuple[int, ...]


Groups = Mapping[str, Mapping[str, Part]]
"""Group of a checkpoint (`weights`, ...) -> name -> what a rank has of that tensor."""


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    return {name: Part(tensor, (0,) * tensor.ndim) for name, tensor in tensors.items()}


def write_parts(folder: Path, groups: Groups, *, rank: int | None) -> list[Path]:
    """One file for each group, named after it and, unless it is None, after the rank; none where there is nothing."""
    files = []
    for group, parts in groups.items():
        if rank is not None and not parts:
            continue
        file = folder / (f"{group}{SUFFIX}" if rank is None else f"{group}-{rank:05d}{SUFFIX}")
        places = {name: {"saved_offsets": list(part.offsets)} for name, part in parts.items()}
        save_file(
            {name: part.values.detach().contiguous() for name, part in parts.items()},
            file,
            metadata={"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"},
        )
        files.append(file)
    return files


class Saved(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class SavedTensors:
    """The tensors in a checkpoint's files. Names are unique over all groups."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """`files`: names of those to be read, whole ones: they were checked."""
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata: Metadata = self._reader.read_metadata()
        self._groups: dict[str, dict[str, Saved]] = {}
        for file in files:
            if file.endswith(SUFFIX):
                group = self._groups.setdefault(file.removesuffix(SUFFIX).partition("-")[0], {})
                with safe_open(folder / file, framework="pt") as opened:
                    group |= {name: self._saved(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)

    def group(self, name: str) -> Mapping[str, Saved]:
        return self._groups.get(name, {})

    def read_into(self, wanted: Mapping[str, Part]) -> None:
        """Fill the parts of tensors that are `wanted`; nothing else is read."""
        planner = _PartsPlanner(wanted)
        planner.set_up_planner({}, self._metadata, is_coordinator=False)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()

    def read_group(self, name: str) -> dict[str, Tensor]:
        """All of a group, whole: for what is small."""
        tensors = {key: torch.empty(saved.shape, dtype=saved.dtype) for key, saved in self.group(name).items()}
        self.read_into(whole(tensors))
        return tensors

    def _saved(self, name: str) -> Saved:
        found = self._metadata.state_dict_metadata[name]
        assert isinstance(found, TensorStorageMetadata)
        return Saved(found.size, found.properties.dtype)


class _PartsPlanner(DefaultLoadPlanner):
    """Finds what to read for plain tensors that are parts of saved ones."""

    def __init__(self, wanted: Mapping[str, Part]) -> None:
        super().__init__()
        self._wanted = wanted

    def create_local_plan(self) -> LoadPlan:
        items = []
        assert self.metadata is not None, "it was set up"
        for name, part in self._wanted.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            region = ChunkStorageMetadata(torch.Size(part.offsets), part.values.shape)
            found = create_read_items_for_chunk_list(name, saved, [region])
            if sum(math.prod(item.lengths) for item in found) != part.values.numel():
                raise DamagedCheckpointError(
                    f"The checkpoint does not hold all of `{name}`, or some of it twice.",
                    todo="Resume from another checkpoint.",
                )
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._wanted[index.fqn].values.detach()

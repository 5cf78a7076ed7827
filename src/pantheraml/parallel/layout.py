"""Where a process stands among its peers: its place in every dimension, and the meshes by name.

A `Layout` is made once per run, by all ranks together. A run of one process has one too, without a mesh, so that no
caller asks whether there are peers before it asks what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from pantheraml.specs.parallel import DIMENSIONS, ParallelDims


@dataclass(frozen=True)
class Layout:
    dims: ParallelDims
    place: dict[str, int]
    """Dimension -> this process's index in it."""
    mesh: DeviceMesh | None
    """Of all processes, with the names DIMENSIONS; None in a run of one process."""
    timeout: timedelta | None = None
    """How long its collectives may take; None: as torch has it, which knows nothing of what the main group was told."""

    @property
    def data_rank(self) -> int:
        """Which share of a global batch is this process's."""
        return self.place["replicate"] * self.dims.shard + self.place["shard"]

    @property
    def stage_ranks(self) -> int:
        """How many processes hold the layers that this one holds, in whole or in part."""
        return self.dims.world_size // self.dims.pipeline

    @property
    def counts_loss(self) -> bool:
        """Whether the loss computed here is to be added up: peers that compute the same one leave that to the first."""
        last_stage = self.place["pipeline"] == self.dims.pipeline - 1
        return last_stage and self.place["tensor"] == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether the samples of this process are to be counted here; one process for each share of a batch says so."""
        return self.counts_loss and self.place["context"] == 0

    def submesh(self, *names: str) -> DeviceMesh:
        """The peers that differ from this process in `names` only; several names are laid out as one dimension."""
        assert self.mesh is not None, "a run of one process has no mesh"
        if len(names) == 1:
            return self.mesh[names[0]]
        flat = self.mesh[names]._flatten("_".join(names))
        _allow(self.timeout, flat)
        return flat

    def group(self, *names: str) -> dist.ProcessGroup:
        return self.submesh(*names).get_group()


ALONE = Layout(ParallelDims(), dict.fromkeys(DIMENSIONS, 0), None)
"""Of a run of one process."""


def make_layout(dims: ParallelDims, device_type: str, *, timeout: timedelta | None = None) -> Layout:
    """Collective over all processes of an initialised process group, if there is more than one."""
    if dims.world_size == 1:
        return ALONE
    dims.check(dist.get_world_size())
    mesh = init_device_mesh(device_type, dims.degrees, mesh_dim_names=DIMENSIONS)
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "every process of the group is in the mesh"
    _allow(timeout, mesh)
    return Layout(dims, dict(zip(DIMENSIONS, coordinates, strict=True)), mesh, timeout)


def _allow(timeout: timedelta | None, mesh: DeviceMesh) -> None:
    """A mesh has no option for it: its groups begin with torch's 10 minutes on GPUs, and 30 elsewhere."""
    if timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)

"""A rank's coordinates in the device mesh, and process groups by dimension name.

A `Layout` is built once per run, by all ranks together. A single-process run has one without a mesh, so that callers
need no special case.
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
    coordinates: dict[str, int]
    """Dimension -> this rank's index in it."""
    mesh: DeviceMesh | None
    """Mesh of all ranks with dimension names DIMENSIONS; None in a single-process run."""
    timeout: timedelta | None = None
    """Timeout of its collectives; None: torch's default, since mesh groups do not inherit the default group's."""

    @property
    def data_rank(self) -> int:
        """Index of this rank's shard of the global batch."""
        return self.coordinates["replicate"] * self.dims.shard + self.coordinates["shard"]

    @property
    def stage_ranks(self) -> int:
        """Number of ranks in this pipeline stage."""
        return self.dims.world_size // self.dims.pipeline

    @property
    def counts_loss(self) -> bool:
        """True on one of the ranks that compute the same loss: last stage, first tensor-parallel rank."""
        last_stage = self.coordinates["pipeline"] == self.dims.pipeline - 1
        return last_stage and self.coordinates["tensor"] == 0

    @property
    def counts_tokens(self) -> bool:
        """True on one rank per batch shard, so that its samples and tokens are counted once."""
        return self.counts_loss and self.coordinates["context"] == 0

    def submesh(self, *names: str) -> DeviceMesh:
        """Return the submesh along `names`, flattened to one dimension if there are several."""
        assert self.mesh is not None, "a single-process run has no mesh"
        if len(names) == 1:
            return self.mesh[names[0]]
        flat = self.mesh[names]._flatten("_".join(names))
        _set_timeout(self.timeout, flat)
        return flat

    def group(self, *names: str) -> dist.ProcessGroup:
        return self.submesh(*names).get_group()


ALONE = Layout(ParallelDims(), dict.fromkeys(DIMENSIONS, 0), None)
"""Layout of a single-process run."""


def make_layout(dims: ParallelDims, device_type: str, *, timeout: timedelta | None = None) -> Layout:
    """Build the mesh. Collective over the default process group if there is more than one rank."""
    if dims.world_size == 1:
        return ALONE
    dims.check(dist.get_world_size())
    mesh = init_device_mesh(device_type, dims.degrees, mesh_dim_names=DIMENSIONS)
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "every rank of the group is in the mesh"
    _set_timeout(timeout, mesh)
    return Layout(dims, dict(zip(DIMENSIONS, coordinates, strict=True)), mesh, timeout)


def _set_timeout(timeout: timedelta | None, mesh: DeviceMesh) -> None:
    """Set the timeout of a mesh's groups; `init_device_mesh` has no option for it (default: 10 min NCCL, 30 gloo)."""
    if timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)

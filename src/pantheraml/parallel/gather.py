"""Gather sharded tensors to full ones and back, for files that are independent of the parallel layout.

Full tensors exist one at a time, so the extra memory per rank is the largest tensor, not the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pantheraml.parallel.json_gather import all_gather_json
from pantheraml.parallel.layout import Layout

NamedTensors = Sequence[tuple[str, Tensor]]


class _Entry(NamedTuple):
    """A tensor of the model and the first pipeline stage that holds it."""

    stage: int
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def to_plain(self) -> list[Any]:
        return [self.stage, self.name, list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_plain(cls, fields: list[Any]) -> _Entry:
        stage, name, shape, dtype_name = fields
        dtype = getattr(torch, dtype_name)
        assert isinstance(dtype, torch.dtype), dtype_name
        return cls(stage, name, torch.Size(shape), dtype)


def full_tensors(
    named: NamedTensors, layout: Layout, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model, unsharded and on the CPU, one at a time on rank 0; nothing on other ranks.

    Collective: all ranks must exhaust it, each passing every tensor that it holds a shard of. Pipeline stages send
    their tensors through `group`, a gloo group of all ranks; a name that two stages have is yielded once, from the
    first. A tensor that is already unsharded on rank 0's CPU is yielded without a copy.
    """
    own, own_stage = dict(named), layout.coordinates["pipeline"]
    leads_stage = all(index == 0 for dimension, index in layout.coordinates.items() if dimension != "pipeline")
    for stage, name, shape, dtype in _inventory(named, layout, group):
        full = _full_tensor(own[name]) if stage == own_stage else None
        if not leads_stage:
            continue
        if own_stage == 0:
            if full is None:
                yield name, _receive(_first_rank(stage, layout), shape, dtype, group)
            else:
                yield name, full.cpu()
        elif full is not None:
            dist.send(full.cpu(), dst=0, group=group)


def load_full(named: NamedTensors, tensors: Mapping[str, Tensor]) -> None:
    """Copy this rank's shard of each full tensor into the tensor of the same name. No communication."""
    with torch.no_grad():
        for name, tensor in named:
            full = tensors[name]
            assert full.shape == tensor.shape, f"{name}: {tuple(full.shape)} does not fit {tuple(tensor.shape)}"
            local_tensor(tensor).copy_(local_slice(full, tensor))


def local_slice(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of the full tensor `whole`, sharded like `like`."""
    for dimension, (start, size) in enumerate(zip(local_offsets(like), local_tensor(like).shape, strict=True)):
        whole = whole.narrow(dimension, start, size)
    return whole


def local_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Return the offsets of this rank's shard in the full tensor."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert place is not None, "this rank is in the mesh of its own parameters"
        # Tensor parallelism (rightmost mesh dimension) shards first; FSDP shards the result.
        for dimension in reversed(range(mesh.ndim)):
            placement = tensor.placements[dimension]
            if placement.is_replicate():
                continue
            rows: int = placement.dim  # type: ignore[attr-defined]  # Shard and its strided kind have no base with it
            length = -(-sizes[rows] // mesh.size(dimension))
            start = min(place[dimension] * length, sizes[rows])  # with more ranks than rows, some shards are empty
            offsets[rows] += start
            sizes[rows] = min(length, sizes[rows] - start)
        assert tuple(sizes) == tensor.to_local().shape, "sharded like torch.chunk"
    return tuple(offsets)


def dedup_shards(named: NamedTensors, group: dist.ProcessGroup | None, ranks: int) -> list[str]:
    """Return the names of tensors whose shard is on no lower rank, so that each distinct shard has exactly one owner.

    Collective over `group` of `ranks` ranks.
    """
    mine = [(name, local_offsets(tensor)) for name, tensor in named if local_tensor(tensor).numel() > 0]
    if ranks == 1:
        return [name for name, _ in mine]
    before = all_gather_json(mine, group)[: dist.get_rank(group)]
    earlier = {(name, tuple(offsets)) for theirs in before for name, offsets in theirs}
    return [name for name, offsets in mine if (name, offsets) not in earlier]


def shard_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Wrap the local shard of an elementwise companion of `parameter` (an optimizer moment) as a DTensor sharded alike.

    Shares memory with `local`.
    """
    if not isinstance(parameter, DTensor):
        return local
    assert local.shape == parameter.to_local().shape, "one value per parameter element"
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _inventory(named: NamedTensors, layout: Layout, group: dist.ProcessGroup | None) -> list[_Entry]:
    """List all tensors of all stages, in the same order on every rank."""
    stage = layout.coordinates["pipeline"]
    entries = [_Entry(stage, name, tensor.shape, tensor.dtype) for name, tensor in named]
    if layout.dims.pipeline == 1:
        return entries
    assert group is not None, "stages of a pipeline send their tensors through a group of all ranks"
    everyone = all_gather_json([entry.to_plain() for entry in entries], group)
    found: dict[str, _Entry] = {}
    for number in range(layout.dims.pipeline):
        for entry in map(_Entry.from_plain, everyone[_first_rank(number, layout)]):
            found.setdefault(entry.name, entry)
    return list(found.values())


def _first_rank(stage: int, layout: Layout) -> int:
    return stage * layout.stage_ranks


def _full_tensor(tensor: Tensor) -> Tensor:
    """All-gather a DTensor, over mesh dimensions in the reverse order of `local_slice`.

    DTensor's own `full_tensor` crashes the process on CUDA tensors with the gloo backend.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.contiguous()
    mesh, local = tensor.device_mesh, tensor.to_local()
    for dimension in range(mesh.ndim):
        placement = tensor.placements[dimension]
        if placement.is_replicate():
            continue
        rows: int = placement.dim  # type: ignore[attr-defined]  # Shard and its strided kind have no base with it
        length = _length_before(tensor, dimension, rows)
        local = _all_gather_dim(local, rows, length, mesh.get_group(dimension))
    return local


def _length_before(tensor: DTensor, dimension: int, rows: int) -> int:
    """Return the length of `rows` before mesh `dimension` sharded it, i.e. after the mesh dimensions on its right."""
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank is in the mesh of its own parameters"
    length = tensor.shape[rows]
    for right in reversed(range(dimension + 1, tensor.device_mesh.ndim)):
        if tensor.placements[right].is_shard(rows):
            length = _piece(length, tensor.device_mesh.size(right), place[right])
    return length


def _piece(length: int, pieces: int, index: int) -> int:
    """Return the size of chunk `index` of `torch.chunk(length, pieces)`."""
    each = -(-length // pieces)
    return max(0, min(length - index * each, each))


def _all_gather_dim(local: Tensor, rows: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along dimension `rows`, padding shorter chunks for transport."""
    ranks = dist.get_world_size(group)
    each = -(-length // ranks)
    sent = local.movedim(rows, 0).contiguous()
    if len(sent) < each:
        sent = torch.cat([sent, sent.new_zeros(each - len(sent), *sent.shape[1:])])
    pieces = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather([_bytes(piece) for piece in pieces], _bytes(sent), group=group)
    unpadded = [piece[: _piece(length, ranks, index)] for index, piece in enumerate(pieces)]
    return torch.cat(unpadded).movedim(0, rows).contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """View 1-byte dtypes (fp8) as uint8, which every backend can send."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _receive(source: int, shape: torch.Size, dtype: torch.dtype, group: dist.ProcessGroup | None) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    dist.recv(whole, src=source, group=group)
    return whole


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; any other tensor as is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

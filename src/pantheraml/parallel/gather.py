"""From sharded tensors to whole ones and back, to write and read files that know nothing of any sharding.

Whole tensors exist one at a time: what a rank needs beside its own part is the largest of them, not the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pantheraml.parallel.exchange import all_gather_json
from pantheraml.parallel.layout import Layout

NamedTensors = Sequence[tuple[str, Tensor]]


class _Entry(NamedTuple):
    """A tensor of the model, and the first pipeline stage that has it."""

    stage: int
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def to_plain(self) -> list[Any]:
        return [self.stage, self.name, list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_plain(cls, told: list[Any]) -> _Entry:
        stage, name, shape, dtype = told
        known = getattr(torch, dtype)
        assert isinstance(known, torch.dtype), dtype
        return cls(stage, name, torch.Size(shape), known)


def full_tensors(
    named: NamedTensors, layout: Layout, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model, whole and on the CPU, one at a time on rank 0; nothing on other ranks.

    A collective: all ranks run to its end, each with every tensor that it holds a part of. Stages of a pipeline hold
    different ones and send theirs through `group`, a gloo group of all ranks; a name that two stages have comes once,
    from the first of them. A tensor that is whole on rank 0's CPU already is given out as it is, not copied.
    """
    own, own_stage = dict(named), layout.place["pipeline"]
    leads_stage = all(index == 0 for dimension, index in layout.place.items() if dimension != "pipeline")
    for stage, name, shape, dtype in _inventory(named, layout, group):
        whole = _whole(own[name]) if stage == own_stage else None
        if not leads_stage:
            continue
        if own_stage == 0:
            if whole is None:
                yield name, _receive(_first_rank(stage, layout), shape, dtype, group)
            else:
                yield name, whole.cpu()
        elif whole is not None:
            dist.send(whole.cpu(), dst=0, group=group)


def load_full(named: NamedTensors, tensors: Mapping[str, Tensor]) -> None:
    """The inverse, on every rank by itself: each tensor takes its part of the whole one with its name."""
    with torch.no_grad():
        for name, tensor in named:
            whole = tensors[name]
            assert whole.shape == tensor.shape, f"{name}: {tuple(whole.shape)} does not fit {tuple(tensor.shape)}"
            held(tensor).copy_(own_part(whole, tensor))


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `whole` where it is spread in the way `like` is."""
    for dimension, (start, size) in enumerate(zip(own_offsets(like), held(like).shape, strict=True)):
        whole = whole.narrow(dimension, start, size)
    return whole


def own_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Where in the whole tensor the part begins that this rank holds."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert place is not None, "this rank is in the mesh of its own parameters"
        # Tensor parallelism, on the right in a mesh, cuts first, and FSDP then cuts what that has left.
        for dimension in reversed(range(mesh.ndim)):
            placement = tensor.placements[dimension]
            if placement.is_replicate():
                continue
            rows: int = placement.dim  # type: ignore[attr-defined]  # Shard and its strided kind have no base with it
            length = -(-sizes[rows] // mesh.size(dimension))
            start = min(place[dimension] * length, sizes[rows])  # none are left where ranks are more than rows
            offsets[rows] += start
            sizes[rows] = min(length, sizes[rows] - start)
        assert tuple(sizes) == tensor.to_local().shape, "it is cut as torch cuts"
    return tuple(offsets)


def first_holder(named: NamedTensors, group: dist.ProcessGroup | None, ranks: int) -> list[str]:
    """Names of the tensors of which no lower rank holds the same part as this one: among `ranks` that hold copies and
    parts of a model, every part has one. A collective of `group`."""
    mine = [(name, own_offsets(tensor)) for name, tensor in named if held(tensor).numel() > 0]
    if ranks == 1:
        return [name for name, _ in mine]
    before = all_gather_json(mine, group)[: dist.get_rank(group)]
    earlier = {(name, tuple(offsets)) for theirs in before for name, offsets in theirs}
    return [name for name, offsets in mine if (name, offsets) not in earlier]


def spread_like(local: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that belongs to `parameter` value by value (a moment) as one that can be gathered
    and loaded as the parameter can. The memory is `local`'s."""
    if not isinstance(parameter, DTensor):
        return local
    assert local.shape == parameter.to_local().shape, "a value for each of the parameter's"
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _inventory(named: NamedTensors, layout: Layout, group: dist.ProcessGroup | None) -> list[_Entry]:
    """All tensors of all stages, in the order in which every rank comes to them."""
    stage = layout.place["pipeline"]
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


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor, put together again in the order opposite to `own_part`'s.

    Not by DTensor's own `full_tensor`: its collectives end the process on CUDA tensors where the backend is gloo.
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
        local = _joined(local, rows, length, mesh.get_group(dimension))
    return local


def _length_before(tensor: DTensor, dimension: int, rows: int) -> int:
    """How long `rows` is in what the mesh's `dimension` cuts: what those on its right have left on this rank."""
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank is in the mesh of its own parameters"
    length = tensor.shape[rows]
    for right in reversed(range(dimension + 1, tensor.device_mesh.ndim)):
        if tensor.placements[right].is_shard(rows):
            length = _piece(length, tensor.device_mesh.size(right), place[right])
    return length


def _piece(length: int, pieces: int, index: int) -> int:
    """The size of one of the pieces that `torch.chunk` cuts a length into."""
    each = -(-length // pieces)
    return max(0, min(length - index * each, each))


def _joined(local: Tensor, rows: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """The pieces of all ranks of a group, side by side along `rows`; shorter ones travel with room behind them."""
    ranks = dist.get_world_size(group)
    each = -(-length // ranks)
    sent = local.movedim(rows, 0).contiguous()
    if len(sent) < each:
        sent = torch.cat([sent, sent.new_zeros(each - len(sent), *sent.shape[1:])])
    pieces = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather([_bytes(piece) for piece in pieces], _bytes(sent), group=group)
    kept = [piece[: _piece(length, ranks, index)] for index, piece in enumerate(pieces)]
    return torch.cat(kept).movedim(0, rows).contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory in a type that every backend can send."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _receive(source: int, shape: torch.Size, dtype: torch.dtype, group: dist.ProcessGroup | None) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    dist.recv(whole, src=source, group=group)
    return whole


def held(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

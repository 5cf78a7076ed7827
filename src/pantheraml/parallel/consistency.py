"""Do ranks that should hold the same weights and gradients still do so?

Each rank sums up the bit patterns of its tensors on the device, and all compare 64 bits; more travels only once there
is a difference. Ranks that drifted apart (a faulty device or link, a rank that missed an update) would train on
without any sign, so drift ends the run and names the rank.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pantheraml.base.errors import DriftError
from pantheraml.parallel.layout import Layout

Named = Sequence[tuple[str, Tensor | None]]
"""Tensors as they lie on this rank. None, a gradient that is not there, differs from any that is."""

CHUNK = 1 << 22
"""Elements that are widened to 64 bits at a time: some 32 MiB for each of three tensors, however large the weights."""

ABSENT = -1

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """An int64 on the tensor's device: the sum, modulo 2^64, of its bit patterns, each times an odd number of its own.

    One changed value always changes the sum, and so do two values of up to 32 bits that change places.
    """
    flat = tensor.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].view(_BITS[flat.element_size()]).long()
        odd = torch.arange(2 * start + 1, 2 * (start + len(bits)), 2, device=flat.device)
        total += (bits * odd).sum()
    return total


def peers_with_copies(
    parameters: Sequence[tuple[str, Tensor]], layout: Layout
) -> list[tuple[dist.ProcessGroup, frozenset[str]]]:
    """Groups of processes that this one holds the same values in common with, and the parameters of which it does.

    A collective of all processes; groups without any parameter are left out.
    """
    dims = layout.dims
    # Sharding cuts weights over the ranks of a sequence, too; otherwise those hold copies.
    copies = ["replicate"] if dims.shard > 1 else ["replicate", "context"]
    whole = {name for name, parameter in parameters if _is_whole(parameter, "tensor")} if dims.tensor > 1 else set()
    found = []
    for dimensions, names in (
        (copies, {name for name, _ in parameters} - whole),
        ([*copies, "tensor"], whole),
    ):
        several = [name for name in dimensions if getattr(dims, name) > 1]
        if several and names:
            found.append((layout.group(*several), frozenset(names)))
    return found


def _is_whole(parameter: Tensor, dimension: str) -> bool:
    """Whether every process along that dimension of the mesh holds all of what any of them holds."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return dimension not in names or parameter.placements[names.index(dimension)].is_replicate()


def check_copies(
    weights: Named, gradients: Named, *, step: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """DriftError on every rank of `group` (None = all), or on none. These ranks should hold copies of the same tensors.

    A collective of the ranks of `group`; `step` is for the message.
    """
    labelled = [(f"the weight {name}", tensor) for name, tensor in weights]
    labelled += [(f"the gradient of {name}", tensor) for name, tensor in gradients]
    labels = [label for label, _ in labelled]
    absent = torch.tensor(ABSENT, device=device)
    sums = torch.stack([absent if tensor is None else checksum(tensor) for _, tensor in labelled])
    same_names = torch.tensor(zlib.crc32("\n".join(labels).encode()), device=device)
    in_short = _gather(torch.stack([same_names, checksum(sums)]), group)
    if in_short.count(in_short[0]) == len(in_short):
        return
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    if len({names for names, _ in in_short}) > 1:
        raise _drift([(names,) for names, _ in in_short], ["the list of parameters"], ranks, step)
    raise _drift(_gather(sums, group), labels, ranks, step)


def _gather(mine: Tensor, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    everyone = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(everyone), mine, group=group)
    return [tuple(row) for row in everyone.tolist()]


def _drift(rows: Sequence[tuple[int, ...]], labels: Sequence[str], ranks: Sequence[int], step: int) -> DriftError:
    """`rows`: what each of `ranks` holds of `labels`, not all the same."""
    (common, holders), *others = Counter(rows).most_common()
    first = next(index for index in range(len(labels)) if len({row[index] for row in rows}) > 1)
    if holders > others[0][1]:
        odd = [rank for rank, row in zip(ranks, rows, strict=True) if row != common]
        what = f"Rank {', '.join(map(str, odd))} no longer holds what the other {holders} rank(s) hold"
    else:
        what = f"Ranks {', '.join(map(str, ranks))} no longer hold the same, and no majority does"
    return DriftError(
        f"{what}; the first difference at step {step} is in {labels[first]}.",
        where=f"step {step}, ranks {', '.join(map(str, ranks))}",
        todo="Check that device's memory and links (nvidia-smi -q, dmesg), leave it out if it is faulty, and resume"
        " from a checkpoint that was saved before.",
    )

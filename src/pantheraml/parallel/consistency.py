"""Detect replicas whose weights or gradients have diverged.

Each rank checksums the bit patterns of its tensors on the device and the ranks compare 64 bits; per-tensor checksums
are exchanged only after a mismatch. Diverged replicas (faulty device or link, missed update) would train on silently,
so a mismatch ends the run and names the rank.
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
"""Local tensors by name. None (no gradient) differs from every tensor."""

CHUNK = 1 << 22
"""Elements widened to 64 bits at a time: about 32 MiB for each of three temporaries, regardless of weight size."""

ABSENT = -1

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 on the device: the sum modulo 2^64 of its bit patterns, each times a distinct odd number.

    A single changed value always changes the sum, and so does swapping two values of up to 32 bits.
    """
    flat = tensor.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].view(_BITS[flat.element_size()]).long()
        odd = torch.arange(2 * start + 1, 2 * (start + len(bits)), 2, device=flat.device)
        total += (bits * odd).sum()
    return total


def replica_groups(
    parameters: Sequence[tuple[str, Tensor]], layout: Layout
) -> list[tuple[dist.ProcessGroup, frozenset[str]]]:
    """Return the process groups within which parameters are replicated, each with the names of those parameters.

    Collective over all ranks; groups without parameters are omitted.
    """
    dims = layout.dims
    # FSDP also shards weights over context-parallel ranks; without it they hold replicas.
    replicated_dims = ["replicate"] if dims.shard > 1 else ["replicate", "context"]
    tp_replicated = (
        {name for name, parameter in parameters if _is_replicated(parameter, "tensor")} if dims.tensor > 1 else set()
    )
    groups = []
    for dimensions, names in (
        (replicated_dims, {name for name, _ in parameters} - tp_replicated),
        ([*replicated_dims, "tensor"], tp_replicated),
    ):
        active = [name for name in dimensions if getattr(dims, name) > 1]
        if active and names:
            groups.append((layout.group(*active), frozenset(names)))
    return groups


def _is_replicated(parameter: Tensor, dimension: str) -> bool:
    """Return True if the parameter is replicated along this mesh dimension."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return dimension not in names or parameter.placements[names.index(dimension)].is_replicate()


def check_replicas(
    weights: Named, gradients: Named, *, step: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Raise DriftError on every rank of `group` (None = all) unless all hold the same tensors.

    Collective over `group`; `step` is for the message.
    """
    labeled = [(f"the weight {name}", tensor) for name, tensor in weights]
    labeled += [(f"the gradient of {name}", tensor) for name, tensor in gradients]
    labels = [label for label, _ in labeled]
    absent = torch.tensor(ABSENT, device=device)
    sums = torch.stack([absent if tensor is None else checksum(tensor) for _, tensor in labeled])
    names_hash = torch.tensor(zlib.crc32("\n".join(labels).encode()), device=device)
    digests = _gather(torch.stack([names_hash, checksum(sums)]), group)
    if digests.count(digests[0]) == len(digests):
        return
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    if len({names for names, _ in digests}) > 1:
        raise _drift([(names,) for names, _ in digests], ["the list of parameters"], ranks, step)
    raise _drift(_gather(sums, group), labels, ranks, step)


def _gather(mine: Tensor, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    everyone = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(everyone), mine, group=group)
    return [tuple(row) for row in everyone.tolist()]


def _drift(rows: Sequence[tuple[int, ...]], labels: Sequence[str], ranks: Sequence[int], step: int) -> DriftError:
    """Build the error from each rank's row of checksums (one per label), which are not all equal."""
    (common, holders), *others = Counter(rows).most_common()
    first = next(index for index in range(len(labels)) if len({row[index] for row in rows}) > 1)
    if holders > others[0][1]:
        odd = [rank for rank, row in zip(ranks, rows, strict=True) if row != common]
        what = f"Rank {', '.join(map(str, odd))} diverged from the other {holders} rank(s)"
    else:
        what = f"Ranks {', '.join(map(str, ranks))} diverged, with no majority"
    return DriftError(
        f"{what}; the first difference at step {step} is in {labels[first]}.",
        where=f"step {step}, ranks {', '.join(map(str, ranks))}",
        fix="Check that device's memory and links (nvidia-smi -q, dmesg), exclude it if it is faulty, and resume from"
        " an earlier checkpoint.",
    )

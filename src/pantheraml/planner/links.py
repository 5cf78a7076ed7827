"""Times of collectives over the links of a cluster.

Ranks are numbered node by node, and dimensions that communicate most are the innermost (see `specs.parallel`), so that
a group of ranks lies in one node, or crosses nodes with as many rings at once as it has neighbors there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pantheraml.specs.parallel import DIMENSIONS, ParallelDims

LATENCY = {2: 8e-6, 4: 17e-6, 8: 30e-6}
"""Seconds of an all-gather's start among that many GPUs of an NVSwitch."""
NODE_LATENCY = {2: 70e-6, 32: 1204e-6}
"""The same over that many nodes."""
NETWORK_SHARE = 0.97
"""Fraction of a network's nominal rate that NCCL reached on 2 to 32 nodes."""


@dataclass(frozen=True)
class Links:
    """Links between the ranks of a run."""

    ranks_per_node: int
    link_gb_s: float | None
    """Within a node, per direction and GPU; None: not known."""
    network_gb_s: float | None = None
    """Bandwidth of a node to others, per direction; None: not known."""

    def bandwidth(self, dims: ParallelDims, dimension: str) -> float | None:
        """Bytes per second at which each rank of a group of that dimension sends; None: not known."""
        stride, size = _place(dims, dimension)
        inside = max(1, min(size, self.ranks_per_node // stride)) if stride < self.ranks_per_node else 1
        if stride * size <= self.ranks_per_node:
            return None if self.link_gb_s is None else self.link_gb_s * 1e9
        if self.network_gb_s is None:
            return None
        rings = max(1, min(self.ranks_per_node, math.prod(dims.degrees)) // inside)
        network = self.network_gb_s * NETWORK_SHARE * 1e9 / rings
        return network if self.link_gb_s is None or inside == 1 else min(network, self.link_gb_s * 1e9)

    def latency(self, dims: ParallelDims, dimension: str) -> float:
        stride, size = _place(dims, dimension)
        if stride * size <= self.ranks_per_node:
            return _between(LATENCY, size)
        return _between(NODE_LATENCY, max(2, stride * size // self.ranks_per_node))

    def gather_seconds(self, dims: ParallelDims, dimension: str, size: float) -> float | None:
        """All-gather or reduce-scatter of tensors of `size` bytes in total."""
        return self._seconds(dims, dimension, size, passes=1)

    def reduce_seconds(self, dims: ParallelDims, dimension: str, size: float) -> float | None:
        """All-reduce of tensors of `size` bytes."""
        return self._seconds(dims, dimension, size, passes=2)

    def _seconds(self, dims: ParallelDims, dimension: str, size: float, *, passes: int) -> float | None:
        ranks, bandwidth = _place(dims, dimension)[1], self.bandwidth(dims, dimension)
        if ranks == 1:
            return 0.0
        if bandwidth is None:
            return None
        return passes * (self.latency(dims, dimension) + size * (ranks - 1) / ranks / bandwidth)


def _place(dims: ParallelDims, dimension: str) -> tuple[int, int]:
    """Distance between neighbors of a group, and its size."""
    at = DIMENSIONS.index(dimension)
    return math.prod(dims.degrees[at + 1 :]), dims.degrees[at]


def _between(known: dict[int, float], count: int) -> float:
    """Interpolate on logarithms; beyond the table, in proportion to the count's growth there."""
    (low, a), *_, (high, b) = known.items()
    slope = math.log(b / a) / math.log(high / low)
    return a * math.exp(slope * math.log(count / low))

"""Expected communication of a step between two processes, from the model's shape: one function per mode.

Bytes are those of full tensors, as `counting` counts them: inputs of a reduction or all-to-all, outputs of a gather.
The all-gather of a few numbers at the end of a step is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

FLOAT = 4
RANK = 16
"""Rank of the adapters."""
LINEAR_LAYERS = 7
"""Linear layers of a decoder layer: query, key, value, output, gate, up, down."""
PROCESSES = 2


@dataclass(frozen=True)
class Case:
    mode: str
    method: str
    passes: int = 1
    """Micro-batches per step and process (pipeline: for all processes)."""
    stages: int = 1
    """Pipeline stages per process."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    """Tokens per step and process; in modes that share tokens, of all processes together."""

    @property
    def activations(self) -> int:
        return FLOAT * self.tokens * self.hidden

    @property
    def layer(self) -> int:
        """Bytes of a layer's weights; keys and values are half as wide as queries, the MLP three times."""
        return FLOAT * (12 * self.hidden**2 + 2 * self.hidden)

    @property
    def around(self) -> int:
        """Bytes of weights outside the layers: embedding, head, last norm."""
        return FLOAT * (2 * self.vocabulary * self.hidden + self.hidden)

    @property
    def adapters(self) -> int:
        """Adapter bytes of a layer: inputs and outputs of its linear layers add up to 19 times `hidden`."""
        return FLOAT * RANK * 19 * self.hidden

    def trained(self, method: str) -> int:
        return self.layers * self.adapters if method == "lora" else self.layers * self.layer + self.around


class Expected:
    """Expected transfers of one process: count and bytes of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.whole_bytes: Counter[str] = Counter()

    def add(self, kind: str, count: int, whole_bytes: int) -> None:
        """Add `count` transfers of `whole_bytes` in total."""
        self.counts[kind] += count
        self.whole_bytes[kind] += whole_bytes


def expected(case: Case, shape: Shape) -> Expected:
    """Expected transfers, with gradients in one bucket and the output head in one chunk."""
    found = Expected()
    _MODES[case.mode](found, case, shape)
    return found


def _ddp(found: Expected, case: Case, shape: Shape) -> None:
    """All-reduce of the gradients, once per step."""
    found.add("all-reduce", 1, shape.trained(case.method))


def _fsdp(found: Expected, case: Case, shape: Shape) -> None:
    """Per micro-batch: all-gather each layer in forward and backward, and the rest once. Per step: reduce-scatter."""
    extra = shape.adapters if case.method == "lora" else 0
    gathered = 2 * shape.layers * (shape.layer + extra) + shape.around
    found.add("all-gather", case.passes * (2 * shape.layers + 1), case.passes * gathered)
    groups = shape.layers + (case.method == "full")
    found.add("reduce-scatter", groups, shape.trained(case.method))


def _tp(found: Expected, case: Case, shape: Shape) -> None:
    """All-reduces of activations: four per layer, one after the embedding, and one before the head in backward.

    One half of each adapter is replicated; the gradients of all of them are all-reduced once per step.
    """
    times = 4 * shape.layers + 2
    if case.method == "lora":
        times -= 1  # nothing before the first layer is trainable, so it needs no input gradient
        found.add("all-reduce", 1, shape.layers * FLOAT * RANK * LINEAR_LAYERS * shape.hidden)
    found.add("all-reduce", case.passes * times, times * shape.activations)
    found.add("all-gather", case.passes, PROCESSES * 2 * FLOAT * shape.tokens)


def _pp(found: Expected, case: Case, shape: Shape) -> None:
    """Sends over every stage boundary, forward and backward; each of two processes sends half of them."""
    boundaries = PROCESSES * case.stages - 1
    found.add("send", case.passes * boundaries, boundaries * shape.activations)


def _cp(found: Expected, case: Case, shape: Shape) -> None:
    """All-to-alls of queries, keys and values, together twice as wide as the outputs, and of the outputs; then as
    DDP."""
    found.add("all-to-all", case.passes * 4 * shape.layers, 2 * shape.layers * 3 * shape.activations // PROCESSES)
    _ddp(found, case, shape)


_MODES = {"ddp": _ddp, "fsdp": _fsdp, "tp": _tp, "pp": _pp, "cp": _cp}

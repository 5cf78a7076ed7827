"""What a step has to send between two processes, from the shape of the model alone: one line for each mode.

Bytes are those of whole tensors, as `counting` counts them: what goes into a reduction or a trade, what comes out of a
gather. The few numbers that processes tell each other at the end of a step are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

FLOAT = 4
RANK = 16
"""Of the adapters."""
LINEAR_LAYERS = 7
"""Of a decoder layer: query, key, value, output, gate, up, down."""
PROCESSES = 2


@dataclass(frozen=True)
class Case:
    mode: str
    method: str
    passes: int = 1
    """Micro-batches of a step for each process (pipeline: for all)."""
    stages: int = 1
    """Pipeline stages of a process."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    """That a process is given in a step; in modes that share them, all processes together."""

    @property
    def activations(self) -> int:
        return FLOAT * self.tokens * self.hidden

    @property
    def layer(self) -> int:
        """Weights; keys and values are half as wide as queries, the MLP three times."""
        return FLOAT * (12 * self.hidden**2 + 2 * self.hidden)

    @property
    def around(self) -> int:
        """Weights outside the layers: embedding, head, last norm."""
        return FLOAT * (2 * self.vocabulary * self.hidden + self.hidden)

    @property
    def adapters(self) -> int:
        """Of a layer: inputs and outputs of its linear layers are 19 times `hidden` together."""
        return FLOAT * RANK * 19 * self.hidden

    def trained(self, method: str) -> int:
        return self.layers * self.adapters if method == "lora" else self.layers * self.layer + self.around


class Expected:
    """Transfers of one process: how many of each kind, and their bytes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.whole_bytes: Counter[str] = Counter()

    def add(self, kind: str, count: int, whole_bytes: int) -> None:
        """`count` transfers of `whole_bytes` together."""
        self.counts[kind] += count
        self.whole_bytes[kind] += whole_bytes


def expected(case: Case, shape: Shape) -> Expected:
    """With gradients in one bucket, and all rows of the output head in one chunk."""
    found = Expected()
    _MODES[case.mode](found, case, shape)
    return found


def _ddp(found: Expected, case: Case, shape: Shape) -> None:
    """The gradients, once a step however many passes it has."""
    found.add("all-reduce", 1, shape.trained(case.method))


def _fsdp(found: Expected, case: Case, shape: Shape) -> None:
    """In every pass each layer forward and backward and the rest once; the gradients once a step."""
    extra = shape.adapters if case.method == "lora" else 0
    gathered = 2 * shape.layers * (shape.layer + extra) + shape.around
    found.add("all-gather", case.passes * (2 * shape.layers + 1), case.passes * gathered)
    groups = shape.layers + (case.method == "full")
    found.add("reduce-scatter", groups, shape.trained(case.method))


def _tp(found: Expected, case: Case, shape: Shape) -> None:
    """Activations: four times a layer, after the embedding, and before the head on the way back.

    Of each adapter one half is whole on both processes; the gradients of all those are summed once a step.
    """
    times = 4 * shape.layers + 2
    if case.method == "lora":
        times -= 1  # nothing before the first layer is trained, so no gradient goes there
        found.add("all-reduce", 1, shape.layers * FLOAT * RANK * LINEAR_LAYERS * shape.hidden)
    found.add("all-reduce", case.passes * times, times * shape.activations)
    found.add("all-gather", case.passes, PROCESSES * 2 * FLOAT * shape.tokens)


def _pp(found: Expected, case: Case, shape: Shape) -> None:
    """Every border between stages is crossed forward and backward; each of two processes sends half of that."""
    borders = PROCESSES * case.stages - 1
    found.add("send", case.passes * borders, borders * shape.activations)


def _cp(found: Expected, case: Case, shape: Shape) -> None:
    """Queries, keys and values, twice as wide together as the results, which go back; both ways. Then as under DDP."""
    found.add("all-to-all", case.passes * 4 * shape.layers, 2 * shape.layers * 3 * shape.activations // PROCESSES)
    _ddp(found, case, shape)


_MODES = {"ddp": _ddp, "fsdp": _fsdp, "tp": _tp, "pp": _pp, "cp": _cp}

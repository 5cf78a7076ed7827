"""Pipeline stages: which layers each has, and how long its process waits."""

from __future__ import annotations

from pantheraml.base.errors import ConfigError

EMBEDDING_COST = 1.0
"""Cost of the embedding, in layers. The lookup takes almost no time, but the first stage holds the most
micro-batches."""


def assign_layers(layers: int, stages: int, *, first: float, last: float) -> list[range]:
    """Assign contiguous layers to stages, at least one each, minimizing the load of the fullest stage.

    `first` and `last` are the costs of the embedding and of the head, in units of one layer.
    """
    if stages > layers:
        raise ConfigError(
            f"The model has {layers} layers, too few for {stages} pipeline stages.",
            fix="Lower parallel.pipeline (or the number of stages per process).",
        )
    loads = [1.0] * stages
    loads[0] += first
    loads[-1] += last
    counts = [1] * stages
    for _ in range(layers - stages):
        # Ties go to the later stage: with 1F1B, earlier stages have more micro-batches in flight and less free memory.
        stage = min(range(stages), key=lambda stage: (loads[stage], -stage))
        loads[stage] += 1
        counts[stage] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def bubble_fraction(processes: int, micro_batches: int, stages_per_process: int = 1) -> float:
    """Return the pipeline bubble as a fraction of the step, assuming equal stages and free communication.

    Fill and drain take `processes - 1` slots, where a slot is one stage's work on one micro-batch.
    """
    waiting = processes - 1
    return waiting / (stages_per_process * micro_batches + waiting)

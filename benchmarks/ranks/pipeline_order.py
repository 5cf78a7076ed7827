"""Each process of the pipeline benchmark: what it does in a step of a pipeline, and in which order.

The order is recorded from the engine, layer by layer. How long processes wait for each other follows from all of them.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.data.batch import Batch
from pantheraml.engine.pipeline_run import PipelineRun

TOKENS = 8


class Work(NamedTuple):
    """One stage's forward or backward pass over one micro-batch."""

    stage: int
    micro_batch: int
    backward: bool


def main() -> None:
    """A pipeline of the first `processes` for each case; rank 0 writes how long its processes wait."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        answer = [waited(**case) for case in request["cases"]]
        if dist.get_rank() == 0:
            (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def waited(*, processes: int, micro_batches: int, stages_per_process: int) -> dict[str, Any] | None:
    """Turns of each of `processes` in a step; None on others. A collective of all."""
    group = dist.new_group(list(range(processes)))
    if dist.get_rank() >= processes:
        return None
    everybody: list[Any] = [None] * processes
    dist.all_gather_object(everybody, _order(group, micro_batches, stages_per_process), group=group)
    return {
        "works": [len(order) for order in everybody],
        "idle_turns": idle_turns(everybody),
        "idle_turns_if_backward_takes_two": idle_turns(everybody, backward_turns=2),
    }


def _order(group: dist.ProcessGroup, micro_batches: int, stages_per_process: int) -> list[Work]:
    """Of this process. Every stage is one layer, so that a layer's passes are its stage's."""
    rank, processes = dist.get_rank(group), dist.get_world_size(group)
    stages = processes * stages_per_process
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=stages,
            num_attention_heads=1,
            tie_word_embeddings=False,
        )
    )
    run = PipelineRun(model, group, device=torch.device("cpu"), stages_per_process=stages_per_process)
    found: list[Work] = []
    for stage in range(rank, stages, processes):
        _record(model.model.layers[stage], stage, found)
    run.backward([_batch()] * micro_batches, factor=1.0)
    return found


def _record(layer: nn.Module, stage: int, found: list[Work]) -> None:
    begun = itertools.count()

    def passed(_module: nn.Module, _args: Any, hidden: Tensor) -> None:
        number = next(begun)
        found.append(Work(stage, number, backward=False))
        hidden.register_hook(lambda _gradient: found.append(Work(stage, number, backward=True)))

    layer.register_forward_hook(passed)


def _batch() -> Batch:
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    positions = torch.arange(TOKENS)[None]
    return Batch(ids, ids, positions, None, max_length=TOKENS, tokens=TOKENS, target_count=TOKENS)


def idle_turns(everybody: Sequence[Sequence[Work]], *, backward_turns: int = 1) -> list[int]:
    """How many turns each process waits until the last is done, if a stage's forward pass takes one turn, its backward
    pass `backward_turns`, and sending none. A process keeps to its order, and goes on as soon as it can."""
    last = max(work.stage for order in everybody for work in order)
    left = [deque(order) for order in everybody]
    ready: dict[Work, int] = {}
    now, busy = [0] * len(left), [0] * len(left)
    while any(left):
        before = len(ready)
        for rank, order in enumerate(left):
            while order and all(need in ready for need in _needs(order[0], last)):
                work = order.popleft()
                turns = backward_turns if work.backward else 1
                now[rank] = max([now[rank], *(ready[need] for need in _needs(work, last))]) + turns
                busy[rank] += turns
                ready[work] = now[rank]
        assert len(ready) > before, "the processes wait for each other for ever"
    return [max(now) - own for own in busy]


def _needs(work: Work, last: int) -> list[Work]:
    if not work.backward:
        return [work._replace(stage=work.stage - 1)] if work.stage > 0 else []
    after = [work._replace(stage=work.stage + 1)] if work.stage < last else []
    return [work._replace(backward=False), *after]


if __name__ == "__main__":
    main()

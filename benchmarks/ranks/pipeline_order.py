"""Rank script of the pipeline benchmark: record the order of a process's forwards and backwards in a step.

The order is recorded with hooks on the layers. The idle time follows from the orders of all processes.
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
from pantheraml.engine.step.pipeline_step import PipelineRun

TOKENS = 8


class Work(NamedTuple):
    """One stage's forward or backward over one micro-batch."""

    stage: int
    micro_batch: int
    backward: bool


def main() -> None:
    """Run a pipeline of the first `processes` for each case; rank 0 writes the idle slots."""
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
    """Work and idle slots of each of `processes` in a step; None on other ranks. A collective of all."""
    group = dist.new_group(list(range(processes)))
    if dist.get_rank() >= processes:
        return None
    orders: list[Any] = [None] * processes
    dist.all_gather_object(orders, _order(group, micro_batches, stages_per_process), group=group)
    return {
        "works": [len(order) for order in orders],
        "idle_turns": idle_turns(orders),
        "idle_turns_if_backward_takes_two": idle_turns(orders, backward_turns=2),
    }


def _order(group: dist.ProcessGroup, micro_batches: int, stages_per_process: int) -> list[Work]:
    """Order of this process. Every stage is one layer, so a layer's passes are its stage's."""
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
    counter = itertools.count()

    def passed(_module: nn.Module, _args: Any, hidden: Tensor) -> None:
        number = next(counter)
        found.append(Work(stage, number, backward=False))
        hidden.register_hook(lambda _gradient: found.append(Work(stage, number, backward=True)))

    layer.register_forward_hook(passed)


def _batch() -> Batch:
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    positions = torch.arange(TOKENS)[None]
    return Batch(ids, ids, positions, None, max_length=TOKENS, tokens=TOKENS, target_count=TOKENS)


def idle_turns(orders: Sequence[Sequence[Work]], *, backward_turns: int = 1) -> list[int]:
    """Idle slots of each process until the last is done, if a forward takes one slot, a backward `backward_turns`, and
    sends none. A process keeps its order, and continues as soon as its inputs are ready."""
    last = max(work.stage for order in orders for work in order)
    left = [deque(order) for order in orders]
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
        assert len(ready) > before, "deadlock"
    return [max(now) - own for own in busy]


def _needs(work: Work, last: int) -> list[Work]:
    if not work.backward:
        return [work._replace(stage=work.stage - 1)] if work.stage > 0 else []
    after = [work._replace(stage=work.stage + 1)] if work.stage < last else []
    return [work._replace(backward=False), *after]


if __name__ == "__main__":
    main()

"""Time and memory of an optimizer step on the parameters of a 1.2B Llama, on one GPU.

Norm, clip and step together, for every optimizer and dtype of trainable weights; bandwidth counts the minimum of bytes
that must be moved.
"""

from __future__ import annotations

import json
import time
from typing import Any

from table import Column, Table

NEEDS_GPU = True

TABLE = Table(
    title="Optimizer step",
    how="Norm, clip and step on the parameters of a 1.2B Llama; mean of the rounds.",
    columns=(
        Column("optimizer", "optimizer"),
        Column("weights", "weights"),
        Column("time", "seconds", lambda value: f"{1000 * value:.2f} ms"),
        Column("bandwidth", "bytes_per_second", lambda value: f"{value / 1e9:,.0f} GB/s"),
        Column("allocated during the step", "extra_bytes", lambda value: f"{value / 2**20:.2f} MiB"),
    ),
)

WIDTH, INNER, KEYS, LAYERS, WORDS = 2048, 8192, 512, 16, 128_256
STATE_BYTES = {"adamw": 8, "adamw_bf16": 4, "adamw8bit": 2}


def run(*, rounds: int = 10) -> dict[str, Any]:
    rows = [measure(kind, weights, rounds) for weights in ("float32", "bfloat16") for kind in STATE_BYTES]
    return {"parameters": {"rounds": rounds}, "results": rows}


def parameters(weights: str) -> list[tuple[str, Any]]:
    import torch
    from torch import nn

    layer = [
        *((WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, WIDTH)),
        *((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)),
        *((WIDTH,), (WIDTH,)),
    ]
    shapes = [(WORDS, WIDTH), *(shape for _ in range(LAYERS) for shape in layer), (WIDTH,)]
    made = [nn.Parameter(torch.randn(*shape, device="cuda").to(getattr(torch, weights))) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return [(str(number), parameter) for number, parameter in enumerate(made)]


def measure(kind: str, weights: str, rounds: int) -> dict[str, Any]:
    import torch

    from pantheraml.engine.optim.optimizer import build_optimizer, clip
    from pantheraml.parallel.local_shards import local_squared_norm
    from pantheraml.specs.train import TrainSettings

    trained = parameters(weights)
    optimizer = build_optimizer(trained, TrainSettings.model_validate({"optimizer": kind}))

    def step() -> None:
        clip(optimizer, trained, local_squared_norm(trained, trained, ranks=1).sqrt().item(), 1.0)
        optimizer.step()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    for _ in range(rounds):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / rounds
    count = sum(parameter.numel() for _, parameter in trained)
    size = trained[0][1].element_size()
    moved = count * (4 * size + 2 * STATE_BYTES[kind])  # gradients are read twice: norm and step
    return {
        "optimizer": kind,
        "weights": weights,
        "seconds": seconds,
        "bytes_per_second": moved / seconds,
        "extra_bytes": torch.cuda.max_memory_allocated() - held,
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))

"""Time of a training step of one's own loop by `PerformanceConfig.optimization_level`.

python benchmarks/run.py optimization_levels
python benchmarks/run.py optimization_levels --set rounds=1 --set width=64 --set steps=20      smoke test
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from table import Column, Table

WARM_UP = 15
"""Steps before those that count: torch.compile compiles in them."""


def run(
    *, width: int | None = None, layers: int = 8, rows: int | None = None, steps: int = 60, rounds: int = 3
) -> dict[str, Any]:
    """Alternate between levels, `rounds` times; the median of all steps of a level counts."""
    import torch

    from pantheraml.performance import OptimizationLevel

    gpu = torch.cuda.is_available()
    width, rows = width or (4096 if gpu else 512), rows or (1024 if gpu else 32)
    seconds: dict[str, list[float]] = {str(level): [] for level in OptimizationLevel}
    for _ in range(rounds):
        for level in OptimizationLevel:
            seconds[str(level)] += _steps(level, width, layers, rows, steps)
    base = statistics.median(seconds["none"])
    return {
        "parameters": {"device": "cuda" if gpu else "cpu", "width": width, "layers": layers, "rows": rows},
        "results": [
            {"level": level, "milliseconds": 1e3 * statistics.median(each), "speedup": base / statistics.median(each)}
            for level, each in seconds.items()
        ],
    }


def _steps(level: Any, width: int, layers: int, rows: int, steps: int) -> list[float]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from pantheraml.performance import PerformanceConfig, create_performance_optimizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(layers))
    model = nn.Sequential(*blocks).to(device)
    optimizer = create_performance_optimizer(PerformanceConfig(optimization_level=level))
    wrapped, criterion = optimizer.wrap_model_for_multi_gpu(model), nn.MSELoss()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    count = (WARM_UP + steps) * rows
    data = DataLoader(TensorDataset(torch.randn(count, width), torch.randn(count, width)), batch_size=rows)
    found = []
    for inputs, targets in optimizer.optimize_training_pipeline(wrapped, data, adam, criterion):
        inputs, targets = inputs.to(device), targets.to(device)
        began = time.perf_counter()
        adam.zero_grad()
        criterion(wrapped(inputs), targets).backward()
        adam.step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    optimizer.cleanup()
    return found[WARM_UP:]


TABLE = Table(
    title="Levels of an own loop",
    how="Layers of Linear, GELU and LayerNorm under AdamW, float32 data; each level includes the one before. Median of"
    " the steps after the first 15, levels taken in turn.",
    columns=(
        Column("device", "parameters.device"),
        Column("width", "parameters.width"),
        Column("rows", "parameters.rows"),
        Column("level", "level"),
        Column("step", "milliseconds", lambda value: f"{value:.2f} ms"),
        Column("speed", "speedup", lambda value: f"{value:.2f}x"),
    ),
)

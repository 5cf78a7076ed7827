"""Rank script of test_seed_blocks: blocks for several ranks, each of which gives its own rank."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pantheraml import multigpu, performance
from tests.seed_blocks import run

NAMES = {name: getattr(performance, name) for name in performance.__all__}


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    optimizer = run("S1:129", rank=rank, **NAMES)["optimizer"]
    optimizer.config.enable_compile = False
    wrapped = optimizer.wrap_model_for_multi_gpu(nn.Linear(4, 1))
    wrapped(torch.full((1, 4), float(rank))).sum().backward()
    found["gradient"] = wrapped.module.weight.grad.tolist()
    found["status"] = optimizer.get_multi_gpu_status()
    with redirect_stdout(StringIO()) as printed:
        run("S1:371", optimizer=optimizer, dist=dist)
    found["printed"] = printed.getvalue()
    optimizer.cleanup()
    os.chdir(sys.argv[1])
    names = {"gpu_config": multigpu.GPUConfig(), "model": nn.Linear(4, 1), "rank": rank}
    made = run("S4:89", **names, DistributedDataParallelTrainer=multigpu.DistributedDataParallelTrainer)
    found["wrapped"] = type(made["model"]).__name__
    made["trainer"].cleanup()
    Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

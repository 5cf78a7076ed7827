"""Rank script of test_gpu_trainers: DistributedDataParallelTrainer on two ranks."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pantheraml import distributed
from pantheraml.base.errors import PantheraError
from pantheraml.multigpu import DataParallelTrainer, DistributedDataParallelTrainer, GPUConfig, MultiGPUTrainingManager
from tests.distributed.module_trainer_ranks import Pairs, flat, make_net

BATCH, ACCUMULATE, EPOCHS, RATE = 3, 2, 3, 0.1
SGD: dict[str, Any] = {"class": torch.optim.SGD, "kwargs": {"lr": RATE, "momentum": 0.5}}


def trainer_of(batch: int = BATCH, accumulate: int = ACCUMULATE, **fields: Any) -> DistributedDataParallelTrainer:
    config = GPUConfig(batch_size_per_gpu=batch, gradient_accumulation_steps=accumulate, **fields)
    return DistributedDataParallelTrainer(config, optimizer_config=SGD, loss_fn=nn.MSELoss())


async def train(path: Path, rank: int) -> dict[str, Any]:
    """Two epochs, then a checkpoint, and the third one; also from the checkpoint, in a new trainer."""
    model = make_net()
    with trainer_of() as trainer:
        trainer.setup_distributed(rank=rank, world_size=2)
        trainer.setup_distributed(rank=rank, world_size=2)
        trainer.setup_model(model)
        loader = trainer.setup_dataloader(Pairs(21))
        stats = [await trainer.train_epoch(loader, epoch) for epoch in range(EPOCHS - 1)]
        trainer.save_checkpoint(path, epoch=EPOCHS - 2)
        stats.append(await trainer.train_epoch(loader, EPOCHS - 1))
    again = make_net()
    with trainer_of() as trainer:
        trainer.setup_distributed()
        trainer.setup_model(again)
        epoch = trainer.load_checkpoint(path)
        await trainer.train_epoch(trainer.setup_dataloader(Pairs(21)), epoch + 1)
    return {"stats": stats, "weights": flat(model), "continued": flat(again), "epoch": epoch}


def refused(call: Any) -> str:
    try:
        call()
    except PantheraError as err:
        return f"{type(err).__name__}: {err.what}"
    return "accepted"


def missing_for_one(path: Path, rank: int) -> str:
    """A checkpoint that only rank 0 can read is loaded by none."""
    model = make_net()
    with trainer_of() as trainer:
        trainer.setup_model(model)
        before = flat(model)
        found = refused(lambda: trainer.load_checkpoint(path if rank == 0 else path.with_name("other.pt")))
        assert flat(model) == before
    return found


def detected() -> dict[str, Any]:
    with MultiGPUTrainingManager() as manager:
        config = manager.detect_gpu_configuration()
        return {**config.model_dump(), "trainer": type(manager.setup_trainer()).__name__}


def batch_norm() -> list[str]:
    """Kind of the layers with and without synchronization, on a CPU."""
    kinds = []
    for sync in (True, False):
        with trainer_of(sync_batch_norm=sync) as trainer:
            wrapped = trainer.setup_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
            kinds.append(type(wrapped.module[1]).__name__)
    return kinds


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), distributed.get_rank()
    found: dict[str, Any] = asyncio.run(train(folder / "checkpoint.pt", rank))
    found["detected"] = detected()
    found["missing"] = missing_for_one(folder / "checkpoint.pt", rank)
    found["batch_norm"] = batch_norm()
    found["wrong_rank"] = refused(lambda: trainer_of().setup_distributed(rank=1 - rank, world_size=2))
    found["disabled"] = refused(lambda: trainer_of(use_multi_gpu=False).setup_distributed())
    found["dataparallel"] = refused(lambda: DataParallelTrainer().setup_model(make_net()))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

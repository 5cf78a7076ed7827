"""MultiGPUTrainingManager and its trainers in one process without a GPU, and launch_distributed_training.

tests/distributed/test_gpu_trainers.py has two ranks.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pantheraml import multigpu
from pantheraml.base.env import child_environment
from pantheraml.base.errors import CheckpointError, ConfigError, DeviceError, WorkerError
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.multigpu import (
    DataParallelTrainer,
    DistributedDataParallelTrainer,
    GPUConfig,
    MultiGPUTrainingManager,
    launch_distributed_training,
)
from tests import seed_blocks

Host = Callable[..., FakeNvml]
NAMES = {name: getattr(multigpu, name) for name in multigpu.__all__}
SGD: dict[str, Any] = {"class": torch.optim.SGD, "kwargs": {"lr": 0.1}}
WITHOUT_GPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPUs")


class Net(nn.Linear):
    """A model that returns its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": nn.functional.mse_loss(super().forward(inputs), targets)}


def pairs(count: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="pantheraml")
    return lambda: [record.getMessage() for record in caplog.records]


@WITHOUT_GPUS
@pytest.mark.seed("S4:72", "S4-044", "S4-045", "S4-046", "S4-047", "S4-035", "C2")
def test_manager() -> None:
    found = seed_blocks.run("S4:72", **NAMES)
    assert found["config"] == GPUConfig(use_multi_gpu=False, gpu_ids=[], backend="gloo")
    assert isinstance(found["trainer"], DataParallelTrainer)
    found["trainer"].setup_model(Net())
    found["manager"].cleanup()
    assert found["trainer"].optimizer is None
    found["manager"].cleanup()


@WITHOUT_GPUS
@pytest.mark.seed("S4:80", "S4-048", "S4-049", "S4-050", "S4-051", "C17")
def test_data_parallel_trainer(logged: Callable[[], list[str]]) -> None:
    model, config = Net(), GPUConfig(batch_size_per_gpu=3)
    before = model.weight.clone()
    given = {"model": model, "gpu_config": config, "dataset": pairs(), "epoch": 2}
    found = asyncio.run(seed_blocks.run_async("S4:80", **NAMES, **given))
    metrics = found["metrics"]
    assert (metrics["epoch"], metrics["steps"], metrics["samples"], metrics["world_size"]) == (2, 7, 20, 1)
    assert not torch.equal(before, model.weight)
    assert any("training on cpu instead of several GPUs" in line for line in logged())
    assert any("mixed_precision is not used" in line for line in logged())
    found["trainer"].cleanup()


@WITHOUT_GPUS
@pytest.mark.seed("S4:415", "S4-151", "S4-020")
def test_custom_training_loop() -> None:
    found = seed_blocks.run("S4:415", **NAMES)
    config = SimpleNamespace(epochs=3)
    metrics = asyncio.run(found["custom_training_loop"](Net(), pairs(), config))
    assert (metrics["epoch"], metrics["samples"]) == (2, 20)


@WITHOUT_GPUS
@pytest.mark.seed("S4-101", "S4-110")
def test_accumulated_batches_are_one_step() -> None:
    """Equal to one batch of that size, also at the end of an epoch, where there are fewer."""
    weights = []
    for batch, accumulate in ((6, 1), (2, 3)):
        config = GPUConfig(batch_size_per_gpu=batch, gradient_accumulation_steps=accumulate)
        model = Net()
        with DataParallelTrainer(config, optimizer_config=SGD) as trainer:
            trainer.setup_model(model)
            metrics = asyncio.run(trainer.train_epoch(trainer.setup_dataloader(pairs()), 0))
        assert metrics["steps"] == 4
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


@WITHOUT_GPUS
def test_the_event_loop_goes_on_while_it_trains() -> None:
    async def main() -> tuple[int, str]:
        with DataParallelTrainer(optimizer_config=SGD) as trainer:
            trainer.setup_model(Net())
            loader = trainer.setup_dataloader(pairs(2000))
            training, turns = asyncio.create_task(trainer.train_epoch(loader, 0)), 0
            await asyncio.sleep(0.001)
            with pytest.raises(ConfigError, match="Another epoch") as second:
                await trainer.train_epoch(loader, 1)
            while not training.done():
                await asyncio.sleep(0.001)
                turns += 1
            await training
        return turns, second.value.what

    turns, _ = asyncio.run(main())
    assert turns > 3


@WITHOUT_GPUS
@pytest.mark.seed("S4-096", "S4-097", "S4-098")
def test_what_cannot_be_done_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"GPU 1 was requested, but 0 GPU\(s\) are visible"):
        DataParallelTrainer(GPUConfig(gpu_ids=[1, 2])).setup_model(Net())
    with pytest.raises(ConfigError, match="for DistributedDataParallelTrainer"):
        DataParallelTrainer(GPUConfig(distributed_training=True)).setup_model(Net())
    with pytest.raises(ConfigError, match=r"not a torch\.nn\.Module"):
        DataParallelTrainer().setup_model("model")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no model"):
        DataParallelTrainer().setup_dataloader(pairs())
    with pytest.raises(ConfigError, match="has no model"):
        asyncio.run(DataParallelTrainer().train_epoch(None, 0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be set together"):
        DistributedDataParallelTrainer().setup_distributed(rank=1)
    with DataParallelTrainer() as trainer:
        trainer.setup_model(Net())
        with pytest.raises(ConfigError, match="has a model already"):
            trainer.setup_model(Net())
        with pytest.raises(ConfigError, match="not a number of an epoch"):
            asyncio.run(trainer.train_epoch(trainer.setup_dataloader(pairs()), -1))


@WITHOUT_GPUS
@pytest.mark.seed("S4-099", "S4-102", "S4-103", "S4-105", partly="needs several GPUs to show its effect")
def test_fields_that_need_gpus(logged: Callable[[], list[str]]) -> None:
    model = nn.Sequential(Net())
    with DataParallelTrainer(GPUConfig(mixed_precision=False)) as trainer:
        trainer.setup_model(model)
    assert not any("mixed_precision" in line for line in logged())
    with DistributedDataParallelTrainer(GPUConfig(sync_batch_norm=False, backend="gloo")) as trainer:
        config = trainer._of_rank(0, 2, None)
    assert (config.sync_bn, config.backend) == (False, "gloo")


@pytest.mark.seed("S4-012")
def test_the_gpus_of_a_host_are_detected(host: Host, logged: Callable[[], list[str]]) -> None:
    host("4xH200").gpus[1].ecc = (0, 1)
    config = MultiGPUTrainingManager().detect_gpu_configuration()
    assert config == GPUConfig(gpu_ids=[0, 2, 3])
    assert any(line.startswith("GPUs to use: [0, 2, 3]") for line in logged())
    host("1xH200")
    assert MultiGPUTrainingManager().detect_gpu_configuration() == GPUConfig(use_multi_gpu=False, gpu_ids=[0])


@WITHOUT_GPUS
@pytest.mark.seed("S4-055", "S4-056")
def test_checkpoints(tmp_path: Path) -> None:
    model, path = Net(), tmp_path / "checkpoint.pt"
    with DistributedDataParallelTrainer() as trainer:
        trainer.setup_distributed(rank=0, world_size=1)
        trainer.setup_model(model)
        with pytest.raises(CheckpointError, match="There is no checkpoint"):
            trainer.load_checkpoint(path)
        asyncio.run(trainer.train_epoch(trainer.setup_dataloader(pairs()), 0))
        with pytest.raises(CheckpointError, match=r"Saving checkpoint\.pt failed"):
            trainer.save_checkpoint(tmp_path / "no" / "folder" / "checkpoint.pt", epoch=0)
        trainer.save_checkpoint(path, epoch=5)
        trained = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        path.with_name("broken.pt").write_bytes(path.read_bytes()[:-100])
        torch.save({"epoch": 1, "model": {"x": torch.ones(1)}, "optimizer": {"param_groups": []}}, tmp_path / "other")
        torch.save({"epoch": 1, "model": {"x": 1}, "optimizer": {}}, tmp_path / "odd")
        for name, says in (
            ("broken.pt", "cannot be read"),
            ("other", "of another model"),
            ("odd", "not a checkpoint of this trainer"),
        ):
            with pytest.raises(CheckpointError, match=says):
                trainer.load_checkpoint(tmp_path / name)
        assert not model.weight.any()
        assert trainer.load_checkpoint(path) == 5
        assert torch.equal(model.weight, trained)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["broken.pt", "checkpoint.pt", "odd", "other"]


async def train_as_rank(rank: int, world_size: int, samples: int, batch: int) -> tuple[int, list[float], int]:
    torch.set_num_threads(1)
    model = Net()
    with DistributedDataParallelTrainer(GPUConfig(batch_size_per_gpu=batch), optimizer_config=SGD) as trainer:
        trainer.setup_distributed(rank=rank, world_size=world_size)
        trainer.setup_model(model)
        metrics = await trainer.train_epoch(trainer.setup_dataloader(pairs(samples)), 0)
    return rank, model.weight.flatten().tolist(), metrics["world_size"]


def add(rank: int, world_size: int, left: int, right: int) -> int:
    if left < 0:
        raise ValueError(f"rank {rank} fails")
    return left + right + rank


@WITHOUT_GPUS
@pytest.mark.seed("S4-064", "S4-065", "S4-008")
def test_launch_distributed_training() -> None:
    (_, one, _), (_, other, ranks) = launch_distributed_training(
        world_size=2, train_func=train_as_rank, samples=21, batch=3
    )
    model = Net()
    with DistributedDataParallelTrainer(GPUConfig(batch_size_per_gpu=6), optimizer_config=SGD) as trainer:
        trainer.setup_distributed(rank=0, world_size=1)
        trainer.setup_model(model)
        asyncio.run(trainer.train_epoch(trainer.setup_dataloader(pairs(21)), 0))
    assert ranks == 2
    assert one == other == pytest.approx(model.weight.flatten().tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.extended
@WITHOUT_GPUS
def test_launches_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="train_func does not take these arguments"):
        launch_distributed_training(world_size=2, train_func=add, left=1)
    with pytest.raises(ConfigError, match=r"is not a valid number"):
        launch_distributed_training(world_size=0, train_func=add, left=1, right=1)
    with pytest.raises(WorkerError, match=r"rank [01] fails"):
        launch_distributed_training(world_size=2, train_func=add, left=-1, right=1)


def test_a_manager_needs_no_torch() -> None:
    code = (
        "import sys; from pantheraml.multigpu import MultiGPUTrainingManager as M; m = M();"
        "m.detect_gpu_configuration(); m.cleanup(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True, timeout=60)

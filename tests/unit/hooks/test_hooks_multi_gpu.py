"""enable_multi_gpu and disable_multi_gpu: what a trainer made in between gets, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers.trainer
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments

import pantheraml
from pantheraml.base.errors import ConfigError, DeviceError, LaunchError, PantheraError
from pantheraml.hooks import multi_gpu
from pantheraml.hooks.registry import REGISTRY
from pantheraml.specs.plan import GPU, DeviceSpec


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`Trainer.__init__` as it is before the test and after it; earlier tests may have patched it otherwise."""
    monkeypatch.setenv("PANTHERAML_RELAUNCH", "0")
    multi_gpu.revert()
    before = Trainer.__init__
    yield before
    multi_gpu.revert()
    assert Trainer.__init__ is before


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(self.line(x), labels)}


def make_trainer(folder: Path, **arguments: Any) -> Trainer:
    data = Dataset.from_dict({"x": [[float(i), 1.0] for i in range(12)], "labels": [[float(i)] for i in range(12)]})
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", max_steps=1, save_strategy="no", **arguments)
    return Trainer(Loss(), args, train_dataset=data)


@pytest.mark.seed("S3-014", "S3-015", "S3-016", "S3-017", "S3-034", "C7")
def test_batch_size_until_it_is_disabled(tmp_path: Path, caplog: pytest.LogCaptureFixture, original: Any) -> None:
    pantheraml.enable_multi_gpu(num_gpus=1, batch_size_per_gpu=3)
    pantheraml.enable_multi_gpu(num_gpus=1, batch_size_per_gpu=3)
    with caplog.at_level("WARNING", logger="pantheraml"):
        trainer = make_trainer(tmp_path, per_device_train_batch_size=2)
    assert "per_device_train_batch_size is 3, as enable_multi_gpu says, not 2: a step has 3 samples" in caplog.text
    assert next(iter(trainer.get_train_dataloader()))["x"].shape == (3, 2)
    trainer.train()
    pantheraml.enable_multi_gpu(num_gpus=1, batch_size_per_gpu=5)
    assert make_trainer(tmp_path).args.per_device_train_batch_size == 5
    pantheraml.disable_multi_gpu()
    pantheraml.disable_multi_gpu()
    assert Trainer.__init__ is original
    assert make_trainer(tmp_path, per_device_train_batch_size=2).args.per_device_train_batch_size == 2


@pytest.mark.parametrize("method", ["mean", "median"])
def test_another_library_wraps_the_trainer_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, original: Any, method: str
) -> None:
    """Unsloth does so when it loads a model on a GPU."""
    settings: Any = {"num_gpus": 1, "batch_size_per_gpu": 3, "gradient_aggregation": method}
    pantheraml.enable_multi_gpu(**settings)
    ours = Trainer.__init__

    @functools.wraps(ours)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "__init__", theirs)
    sizes = []
    for change in (
        lambda: pantheraml.enable_multi_gpu(**settings),
        pantheraml.disable_multi_gpu,
        lambda: pantheraml.enable_multi_gpu(**settings),
    ):
        change()
        trainer = make_trainer(tmp_path, per_device_train_batch_size=2)
        sizes.append(trainer.args.per_device_train_batch_size)
        assert ("training_step" in vars(trainer)) == (method == "median" and sizes[-1] == 3)
    assert sizes == [3, 2, 3]
    assert Trainer.__init__ is theirs, "not wrapped once more"
    monkeypatch.setattr(Trainer, "__init__", ours)


def test_without_settings_nothing_is_patched(original: Any) -> None:
    pantheraml.enable_multi_gpu(num_gpus=1)
    assert Trainer.__init__ is original
    assert multi_gpu.TRAINER_SETTINGS not in REGISTRY.applied


def test_median_of_one_rank_is_its_gradient(tmp_path: Path) -> None:
    pantheraml.enable_multi_gpu(num_gpus=1, gradient_aggregation="median")
    trainer = make_trainer(tmp_path)
    before = trainer.model.line.weight.detach().clone()
    trainer.train()
    assert not before.equal(trainer.model.line.weight)


@pytest.mark.seed("S2-055")
def test_a_rank_says_that_it_is_enabled(two_ranks: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pantheraml"):
        pantheraml.enable_multi_gpu(num_gpus=2, batch_size_per_gpu=4)
    assert (
        "Multi-GPU training enabled: 2 processes, 4 samples per GPU and pass, gradient aggregation mean" in caplog.text
    )


@pytest.mark.seed("S3-058", "S3-059", "S3-060")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size_per_gpu": 0}, ConfigError, "batch_size_per_gpu=0 is not a positive integer"),
        ({"batch_size_per_gpu": True}, ConfigError, "batch_size_per_gpu=True is not a positive integer"),
        ({"num_gpus": 0}, ConfigError, "0 is not a valid number of processes"),
        ({"num_gpus": "4"}, ConfigError, "'4' is not a valid number of processes"),
        ({"gradient_aggregation": "mode"}, ConfigError, "Unknown gradient aggregation `mode`"),
        ({"gradient_aggregation": "mean", "aggregation_weights": [1]}, ConfigError, "require each other"),
        ({"gradient_aggregation": "trimmed_mean", "num_gpus": 1}, ConfigError, "leaves none of 1 rank"),
        (
            {"gradient_aggregation": "weighted", "aggregation_weights": [1, 2], "num_gpus": 1},
            ConfigError,
            "not valid weights for 1 rank",
        ),
    ],
)
def test_bad_input_leaves_nothing_behind(
    arguments: dict[str, Any], error: type[PantheraError], message: str, original: Any
) -> None:
    with pytest.raises(error, match=message):
        pantheraml.enable_multi_gpu(**arguments)
    assert multi_gpu.current() is None
    assert Trainer.__init__ is original


@pytest.mark.seed("S3-015")
def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(GPU(index=i, name="GPU", total_bytes=1, free_bytes=1, compute_capability=None) for i in range(2))
    found = DeviceSpec(gpus=gpus, cpu_count=1, ram_bytes=1, driver="1")
    monkeypatch.setattr("pantheraml.multigpu.probe", lambda: found)
    with pytest.raises(DeviceError, match=r"4 processes were requested, but 2 GPU\(s\) are visible") as caught:
        pantheraml.enable_multi_gpu(num_gpus=4, batch_size_per_gpu=8)
    assert caught.value.fix == "Request 2 or fewer."
    assert multi_gpu.current() is None


@pytest.mark.seed("S3-015")
def test_more_processes_than_a_host_without_gpus_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheraml.multigpu.probe", lambda: DeviceSpec(gpus=(), cpu_count=2, ram_bytes=1, driver=None))
    monkeypatch.setattr("pantheraml.multigpu.relaunch", lambda processes: pytest.fail(f"{processes} processes started"))
    with pytest.raises(DeviceError, match="100 processes were requested, but no GPU is visible, and there are 2 CPU"):
        pantheraml.enable_multi_gpu(num_gpus=100)
    monkeypatch.setenv("PANTHERAML_NPROC", "64")
    with pytest.raises(DeviceError, match="64 processes were requested") as caught:
        pantheraml.enable_multi_gpu()
    assert caught.value.fix == "Request 16 or fewer."
    assert multi_gpu.current() is None


def test_more_gpus_than_the_launcher_started(two_ranks: None) -> None:
    with pytest.raises(LaunchError, match=r"num_gpus=4 is set, but the launcher started 2 process"):
        pantheraml.enable_multi_gpu(num_gpus=4, batch_size_per_gpu=8)
    assert multi_gpu.current() is None


def test_unsupported_transformers(monkeypatch: pytest.MonkeyPatch, original: Any) -> None:
    monkeypatch.setattr(multi_gpu.TRAINER_SETTINGS, "versions", "<5")
    with pytest.raises(ConfigError, match=r"transformers .* is not supported here") as caught:
        pantheraml.enable_multi_gpu(num_gpus=1, batch_size_per_gpu=2)
    assert "enable_multi_gpu works without batch_size_per_gpu" in str(caught.value.fix)
    assert multi_gpu.current() is None
    assert transformers.trainer.Trainer.__init__ is original
    pantheraml.enable_multi_gpu(num_gpus=1)


def test_after_the_process_group_exists(tmp_path: Path) -> None:
    pantheraml.enable_multi_gpu(num_gpus=1, batch_size_per_gpu=2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        pantheraml.enable_multi_gpu(num_gpus=1, batch_size_per_gpu=2)  # the same again changes nothing
        with pytest.raises(LaunchError, match="after the process group was created") as caught:
            pantheraml.enable_multi_gpu(num_gpus=1, batch_size_per_gpu=4)
    finally:
        dist.destroy_process_group()
    assert "Call enable_multi_gpu first" in str(caught.value.fix)
    current = multi_gpu.current()
    assert current is not None
    assert current.batch_size_per_gpu == 2


@pytest.mark.seed("S2-063")
def test_get_multi_gpu_config(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSLOTH_ENABLE_MULTIGPU", "1")
    found = pantheraml.get_multi_gpu_config()
    assert (found["enabled"], found["multi_gpu"], found["launched"]) == (True, True, True)
    assert (found["world_size"], found["rank"], found["local_rank"]) == (2, 0, 0)
    assert found["batch_size_per_gpu"] is None
    pantheraml.enable_multi_gpu(batch_size_per_gpu=4, gradient_aggregation="median")
    found = pantheraml.get_multi_gpu_config()
    assert (found["batch_size_per_gpu"], found["gradient_aggregation"]) == (4, "median")

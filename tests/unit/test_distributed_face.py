"""pantheraml.distributed in a single process; tests/distributed/test_distributed_face.py has several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pantheraml import distributed
from pantheraml.base.errors import ConfigError, DeviceError

PROCESS_ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.mark.seed("S0-008", "S0-009", "S0-010", "S0-012", "S3-057")
def test_a_single_process_needs_nobody() -> None:
    assert distributed.setup() == 1
    assert distributed.setup(distributed.MultiGPUConfig(backend="gloo")) == 1
    assert (distributed.get_rank(), distributed.get_local_rank(), distributed.get_world_size()) == (0, 0, 1)
    assert distributed.is_main_process()
    assert not distributed.is_distributed()
    distributed.barrier()
    assert distributed.broadcast({"a": 1}) == {"a": 1}
    assert [distributed.all_reduce(2.5, op) for op in ("mean", "sum", "min", "max")] == [2.5] * 4  # type: ignore[arg-type]
    assert distributed.all_reduce(torch.tensor([2.5], requires_grad=True)) == 2.5
    distributed.cleanup()
    distributed.cleanup()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distributed.all_reduce(1.0, "median"), "op='median' is not a reduction"),  # type: ignore[arg-type]
        (lambda: distributed.all_reduce(torch.ones(3)), "the tensor has 3"),
        (lambda: distributed.broadcast(torch.ones(1)), "Object of type Tensor is not JSON"),
        (lambda: distributed.broadcast(1, src=1), "src=1 is not a rank of 1 process"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_collectives_of_ranks_that_have_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(PROCESS_ALONE, ("1", "1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert (distributed.get_rank(), distributed.get_world_size()) == (1, 2)
    for call in (distributed.barrier, lambda: distributed.broadcast(1), lambda: distributed.all_reduce(1.0)):
        with pytest.raises(ConfigError, match="have not joined each other"):
            call()


@pytest.mark.seed("S0-036", "S0-037", "S0-083", "S3-065")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPUs")
def test_memory_and_devices_without_a_gpu() -> None:
    assert distributed.get_gpu_memory_info() == []
    assert distributed.clear_gpu_cache() == 0.0
    assert distributed.set_gpu_device() == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"GPU 1 was requested, but 0 GPU\(s\) are visible"):
        distributed.set_gpu_device(1)


@pytest.mark.seed("S0-011")
def test_device_map(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    monkeypatch.setattr(distributed, "memory_for_weights", lambda: {0: 50_000, 1: 50_000})
    found = distributed.get_device_map(model, "balanced")
    assert set(found.values()) == {0, 1}
    assert set(found) == {"0", "1", "2", "3"}

"""`pantheraml doctor` on a host with a GPU: torch sees what the driver shows, ranks all-reduce, and a run trains."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pantheraml.runs.doctor import examine


@pytest.mark.seed("S0-117", "S2-060", "S2-078", "C19")
def test_a_host_with_a_gpu_is_well() -> None:
    checks = {check.name: check for check in examine(lambda text: contextlib.nullcontext())}
    assert not [check for check in checks.values() if check.status == "failed"]
    gpus = torch.cuda.device_count()
    assert checks["import torch"].values["gpus"] == gpus == len(checks["GPUs"].values["gpus"])
    assert checks["import torch"].values["nccl"] is not None
    assert checks["driver"].values["driver_cuda"] is not None
    assert checks["collective"].values["backend"] == ("nccl" if gpus > 1 else "gloo")
    assert checks["training"].values["device"] == "cuda"
    assert checks["training"].values["world_size"] == gpus

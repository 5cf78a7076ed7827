"""Own training loops on a GPU: the same steps as on the CPU, a bad step skipped, and the GPU status."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

from pantheraml.stability import GradientClippingConfig, NaNHandlingConfig, create_training_wrapper


def trained_on(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    batches = torch.randn(5, 16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = create_training_wrapper(
        GradientClippingConfig(clipping="adagc", clip_warmup_steps=1, clip_growth=0.5),
        NaNHandlingConfig(on_nonfinite="skip"),
    )
    assert wrapper.wrap_model_for_multi_gpu(model) is model
    actions = []
    for step, batch in enumerate(batches):
        loss = model(batch).square().mean() * (math.nan if step == 2 else 1.0)
        actions.append(wrapper(model, loss, optimizer).action)
    assert actions == ["step", "step", "skip", "step", "step"]
    wrapper.synchronize_gpus()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def test_steps_match_the_cpu() -> None:
    torch.testing.assert_close(trained_on("cuda"), trained_on("cpu"), rtol=1e-5, atol=1e-6)


@pytest.mark.seed("S1-099", "S1-100", "S1-101", "S1-102", "S1-103", "S1-125")
def test_status_of_the_gpu() -> None:
    wrapper = create_training_wrapper()
    held = torch.zeros(64, 2**20, device="cuda")
    status = wrapper.get_multi_gpu_status()
    assert status["device_count"] == torch.cuda.device_count()
    first = status["gpu_memory"][0]
    assert first["device"] == 0
    assert first["allocated_mb"] >= held.numel() * held.element_size() / 2**20
    free, total = (size / 2**20 for size in torch.cuda.mem_get_info(0))
    assert first["total_mb"] == pytest.approx(total, rel=0.05)
    assert first["free_mb"] == pytest.approx(free, rel=0.1)
    assert 0 <= status["training_stats"]["gpu_utilization"][0] <= 100


@pytest.mark.seed("S1-107")
def test_status_is_cheap() -> None:
    wrapper = create_training_wrapper()
    wrapper.get_multi_gpu_status()
    begin = time.perf_counter()
    for _ in range(50):
        wrapper.get_multi_gpu_status()
    assert (time.perf_counter() - begin) / 50 < 0.02

"""Kinds of work, by the names of operators and kernels."""

from __future__ import annotations

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg

from pantheraml.engine.profile import KINDS, REST, _is_work, _own_seconds, _rows, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmuls"),
        ("aten::addmm", "matmuls"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmuls"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("c10d::allreduce_", "communication"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::native_layer_norm", "norms"),
        ("Memcpy DtoH (Device -> Pageable)", "copies and memory"),
        ("aten::nll_loss_forward", "loss and vocabulary"),
        ("aten::silu", REST),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len({kind for kind, _ in KINDS} | {REST}) == len(KINDS) + 1


def test_rows_are_per_step_and_ordered() -> None:
    rows = _rows([("a", 1.0, 2), ("b", 6.0, 2), ("a", 1.0, 4)], 2)
    assert [(row.name, row.seconds, row.share, row.calls) for row in rows] == [("b", 3.0, 0.75, 1), ("a", 1.0, 0.25, 3)]
    assert _rows([], 2) == []


def test_work_of_a_gpu_is_counted_once() -> None:
    """Events as the profiler makes them of a step on a GPU: the bracket of the optimizer spans its kernel."""

    def event(number: int, name: str, device: DeviceType, *, bracket: bool = False) -> FunctionEvent:
        times = {"start_us": 10, "end_us": 40, "thread": 1, "use_device": "cuda"}
        return FunctionEvent(number, name, **times, device_type=device, is_user_annotation=bracket)

    step = "Optimizer.step#AdamW.step"
    events = [
        event(1, step, DeviceType.CPU, bracket=True),
        event(2, "aten::_fused_adamw_", DeviceType.CPU),
        event(3, step, DeviceType.CUDA, bracket=True),
        event(4, "multi_tensor_apply_kernel<FusedAdam>", DeviceType.CUDA),
    ]
    gpu = torch.device("cuda")
    found = [each for each in (FunctionEventAvg().add(event) for event in events) if _is_work(each, gpu)]
    assert [(each.key, _own_seconds(each, gpu)) for each in found] == [("multi_tensor_apply_kernel<FusedAdam>", 30e-6)]

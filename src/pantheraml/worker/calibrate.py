"""`python -m pantheraml.worker.calibrate DEVICE [SECONDS]`: measure this machine's rates, and print them as JSON.

For `pantheraml bench --calibrate`, whose process has no torch. Sizes are those of an 8B model's layer on a GPU, so that
rates compare with the recorded ones of an H200, and small on a CPU. Each rate is the median of repeated passes. The
host's time to launch kernels is not measured: what counts is that of a whole layer, with autograd and Triton.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pantheraml.planner.rates import MachineRates, rates_as_json

SECONDS = 1.0
"""Seconds for each measurement."""
TOKENS, WIDTH, INNER = 8192, 4096, 14_336
ROWS, SEQUENCE, HEADS, HEAD = 4, 2048, 32, 128
CPU_SCALE = 16
"""Factor by which a CPU's matrices are smaller per side."""


class Stopwatch:
    """Repeats and times passes on a device for a given time."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def median(self, run: Callable[[], Any]) -> float:
        """Seconds of one pass."""
        for _ in range(3):
            run()
        self._wait()
        times: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(device: torch.device, seconds: float = SECONDS) -> MachineRates:
    """Rates of one device. What it cannot do is left out, or None."""
    watch, gpu = Stopwatch(device, seconds), device.type == "cuda"
    scale = 1 if gpu else CPU_SCALE
    matmul = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        if gpu or dtype is torch.float32:
            matmul[name] = _matmul(watch, device, dtype, scale)
    if gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        matmul["fp8"] = _fp8_matmul(watch, device)
    return MachineRates(
        device=torch.cuda.get_device_name(device) if gpu else "cpu",
        matmul_tflops=matmul,
        attention_tflops=_attention(watch, device, scale),
        copy_gb_s=_copy(watch, device, scale),
        host_gb_s=_host_link(watch, device) if gpu else None,
        link_gb_s=_peer_link(watch, device) if gpu else None,
        source=f"measured here by `pantheraml bench --calibrate` (torch {torch.__version__})",
    )


def _matmul(watch: Stopwatch, device: torch.device, dtype: torch.dtype, scale: int) -> float:
    """A layer's matmul and that of its input's gradient."""
    tokens, width, inner = TOKENS // scale, WIDTH // scale, INNER // scale
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(inner, width, device=device, dtype=dtype)
    y = x @ weight.T
    seconds = watch.median(lambda: x @ weight.T) + watch.median(lambda: y @ weight)
    return _tera(2 * 2 * tokens * width * inner, seconds)


def _fp8_matmul(watch: Stopwatch, device: torch.device) -> float:
    """The same in fp8, with a scale for each row."""
    x = torch.randn(TOKENS, WIDTH, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(INNER, WIDTH, device=device).to(torch.float8_e4m3fn)
    rows = torch.ones(TOKENS, 1, device=device)
    columns = torch.ones(1, INNER, device=device)

    def matmul() -> Tensor:
        return torch._scaled_mm(
            x, weight.T, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return _tera(2 * TOKENS * WIDTH * INNER, watch.median(matmul))


def _attention(watch: Stopwatch, device: torch.device, scale: int) -> float:
    """Forward and backward of causal attention, counting what is below the diagonal."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sequence = SEQUENCE // scale
    q, k, v = (
        torch.randn(ROWS, HEADS, sequence, HEAD, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn_like(q)

    def both() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    return _tera(7 * ROWS * sequence**2 * HEADS * HEAD, watch.median(both))


def _copy(watch: Stopwatch, device: torch.device, scale: int) -> float:
    """Bytes read and written."""
    source = torch.zeros((512 << 20) // scale, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / watch.median(lambda: target.copy_(source)) / 1e9


def _host_link(watch: Stopwatch, device: torch.device) -> float:
    """The slower direction between pinned memory and the device."""
    there = torch.zeros(256 << 20, device=device, dtype=torch.uint8)
    here = torch.zeros(256 << 20, dtype=torch.uint8).pin_memory()
    seconds = max(
        watch.median(lambda: there.copy_(here, non_blocking=True)),
        watch.median(lambda: here.copy_(there, non_blocking=True)),
    )
    return here.numel() / seconds / 1e9


def _peer_link(watch: Stopwatch, device: torch.device) -> float | None:
    """Between this GPU and another; None: there is no other."""
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    if not others:
        return None
    source = torch.zeros(256 << 20, device=device, dtype=torch.uint8)
    target = torch.empty_like(source, device=f"cuda:{others[0]}")
    return source.numel() / watch.median(lambda: target.copy_(source)) / 1e9


def _tera(operations: float, seconds: float) -> float:
    return operations / seconds / 1e12


if __name__ == "__main__":
    chosen = torch.device(sys.argv[1])
    print(rates_as_json(measure(chosen, float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS)))

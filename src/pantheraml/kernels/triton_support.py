"""Helpers shared by the Triton kernels: e4m3 casts, NaN-propagating maxima, block sizes and a cached launcher.

Import only where Triton is about to run: on a GPU or in its interpreter.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.fp8 import e4m3

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# The interpreter multiplies bf16 matrices as if they were integers (triton 3.6 to 3.9), so there it gets float32.
DOT: Any = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)
E4M3_MAX = tl.constexpr(e4m3.E4M3_MAX)
LIMIT = tl.constexpr(e4m3.LIMIT)
MIN_SCALE = tl.constexpr(e4m3.MIN_SCALE)


@triton.jit
def to_e4m3(values):
    """Cast float32 to e4m3: round to nearest even, saturate out-of-range values, propagate NaN."""
    if INTERPRETED:
        # The interpreter's cast loses the carry from mantissa to exponent, so round before casting.
        clamped = tl.minimum(tl.maximum(values, -E4M3_MAX), E4M3_MAX)
        bits = clamped.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        magic = 24576.0  # 1.5 * 2**14: adding it leaves multiples of 2**-9, e4m3's smallest step
        clamped = tl.where(tl.abs(clamped) < 0.015625, (clamped + magic) - magic, rounded.to(tl.float32, bitcast=True))
        codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(values == values, codes, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return values.to(tl.float8e4nv)  # saturates


@triton.jit
def from_e4m3(values):
    """Cast e4m3 to float32, propagating NaN."""
    values32 = values.to(tl.float32)
    if INTERPRETED:  # the interpreter reads NaN as 480
        return tl.where(tl.abs(values32) > E4M3_MAX, float("nan"), values32)
    return values32


@triton.jit
def nan_max(a, b):
    """Elementwise maximum that propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_amax(magnitudes, AXIS: tl.constexpr):
    """Maximum of non-negative values along AXIS, propagating NaN.

    `tl.max` ignores NaN, so compare the bit patterns as integers: for non-negative floats they sort like the values,
    with NaN above infinity.
    """
    return tl.max(magnitudes.to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def pow2_scale(amax, LIMIT: tl.constexpr):
    """Bit-exact equivalent of `e4m3.pow2_scale`."""
    ratio = amax * (1.75 / LIMIT)
    pow2 = (ratio.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
    scale = tl.where(ratio < float("inf"), pow2.to(tl.float32, bitcast=True), ratio)
    return tl.where(scale < MIN_SCALE, MIN_SCALE, scale)


@triton.jit
def row_scale(amax):
    """Scale of an e4m3 row with this amax. NaN maps to NaN, so that anything computed from the row is NaN too."""
    return pow2_scale(amax, LIMIT)


def block_of(columns: int) -> int:
    """Smallest power of two that is at least `columns`."""
    return 1 << (columns - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Ceiling division; `triton.cdiv` takes microseconds on the host."""
    return -(-a // b)


def row_warps(block: int) -> int:
    """Warps per row: about 16 values per thread."""
    return max(1, min(16, block // 512))


class SmLimits(NamedTuple):
    """Number of streaming multiprocessors (SMs) and their shared memory."""

    sms: int
    shared_memory: int
    """Bytes per SM, shared by its resident programs; also the limit of a single program."""


@functools.cache
def sm_limits(device: torch.device) -> SmLimits:
    if INTERPRETED:
        return SmLimits(1, 16384)  # small, so that tests need only a few rows
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return SmLimits(properties["multiprocessor_count"], properties["max_shared_mem"])


_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """Launch `kernel` over `grid`; `constants` are its constexpr parameters in declaration order.

    Triton inspects every argument on every launch, which takes longer than most of these kernels run (40 us and more
    on a GPU server's CPU, about 80 launches per layer). Specialization depends only on dtypes, integers and pointer
    alignment, so the compiled kernel is cached by those.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    device: torch.device = arguments[0].device
    if device.index != torch.cuda.current_device():  # Triton launches on the current device, not on the arguments'
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **options, **constants)
        return
    # keyed by id: hashing the kernel itself would hash its source
    key = (
        id(kernel),
        device,
        num_warps,
        num_stages,
        *constants.values(),
        *[_kind(argument) for argument in arguments],
    )
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[grid](*arguments, **constants, **options)
        return
    compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())


def _kind(argument: Any) -> Any:
    """Cache key of an argument: everything Triton can specialize on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15
    return float if isinstance(argument, float) else argument

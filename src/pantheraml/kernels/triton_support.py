"""What the Triton kernels share. Imported only where Triton is about to run: on a GPU, or in its interpreter."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels import e4m3

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# The interpreter multiplies bf16 matrices as if they were integers (triton 3.6 to 3.9), so there it gets float32.
DOT: Any = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)
LARGEST = tl.constexpr(e4m3.LARGEST)
LIMIT = tl.constexpr(e4m3.LIMIT)
SMALLEST_SCALE = tl.constexpr(e4m3.SMALLEST_SCALE)


@triton.jit
def to_e4m3(values):
    """Float32 to e4m3, round to nearest even; beyond the range its end, and NaN stays NaN."""
    if INTERPRETED:
        # The interpreter's cast loses the carry from mantissa to exponent, so it gets values that need no rounding.
        inside = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        bits = inside.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        magic = 24576.0  # 1.5 * 2**14: adding it leaves multiples of 2**-9, e4m3's smallest step
        inside = tl.where(tl.abs(inside) < 0.015625, (inside + magic) - magic, rounded.to(tl.float32, bitcast=True))
        codes = inside.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(values == values, codes, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return values.to(tl.float8e4nv)  # saturates


@triton.jit
def from_e4m3(values):
    """To float32; NaN stays NaN."""
    wide = values.to(tl.float32)
    if INTERPRETED:  # where NaN is read as 480
        return tl.where(tl.abs(wide) > LARGEST, float("nan"), wide)
    return wide


@triton.jit
def larger(a, b):
    """Of two magnitudes; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(magnitudes, AXIS: tl.constexpr):
    """Of magnitudes along AXIS; NaN if one is.

    `tl.max` passes over NaN, but not if it compares bits: those of floats without a sign are in the order of the
    floats, and NaN's come last.
    """
    return tl.max(magnitudes.to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def power_scale(magnitude, LIMIT: tl.constexpr):
    """As in `e4m3`, bit for bit."""
    within = magnitude * (1.75 / LIMIT)
    power = (within.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
    scale = tl.where(within < float("inf"), power.to(tl.float32, bitcast=True), within)
    return tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)


@triton.jit
def row_scale(magnitude):
    """The scale of an e4m3 row whose largest magnitude this is. NaN for NaN: whatever is computed from the row is NaN
    then, and somebody sees it."""
    return power_scale(magnitude, LIMIT)


def block_of(columns: int) -> int:
    """The power of two that holds a whole row."""
    return 1 << (columns - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """As `triton.cdiv`, which takes microseconds on the host."""
    return -(-a // b)


def row_warps(block: int) -> int:
    """Warps for one row: about 16 values a thread."""
    return max(1, min(16, block // 512))


class Processors(NamedTuple):
    number: int
    shared_memory: int
    """Bytes that the programs on one of them can have together, and any one alone."""


@functools.cache
def processors(device: torch.device) -> Processors:
    if INTERPRETED:
        return Processors(1, 16384)  # few and small, so that tests need no more rows than that
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Processors(found["multiprocessor_count"], found["max_shared_mem"])


_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """Run `kernel` over `grid`; `constants` are its constexpr parameters, in the order in which it names them.

    Triton looks every argument over at every launch, which takes longer than most of these kernels run (40 us and more
    on the CPU of a GPU server, some 80 launches a layer). What it finds depends on types, integers and alignments
    alone, so for those it is asked once.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    # by identity: a kernel's own hash is that of its source
    key = (
        id(kernel),
        arguments[0].device,
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
    """All that Triton's specialisation can depend on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15
    return float if isinstance(argument, float) else argument

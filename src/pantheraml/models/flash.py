"""FlashAttention 4: causal attention over rows or packed documents, where the package `flash-attn-4` is installed.

It is an extra (`pip install 'pantheraml[flash]'`): a pre-release whose kernels are compiled at first use. One layer's
attention on an H200, forward and backward, 4 x 2048 tokens: 1,047 us against cuDNN's 1,131 (32/8 heads of 128), 639
against 758 (32/8 heads of 64), and 711 against 1,182 of torch's variable-length kernel over packed documents.

The package's two functions are wrapped as custom ops, so that autograd, torch.compile and selective checkpointing each
see one operation. `supports` decides whether a call may use them. The first call of each variant compiles the kernels
and compares them with torch's attention; if that fails, a warning gives the reason, and torch's kernels are used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from pantheraml.base import log
from pantheraml.models.block_mask import block_mask

logger = log.get(__name__)

PACKAGE, RELEASE = "flash-attn-4", "4.0.0b36"
"""The package has no stable API: only the release that was measured is used."""

CAPABILITY = 9
"""Compute capability 9.x, where it was measured."""

HEAD_DIMS = (64, 96, 128)
"""Multiples of 32. This release pads others to 16 where it accumulates dQ, and to 32 where it reads the sum."""

SHORTEST = 256
"""Minimum tokens per row. Rows of one block use other kernels, which are not worth compiling."""

PADDED_TO = 128
"""The backward pads each document to a multiple of this many tokens; empty ones take a block each."""

MANY = 256
"""With more documents this release searches them differently, which compiles separate kernels."""

_DTYPES = (torch.float16, torch.bfloat16)
_failed: set[tuple[torch.device, torch.dtype, int]] = set()
"""Device, dtype and head size of kernels that failed."""
_TOLERANCE = 2e-2
"""Relative to a norm: bf16 leaves 0.3 %, while one token too many or too few changes it by more."""


@dataclass(frozen=True)
class KernelVariant:
    """Everything that determines which kernels are compiled."""

    dtype: torch.dtype
    head_dim: int
    groups: int
    """Query heads per key head."""
    packed: bool
    windowed: bool
    many: bool

    def __str__(self) -> str:
        layout = "packed documents" if self.packed else "whole rows"
        window = " with a sliding window" if self.windowed else ""
        return f"{layout}{window}, {self.groups} x heads of {self.head_dim}, {str(self.dtype).removeprefix('torch.')}"


def supports(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor | None, *, window: int | None, dropout: float
) -> bool:
    """Return whether to use `attend`; tensors in transformers' layout, [B, H, S, D]."""
    documents = 0 if boundaries is None else boundaries.shape[0] - 1
    return (
        query.is_cuda
        and query.dtype == key.dtype == value.dtype
        and fits(query.dtype, query.shape, value.shape[-1], documents=documents, dropout=dropout)
        and not torch.are_deterministic_algorithms_enabled()  # dK is accumulated in no fixed order
        and _works(
            query.device,
            query.dtype,
            query.shape[-1],
            query.shape[1] // key.shape[1],
            boundaries is not None,
            window is not None,
            documents > MANY,
        )
    )


def fits(dtype: torch.dtype, shape: Sequence[int], value_dim: int, *, documents: int, dropout: float) -> bool:
    """Return whether the kernels support it without wasting memory. `documents`: 0 if each row is one."""
    rows, _, width, head_dim = shape
    return (
        dtype in _DTYPES
        and dropout == 0.0
        and head_dim == value_dim
        and head_dim in HEAD_DIMS
        and width >= SHORTEST
        and documents * PADDED_TO <= rows * width
    )


def likely_supported(device: torch.device, dtype: torch.dtype, head_dim: int, width: int) -> bool:
    """Return whether calls with these heads and rows will use these kernels, as far as known before a call."""
    return (
        device.type == "cuda"
        and dtype in _DTYPES
        and head_dim in HEAD_DIMS
        and width >= SHORTEST
        and (device, dtype, head_dim) not in _failed
        and not torch.are_deterministic_algorithms_enabled()
        and _installed()
        and _has_capability(device)
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor | None,
    *,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """[B, H, S, D] -> [B, S, H, D]; `window` includes the token itself."""
    rows, _, width, head_dim = query.shape
    tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if boundaries is not None:
        tensors = [tensor.flatten(0, 1) for tensor in tensors]
    scale = head_dim**-0.5 if scaling is None else scaling
    out: Tensor = torch.ops.pantheraml.flash_forward(*tensors, boundaries, width, scale, window)[0]
    return out if boundaries is None else out.unflatten(0, (rows, width))


@custom_op(
    "pantheraml::flash_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? boundaries, int width, float scale, int? window)"
    " -> (Tensor, Tensor)",
)
def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor | None,
    width: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Rows [B, S, H, D], or concatenated documents [T, H, D] of at most `width` tokens each.

    Returns the attention output and the logsumexp, [B, H, S] or [H, T].
    """
    arguments = _arguments(boundaries, width, scale, window)
    with torch.cuda.device_of(query):
        out, sums = _package()._flash_attn_fwd(query, key, value, return_lse=True, **arguments)[:2]
    return out, sums


@custom_op(
    "pantheraml::flash_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, Tensor? boundaries,"
    " int width, float scale, int? window) -> (Tensor, Tensor, Tensor)",
)
def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    boundaries: Tensor | None,
    width: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _gradients(query, key, value)
    arguments = _arguments(boundaries, width, scale, window)
    with torch.cuda.device_of(query):
        # An expanded gradient would compile a separate kernel.
        _package()._flash_attn_bwd(
            query, key, value, out, gradient.contiguous(), sums, dq=dq, dk=dk, dv=dv, **arguments
        )
    return dq, dk, dv


@flash_forward.register_fake
def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor | None, *settings: object
) -> tuple[Tensor, Tensor]:
    *places, heads, _ = query.shape
    shape = (heads, *places) if len(places) == 1 else (places[0], heads, places[1])
    return query.new_empty((*places, heads, value.shape[-1])), query.new_empty(shape, dtype=torch.float32)


@flash_backward.register_fake
def _fake_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(query, key, value)


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _arguments(boundaries: Tensor | None, width: int, scale: float, window: int | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "causal": True,
        "softmax_scale": scale,
        "window_size_left": None if window is None else window - 1,
    }
    if boundaries is not None:
        arguments |= {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
        # The row length, not the longest document's: an upper bound suffices, and some kernels are specialized on it.
        arguments |= {"max_seqlen_q": width, "max_seqlen_k": width}
    return arguments


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, boundaries, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, boundaries)
    ctx.set_materialize_grads(False)  # no zero gradient for the logsumexp


def _backward(ctx: Any, gradient: Tensor, _of_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.pantheraml.flash_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, None, None, None, None)


flash_forward.register_autograd(_backward, setup_context=_setup_context)


@functools.cache
def _package() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


@functools.cache
def _installed() -> bool:
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    if version != RELEASE:
        logger.warning(
            "%s %s is installed, but only %s is supported: using torch's attention", PACKAGE, version, RELEASE
        )
    return version == RELEASE


def _has_capability(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == CAPABILITY


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _works(
    device: torch.device, dtype: torch.dtype, head_dim: int, groups: int, packed: bool, windowed: bool, many: bool
) -> bool:
    """Check a variant given as scalars, which torch.compile can treat as constants."""
    return _checked(device, KernelVariant(dtype, head_dim, groups, packed, windowed, many))


@functools.cache
def _checked(device: torch.device, kind: KernelVariant) -> bool:
    if not _installed() or not _has_capability(device):
        return False
    # In a separate thread, free of the calling step's autocast, checkpointing and stream.
    with ThreadPoolExecutor(1) as pool:
        fault = pool.submit(_fault, device, kind).result()
    if fault is None:
        logger.info("attention (%s) uses %s %s", kind, PACKAGE, RELEASE)
    else:
        _failed.add((device, kind.dtype, kind.head_dim))
        logger.warning("attention (%s) uses torch's kernels: %s %s fails: %s", kind, PACKAGE, RELEASE, fault)
    return fault is None


def _fault(device: torch.device, kind: KernelVariant) -> str | None:
    """Compile the kernels and run them once; return what is wrong with them."""
    try:
        with torch.cuda.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the package's own code
            return _difference(device, kind)
    except Exception as err:  # noqa: BLE001 - a compiler may raise anything; the reason is logged
        return f"{type(err).__name__}: {err}"


def _difference(device: torch.device, kind: KernelVariant) -> str | None:
    """Compare outputs and gradients with torch's in float32, on two rows of random numbers."""
    rows, width, window = 2, SHORTEST, SHORTEST // 4 if kind.windowed else None
    draw = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        values = torch.randn(rows, width, heads, kind.head_dim, generator=draw, device=device)
        return values.to(kind.dtype)

    # views of one matrix, as fused layers pass them
    parts = random(2 * kind.groups + 4).split((2 * kind.groups, 2, 2), dim=2)
    inputs = query, key, value = [part.transpose(1, 2).requires_grad_() for part in parts]
    out_grad = random(2 * kind.groups)
    boundaries = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=device)
    if kind.packed:
        ends = [0, width // 3, width, width] + [rows * width] * (MANY if kind.many else 2)  # the last are empty
        boundaries = torch.tensor(ends, dtype=torch.int32, device=device)
    out = attend(query, key, value, boundaries if kind.packed else None, window=window, scaling=None)
    actual = [out, *torch.autograd.grad(out, inputs, out_grad)]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    key, value = (tensor.repeat_interleave(kind.groups, dim=1) for tensor in exact[1:])
    mask = block_mask(boundaries, rows, width, window)
    expected = F.scaled_dot_product_attention(exact[0], key, value, attn_mask=mask).transpose(1, 2)
    reference = [expected, *torch.autograd.grad(expected, exact, out_grad.float())]
    for name, ours, theirs in zip(("attention", "dQ", "dK", "dV"), actual, reference, strict=True):
        distance = float(((ours.float() - theirs).norm() / theirs.norm()).detach())
        if not distance < _TOLERANCE:  # also catches NaN
            return f"{name} differs from torch's by {distance:.1%}"
    return None

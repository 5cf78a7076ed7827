"""One chunked pass of a linear head over rows of hidden states: label scores and gradients.

With a vocabulary of 128k, the float32 logits of 8,192 tokens take 4.2 GB, and their gradient as much again. Here only
one chunk of logits exists at a time, in a buffer reused by all chunks. Gradients are computed in the forward pass while
a chunk's logits are available, so nothing is recomputed.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E5M2
from pantheraml.kernels.fp8.matmul import fp8_matmul, transposed
from pantheraml.kernels.fp8.quantize_rows import quantize_rows
from pantheraml.kernels.linear_cross_entropy.deferred_grad import DeferredGrad
from pantheraml.kernels.linear_cross_entropy.softmax import Scores, softmax

# Logits per chunk: 2**26 are 128 MiB in bf16, 512 tokens of a 128k vocabulary. Not more, because all activations of a
# step are in memory at that time.
CHUNK_ELEMENTS = 2**26
# The gradient matmul of an fp8 head runs one tile per SM at a time and does not split its sum over the vocabulary: 512
# tokens of width 4,096 are 128 tiles, about one per SM of a large GPU. Narrower models, and larger vocabularies, get
# more tokens per chunk until there are as many tiles, with up to this many times the logits.
TILES_CHUNK_FACTOR = 4
_TILES = 128
# A trainable head uses chunks this many times larger (up to 2 GiB): each chunk reads and writes the whole accumulated
# weight gradient, which with 2**27 took 8 of 121 ms in a full fine-tune of Llama-3.2-1B's shape (8,192 tokens, H200).
# A single chunk needs no accumulation.
TRAINED_CHUNK_FACTOR = 16
# Number of final chunks whose gradients may be deferred. Each takes 64 MiB until then; the result, 4 MiB for a width of
# 4,096, lives as long as the loss.
DEFERRED_CHUNKS = 3
# Rows per matmul tile; chunks are a multiple of it, so that no tile is partly empty.
_TILE = 128
# Above this fraction of tokens with a target, dropping the others costs more in copies than it saves in matmuls.
NEARLY_ALL = 0.9


class LinearHead(NamedTuple):
    """Logits are `hidden @ weight.T + bias`. With `scale`, `weight` is e4m3 with that per-tensor scale."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


class NeededGrads(NamedTuple):
    """Inputs that need a gradient."""

    hidden: bool
    weight: bool
    bias: bool


class HeadCall(NamedTuple):
    """Arguments of an op besides hidden states, weight and bias."""

    targets: Tensor
    target_count: int | None
    scale: Tensor | None
    gradients: bool
    deferred: DeferredGrad | None


def apply_head(
    function: Any,
    hidden: Tensor,
    head: LinearHead,
    targets: Tensor,
    target_count: int | None,
    deferred: DeferredGrad | None = None,
) -> Any:
    """Call `function.apply(hidden rows, weight, bias, HeadCall)` in autocast's dtype."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    # grad mode is always off inside an autograd.Function, so record it here
    call = HeadCall(targets.flatten(), target_count, head.scale, torch.is_grad_enabled(), deferred)
    with torch.autocast(device_type, enabled=False):  # the op chooses its own dtypes
        return function.apply(hidden.flatten(0, -2), head.weight, head.bias, call)


def make_pass(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: HeadCall) -> HeadPass:
    """Create the pass over the rows that have a target, for the forward of a Function called by `apply_head`."""
    positions = target_rows(call.targets, call.target_count)
    rows = HeadRows(select_rows(hidden, positions), select_rows(call.targets, positions), positions)
    needed = NeededGrads(*(call.gradients and need for need in ctx.needs_input_grad[:3]))
    head = LinearHead(weight, bias, call.scale)
    return DensePass(rows, head, needed) if call.scale is None else FP8Pass(rows, head, needed, call.deferred)


def target_rows(targets: Tensor, count: int | None) -> Tensor | None:
    """Indices of the rows with a target, in order; None to use all rows because nearly all have one.

    `count` is the number of targets. Without it, the host must synchronize with the GPU to count them.
    """
    if count is None:
        count = int((targets >= 0).sum())
    if count >= NEARLY_ALL * targets.numel():
        return None
    # A stable sort by "has no target" has a static shape, so it needs no host sync.
    return torch.argsort((targets < 0).to(torch.uint8), stable=True)[:count]


def select_rows(tensor: Tensor, positions: Tensor | None) -> Tensor:
    return tensor if positions is None else tensor.index_select(0, positions)


def scatter_rows(rows: Tensor, positions: Tensor | None, count: int) -> Tensor:
    """Scatter rows back to their positions among `count`, zeros elsewhere."""
    if positions is None:
        return rows
    return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, positions, rows)


def scale_gradient(gradient: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Multiply a gradient by `scale` in float32 and cast it to `dtype`, in one pass: it can be as large as the head.

    `scale` is a scalar or one value per row [rows, 1]; `out` is contiguous and of `dtype`. Torch's mixed-dtype
    multiplication is not vectorized: 156 us for 8,192 rows of 4,096 in bf16 (H200).
    """
    if out is None:
        out = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    if not runs_triton(gradient) or scale.dtype != torch.float32:
        return torch.mul(gradient, scale, out=out)
    from pantheraml.kernels.linear_cross_entropy import triton_kernel

    triton_kernel.scale(gradient.contiguous(), scale, out)
    return out


class HeadRows(NamedTuple):
    """Hidden states, their labels, and their positions among all tokens (None: all tokens)."""

    hidden: Tensor
    labels: Tensor
    positions: Tensor | None = None


def chunk_rows(vocabulary: int, *, trained: bool, fp8_width: int | None = None) -> int:
    """Number of tokens per chunk; `fp8_width`: of the hidden states, if the head is fp8."""
    chunk = max(1, CHUNK_ELEMENTS * (TRAINED_CHUNK_FACTOR if trained else 1) // vocabulary)
    if fp8_width is not None:
        full = _TILE * (_TILES // -(-fp8_width // _TILE))
        chunk = max(chunk, min(full, CHUNK_ELEMENTS * TILES_CHUNK_FACTOR // vocabulary))
    return chunk if chunk < _TILE else chunk // _TILE * _TILE


def deferred_count(vocabulary: int, fp8_width: int) -> int:
    """Number of chunks of an fp8 head to defer: as many tokens as DEFERRED_CHUNKS chunks of CHUNK_ELEMENTS."""
    smallest = chunk_rows(vocabulary, trained=False)
    return max(1, DEFERRED_CHUNKS * smallest // chunk_rows(vocabulary, trained=False, fp8_width=fp8_width))


class HeadPass(ABC):
    """Chunked pass over a head; the needed gradients are accumulated while `scores` runs."""

    d_rows: Tensor | None = None
    """Gradient of all rows except the deferred ones."""
    d_weight: Tensor | None = None
    d_bias: Tensor | None = None

    def __init__(self, rows: HeadRows, head: LinearHead, needed: NeededGrads, deferred_chunks: int = 0) -> None:
        self.rows, self.needed = rows, needed
        count, vocabulary = rows.hidden.shape[0], head.weight.shape[0]
        fp8_width = None if head.scale is None else head.weight.shape[1]
        self._chunk = chunk_rows(vocabulary, trained=needed.weight, fp8_width=fp8_width)
        self._logits = rows.hidden.new_empty(min(self._chunk, count), vocabulary)
        chunks = -(-count // self._chunk)
        self._deferred_start = max(0, chunks - deferred_chunks) * self._chunk if deferred_chunks else count
        if needed.hidden:
            self.d_rows = torch.empty_like(rows.hidden[: self._deferred_start])

    def scores(self, *, details: bool) -> Scores:
        """Score each row's label; rows with a negative label are ignored."""
        hidden, labels, _ = self.rows
        scores_out = Scores.empty(hidden, details=details)
        for start in range(0, hidden.shape[0], self._chunk):
            chunk = slice(start, start + self._chunk)
            self._score_chunk(chunk, hidden[chunk], labels[chunk], scores_out.part(chunk))
        return scores_out

    @abstractmethod
    def _score_chunk(self, chunk: slice, x: Tensor, labels: Tensor, scores: Scores) -> None:
        """Process one chunk with hidden states `x`: write `scores`, accumulate gradients."""


class DensePass(HeadPass):
    """A head that may be trainable. `row_weights`, one per row, weight the head's own gradient."""

    def __init__(
        self, rows: HeadRows, head: LinearHead, needed: NeededGrads, row_weights: Tensor | None = None
    ) -> None:
        super().__init__(rows, head, needed)
        dtype = rows.hidden.dtype
        self._weight = head.weight.to(dtype)
        self._bias = None if head.bias is None else head.bias.to(dtype)
        self._row_weights = row_weights
        self._accum_dtype = accum_dtype = torch.promote_types(dtype, torch.float32)
        if needed.weight and not len(rows.hidden):
            self.d_weight = torch.zeros_like(head.weight, dtype=accum_dtype)
        if needed.bias and head.bias is not None:
            self.d_bias = torch.zeros_like(head.bias, dtype=accum_dtype)

    def _score_chunk(self, chunk: slice, x: Tensor, labels: Tensor, scores: Scores) -> None:
        logits = self._logits[: x.shape[0]]
        if self._bias is None:
            torch.mm(x, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, x, self._weight.t(), out=logits)
        self._softmax(logits, labels, scores, logits if any(self.needed) else None)
        if self._row_weights is not None:
            logits *= self._row_weights[chunk, None]
        if self.d_rows is not None:
            torch.mm(logits, self._weight, out=self.d_rows[chunk])
        if self.needed.weight:
            self._accumulate_weight(logits.t() @ x, only_chunk=len(x) == len(self.rows.hidden))
        if self.d_bias is not None:
            self.d_bias += logits.sum(0, dtype=self.d_bias.dtype)

    def _accumulate_weight(self, update: Tensor, *, only_chunk: bool) -> None:
        if self.d_weight is None:
            self.d_weight = update if only_chunk else update.to(self._accum_dtype)
        else:
            self.d_weight += update

    def _softmax(self, logits: Tensor, labels: Tensor, scores: Scores, gradient: Tensor | None) -> None:
        softmax(logits, labels, scores, gradient)


class FP8Pass(HeadPass):
    """A frozen e4m3 head: both matmuls run in fp8.

    The e5m2 logit gradient is half as large as the logits. The transposed head (0.5 GiB for 128k x 4096) is made once
    per pass, not per chunk. With `deferred`, the gradients of the last rows are computed on demand, in one matmul.
    """

    def __init__(
        self, rows: HeadRows, head: LinearHead, needed: NeededGrads, deferred: DeferredGrad | None = None
    ) -> None:
        assert head.bias is None
        assert head.scale is not None
        deferred_chunks = deferred_count(*head.weight.shape) if deferred is not None and needed.hidden else 0
        super().__init__(rows, head, needed, deferred_chunks)
        self._qweight, self._scale, self._deferred = head.weight, head.scale, deferred
        self._scales = head.scale.expand(head.weight.shape[0]).contiguous()
        if needed.hidden:
            self._qweight_t = transposed(head.weight)
            capacity = max(self._logits.shape[0], rows.hidden.shape[0] - self._deferred_start)
            self._gradient = self._logits.new_empty(capacity, head.weight.shape[0], dtype=E5M2)
            self._gradient_scales = self._logits.new_empty(capacity, dtype=torch.float32)

    def scores(self, *, details: bool) -> Scores:
        scores_out = super().scores(details=details)
        deferred_rows = self.rows.hidden[self._deferred_start :]
        if self._deferred is not None and deferred_rows.shape[0]:
            matmul = self._gradient_matmul(slice(deferred_rows.shape[0]), deferred_rows.dtype)
            self._deferred.defer(matmul, deferred_rows.device)
        return scores_out

    def _score_chunk(self, chunk: slice, x: Tensor, labels: Tensor, scores: Scores) -> None:
        count = x.shape[0]
        logits = fp8_matmul(*quantize_rows(x), self._qweight, self._scales, x.dtype, out=self._logits[:count])
        if self.d_rows is None:
            softmax(logits, labels, scores)
            return
        first = max(0, chunk.start - self._deferred_start)
        buffer_rows = slice(first, first + count)
        softmax(logits, labels, scores, self._gradient[buffer_rows], self._gradient_scales[buffer_rows])
        if chunk.start < self._deferred_start:
            self._gradient_matmul(buffer_rows, x.dtype)(out=self.d_rows[chunk])

    def _gradient_matmul(self, buffer_rows: slice, dtype: torch.dtype) -> Callable[..., Tensor]:
        """Matmul for the hidden states' gradient. The closure keeps its operands alive, but not the logits."""
        gradient, scales = self._gradient[buffer_rows], self._gradient_scales[buffer_rows] * self._scale
        return functools.partial(fp8_matmul, gradient, scales, self._qweight_t, None, dtype, long_sum=True)

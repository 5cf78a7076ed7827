"""One pass of a linear head over rows of hidden states: the scores of their labels, and the gradients.

With a vocabulary of 128k, the float32 logits of 8,192 tokens take 4.2 GB, and their gradient as much again; here only
one chunk of them exists at a time, in one piece of memory that all chunks share. The gradient is formed while a chunk's
logits are at hand, so nothing is computed twice.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.e4m3 import E5M2
from pantheraml.kernels.fp8_product import fp8_product, transposed
from pantheraml.kernels.linear_cross_entropy.later import Later
from pantheraml.kernels.linear_cross_entropy.softmax import Scores, softmax
from pantheraml.kernels.quantise_rows import quantise_rows

# Logits of one chunk: 2**26 are 128 MiB in bf16, 512 tokens of a vocabulary of 128k. In the product for the gradient
# that makes 128 tiles, about as many as a large GPU has processors. No more, because all activations of a step are in
# memory at that time.
CHUNK_ELEMENTS = 2**26
# A trained head has larger ones, up to 2 GiB: after each, the sum of its gradient is read and written as a whole, which
# with 2**27 took 8 of 121 ms in a full fine-tune of Llama-3.2-1B's shape (8,192 tokens, H200). One chunk needs no sum.
TRAINED_CHUNKS = 16
# Chunks, the last ones, whose gradients may be formed later. Each takes 64 MiB until then; what comes of it, 4 MiB for
# a width of 4,096, stays for as long as somebody holds the loss.
LATER_CHUNKS = 3
# Rows of a tile of the matrix product; a chunk is a multiple of it, so that none is half empty.
_TILE = 128
# From this share of targets that count, leaving the others out of the products costs more copying than it saves.
NEARLY_ALL = 0.9


class LinearHead(NamedTuple):
    """Logits are `hidden @ weight.T + bias`; with `scale`, `weight` is e4m3, all of it to be multiplied by that."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


class Wanted(NamedTuple):
    """Gradients that somebody will ask for."""

    hidden: bool
    weight: bool
    bias: bool


class Call(NamedTuple):
    """What an op is asked, besides hidden states, weight and bias."""

    targets: Tensor
    target_count: int | None
    scale: Tensor | None
    gradients: bool
    later: Later | None


def apply_head(
    function: Any,
    hidden: Tensor,
    head: LinearHead,
    targets: Tensor,
    target_count: int | None,
    later: Later | None = None,
) -> Any:
    """`function.apply(rows of hidden states, weight, bias, Call)`, in autocast's dtype."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    # a Function cannot tell whether gradients are on: inside it they are always off
    call = Call(targets.flatten(), target_count, head.scale, torch.is_grad_enabled(), later)
    with torch.autocast(kind, enabled=False):  # the op chooses its own dtypes
        return function.apply(hidden.flatten(0, -2), head.weight, head.bias, call)


def open_pass(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> HeadPass:
    """Over the rows whose targets count, for the forward of a Function that `apply_head` calls."""
    kept = kept_rows(call.targets, call.target_count)
    rows = Rows(taken(hidden, kept), taken(call.targets, kept), kept)
    wanted = Wanted(*(call.gradients and need for need in ctx.needs_input_grad[:3]))
    head = LinearHead(weight, bias, call.scale)
    return DensePass(rows, head, wanted) if call.scale is None else FP8Pass(rows, head, wanted, call.later)


def kept_rows(targets: Tensor, count: int | None) -> Tensor | None:
    """Where the targets are that count, in order; None if all rows are to be taken, because nearly all count.

    `count` is how many do. Without it the host must wait for the GPU to find out.
    """
    if count is None:
        count = int((targets >= 0).sum())
    if count >= NEARLY_ALL * targets.numel():
        return None
    # A stable sort by "does not count": nobody has to ask the GPU how many there are.
    return torch.argsort((targets < 0).to(torch.uint8), stable=True)[:count]


def taken(whole: Tensor, kept: Tensor | None) -> Tensor:
    return whole if kept is None else whole.index_select(0, kept)


def put_back(rows: Tensor, kept: Tensor | None, count: int) -> Tensor:
    """Rows in their places among `count`, zeros elsewhere."""
    if kept is None:
        return rows
    return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, kept, rows)


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """In one pass over the gradient, which may be as large as the model's embedding; in float32 until it is written.
    `scale` is one number, or one for each row [rows, 1]; `out` is of `dtype`, in one piece.

    Where dtypes differ torch takes value by value: 156 us for 8,192 rows of 4,096 in bf16 (H200)."""
    if out is None:
        out = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    if not runs_triton(gradient) or scale.dtype != torch.float32:
        return torch.mul(gradient, scale, out=out)
    from pantheraml.kernels.linear_cross_entropy import triton_kernel

    triton_kernel.scale(gradient.contiguous(), scale, out)
    return out


class Rows(NamedTuple):
    """Hidden states, the labels that they are to predict, and (None: all) where they were taken from."""

    hidden: Tensor
    labels: Tensor
    kept: Tensor | None = None


def chunk_rows(vocabulary: int, *, trained: bool) -> int:
    """How many tokens' logits may be in memory at a time."""
    chunk = max(1, CHUNK_ELEMENTS * (TRAINED_CHUNKS if trained else 1) // vocabulary)
    return chunk if chunk < _TILE else chunk // _TILE * _TILE


class HeadPass(ABC):
    """What is wanted of gradients is summed up while `scores` goes through the chunks."""

    d_rows: Tensor | None = None
    """Of all rows, but those that are left for later."""
    d_weight: Tensor | None = None
    d_bias: Tensor | None = None

    def __init__(self, rows: Rows, head: LinearHead, wanted: Wanted, later_chunks: int = 0) -> None:
        self.rows, self.wanted = rows, wanted
        count, vocabulary = rows.hidden.shape[0], head.weight.shape[0]
        self._chunk = chunk_rows(vocabulary, trained=wanted.weight)
        self._logits = rows.hidden.new_empty(min(self._chunk, count), vocabulary)
        chunks = -(-count // self._chunk)
        self._left_from = max(0, chunks - later_chunks) * self._chunk if later_chunks else count
        if wanted.hidden:
            self.d_rows = torch.empty_like(rows.hidden[: self._left_from])

    def scores(self, *, details: bool) -> Scores:
        """Of each row's label; those that are negative do not count."""
        hidden, labels, _ = self.rows
        found = Scores.room(hidden, details=details)
        for start in range(0, hidden.shape[0], self._chunk):
            span = slice(start, start + self._chunk)
            self._score(span, hidden[span], labels[span], found.part(span))
        return found

    @abstractmethod
    def _score(self, span: slice, x: Tensor, labels: Tensor, scores: Scores) -> None:
        """One chunk, the rows `x`: writes `scores`, adds to the gradients."""


class DensePass(HeadPass):
    """A head that may be trained itself. `weights`, one a row, multiply the gradients of the head."""

    def __init__(self, rows: Rows, head: LinearHead, wanted: Wanted, weights: Tensor | None = None) -> None:
        super().__init__(rows, head, wanted)
        dtype = rows.hidden.dtype
        self._weight = head.weight.to(dtype)
        self._bias = None if head.bias is None else head.bias.to(dtype)
        self._weights = weights
        self._wide = wide = torch.promote_types(dtype, torch.float32)
        if wanted.weight and not len(rows.hidden):
            self.d_weight = torch.zeros_like(head.weight, dtype=wide)
        if wanted.bias and head.bias is not None:
            self.d_bias = torch.zeros_like(head.bias, dtype=wide)

    def _score(self, span: slice, x: Tensor, labels: Tensor, scores: Scores) -> None:
        logits = self._logits[: x.shape[0]]
        if self._bias is None:
            torch.mm(x, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, x, self._weight.t(), out=logits)
        self._softmax(logits, labels, scores, logits if any(self.wanted) else None)
        if self._weights is not None:
            logits *= self._weights[span, None]
        if self.d_rows is not None:
            torch.mm(logits, self._weight, out=self.d_rows[span])
        if self.wanted.weight:
            self._add_to_weight(logits.t() @ x, is_all=len(x) == len(self.rows.hidden))
        if self.d_bias is not None:
            self.d_bias += logits.sum(0, dtype=self.d_bias.dtype)

    def _add_to_weight(self, product: Tensor, *, is_all: bool) -> None:
        if self.d_weight is None:
            self.d_weight = product if is_all else product.to(self._wide)
        else:
            self.d_weight += product

    def _softmax(self, logits: Tensor, labels: Tensor, scores: Scores, gradient: Tensor | None) -> None:
        softmax(logits, labels, scores, gradient)


class FP8Pass(HeadPass):
    """A frozen head in e4m3: both products run in fp8.

    The gradient in e5m2 is half as large as the logits. The transposed head (0.5 GiB for 128k x 4096) is made once a
    pass, not once a chunk. With `later` the gradients of the last rows are formed when that is asked, in one product.
    """

    def __init__(self, rows: Rows, head: LinearHead, wanted: Wanted, later: Later | None = None) -> None:
        assert head.bias is None
        assert head.scale is not None
        super().__init__(rows, head, wanted, LATER_CHUNKS if later is not None and wanted.hidden else 0)
        self._payload, self._scale, self._later = head.weight, head.scale, later
        self._scales = head.scale.expand(head.weight.shape[0]).contiguous()
        if wanted.hidden:
            self._turned = transposed(head.weight)
            room = max(self._logits.shape[0], rows.hidden.shape[0] - self._left_from)
            self._gradient = self._logits.new_empty(room, head.weight.shape[0], dtype=E5M2)
            self._gradient_scales = self._logits.new_empty(room, dtype=torch.float32)

    def scores(self, *, details: bool) -> Scores:
        found = super().scores(details=details)
        left = self.rows.hidden[self._left_from :]
        if self._later is not None and left.shape[0]:
            self._later.leave(self._product(slice(left.shape[0]), left.dtype), left.device)
        return found

    def _score(self, span: slice, x: Tensor, labels: Tensor, scores: Scores) -> None:
        count = x.shape[0]
        logits = fp8_product(*quantise_rows(x), self._payload, self._scales, x.dtype, out=self._logits[:count])
        if self.d_rows is None:
            softmax(logits, labels, scores)
            return
        first = max(0, span.start - self._left_from)
        room = slice(first, first + count)
        softmax(logits, labels, scores, self._gradient[room], self._gradient_scales[room])
        if span.start < self._left_from:
            self._product(room, x.dtype)(out=self.d_rows[span])

    def _product(self, room: slice, dtype: torch.dtype) -> Callable[..., Tensor]:
        """Holds what it needs, and not the logits."""
        gradient, scales = self._gradient[room], self._gradient_scales[room] * self._scale
        return functools.partial(fp8_product, gradient, scales, self._turned, None, dtype, long_sum=True)

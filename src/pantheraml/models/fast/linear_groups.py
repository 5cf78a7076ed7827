"""Linear groups with LoRA: linear layers that read the same input, and their adapters, as one matmul.

A group has one matrix: the frozen weights of its layers stacked by rows, extra columns on the right for every adapter's
B, and extra rows below for every adapter's A (see `kernels.lora_columns` for the algebra); or one matrix per direction
(see `group_storage`). The layers keep their names, their PEFT adapters and their weights, which are views of that
matrix or what it is dequantized from. So saving, merging and switching adapters work as usual, and a layer called on
its own returns what it always did.

Before each forward of the model the adapters' current values are copied into the matrices. Always, and not only when
they changed: fused optimizers change parameters without bumping their version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pantheraml.kernels.fp8.matmul import fp8_matmul
from pantheraml.kernels.fp8.quantize_rows import copy_rows, quantize_rows
from pantheraml.kernels.lora_columns import (
    COLUMNS,
    DIVISOR,
    Adapter,
    AdapterBuffers,
    GradMatmul,
    LeftOperand,
    Projection,
    adapter_gradients,
    add_columns,
    add_columns_backward,
    block_table,
    segment_table,
)
from pantheraml.kernels.nf4.format import BLOCK
from pantheraml.models.fast.group_operand import Operand
from pantheraml.models.fast.group_storage import GroupShape, make_storage
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.planner.precision import FP8_CAPABILITY

MAX_RANK = 512
"""Largest adapter rank: three wider ones side by side exceed what the kernels support."""

_PLAIN_COLUMNS = 64
"""Granularity of `pad_cols` in bf16; in fp8 it is COLUMNS."""


@dataclass(frozen=True)
class _Member:
    """One layer's share of the matrix: its rows and, with an adapter, its columns."""

    layer: Any
    start: int
    stop: int
    column: int
    rank: int
    has_dropout: bool


def base_of(layer: nn.Module) -> Any:
    return layer.base_layer if isinstance(layer, LoraLayer) else layer


def why_not_fused(layer: nn.Module) -> str | None:
    """Return why this layer cannot be fused in its current state, or None if it can."""
    reason = _why_not_base(base_of(layer))
    return _why_not_adapter(layer) if reason is None and isinstance(layer, LoraLayer) else reason


def _why_not_base(base: Any) -> str | None:
    if getattr(base, "bias", None) is not None and base.bias.requires_grad:
        return "its bias is trainable"
    if type(base) is nn.Linear:
        if base.weight.requires_grad:
            return "its weight is trainable"
    elif isinstance(base, NF4Linear):
        if base.from_conv1d:
            return "it is a Conv1D in nf4"
        if base.in_features % BLOCK:
            return f"its width is not a multiple of {BLOCK}, so nf4 blocks would span two rows"
        device = base.qweight.device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            return "fused nf4 layers use fp8 matmuls, which this GPU does not support"
    elif not isinstance(base, FP8Linear):
        return f"it is a {type(base).__name__}"
    if base.in_features % DIVISOR or base.out_features % DIVISOR:
        return f"its width or height is not a multiple of {DIVISOR}"
    return None


def _why_not_adapter(layer: Any) -> str | None:
    if layer.disable_adapters or layer.merged:
        return "its adapter is disabled or merged"
    if len(layer.active_adapters) != 1 or layer.active_adapters[0] not in layer.lora_A:
        return "it does not have exactly one active adapter"
    name = layer.active_adapters[0]
    if layer.training and not isinstance(layer.lora_dropout[name], nn.Identity):
        return "its adapter has dropout"
    if name in layer.lora_magnitude_vector:
        return "its adapter is DoRA"
    if name in layer.lora_variant:
        return f"its adapter is a variant of LoRA ({type(layer.lora_variant[name]).__name__})"
    if layer.lora_B[name].bias is not None:
        return "its adapter has a bias"
    if layer.r[name] > MAX_RANK:
        return f"its adapter's rank is above {MAX_RANK}"
    return None


class LoraGroup:
    """Frozen linear layers with one input and their adapters, fused into one matmul."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Take over the layers' weights; `why_not_fused` is None for each."""
        self.layers = layers
        bases: list[Any] = [base_of(layer) for layer in layers]
        self.quantized = isinstance(bases[0], FP8Linear | NF4Linear)
        self.width: int = bases[0].in_features
        self.members = _members(layers)
        self.height = self.members[-1].stop
        self.ranks = sum(member.rank for member in self.members)
        unit = COLUMNS if self.quantized else _PLAIN_COLUMNS
        self.pad_cols = -(-self.ranks // unit) * unit
        self.names = [layer.active_adapters[0] if isinstance(layer, LoraLayer) else None for layer in layers]
        self._storage = make_storage(bases, GroupShape(self.height, self.width, self.ranks, self.pad_cols))
        self.scales = self._storage.scales
        self.shared_scale = _shared(self.scales)
        """The scale of all rows of W, if they share one."""
        self.multiplier = self.scales if self.shared_scale is None else None
        """Factor applied to a gradient of the output before it is quantized: in backward, per-row scales of W lie along
        the inner dimension of the matmul.
        """
        self.device = self._storage.up.device
        self.dtype = self._output_dtype()
        self._cast_biases: torch.dtype | None = None
        """Dtype of biases that were cast, or None: they share memory with `bias`."""
        self.bias = self._stacked_bias(bases)
        self._allocate_adapter_buffers()

    def _output_dtype(self) -> torch.dtype:
        if not self.quantized:
            return self._storage.up.dtype
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _stacked_bias(self, bases: list[Any]) -> Tensor | None:
        """Stack the biases. Of another dtype than the matmuls', they are cast here, once."""
        if all(base.bias is None for base in bases):
            return None
        pieces = [
            torch.zeros(base.out_features, dtype=self.dtype, device=self.device)
            if base.bias is None
            else base.bias.detach()
            for base in bases
        ]
        stacked = torch.cat(pieces).to(self.dtype)
        self._cast_biases = next((base.bias.dtype for base in bases if base.bias is not None), self.dtype)
        if self._cast_biases == self.dtype:
            self._cast_biases = None
        for base, piece in zip(bases, stacked.split([base.out_features for base in bases]), strict=True):
            if base.bias is not None and base.bias.dtype == self.dtype:
                base.bias.data = piece  # as the weights are: what is loaded into it is what the matmul adds
        return stacked

    def _allocate_adapter_buffers(self) -> None:
        device, ranks = self.device, self.ranks
        self._rank = max((member.rank for member in self.members), default=0)
        self._up = torch.zeros(self._rank, self.height, dtype=self._storage.up.dtype, device=device)
        self._unit_down, self._unit_up = torch.zeros(2, max(1, self.pad_cols), dtype=torch.float32, device=device)
        whole = [(0, self.width, 0, ranks)] if ranks else []
        pieces = [(m.start, m.stop - m.start, m.column, m.rank) for m in self.members if m.rank]
        units = self._unit_down, self._unit_up
        self._down_projection = Projection(self._storage.down, segment_table(whole, device), ranks, units)
        self._up_projection = Projection(self._up, segment_table(pieces, device), ranks, units[::-1])
        self._blocks = block_table(whole, device), block_table(pieces, device)
        self._divisors: Tensor | None = None
        self._input_scales = None
        if self.shared_scale is not None:
            self._input_scales = torch.full((self.width,), self.shared_scale, device=device)
        self._parameters: list[nn.Parameter] = []

    def adapters(self) -> list[Adapter]:
        """Return every adapter with its current parameters and destination buffers."""
        adapters = []
        self._parameters = []
        for m, name in zip(self.members, self.names, strict=True):
            if name is None:
                continue
            rows, columns = slice(m.start, m.stop), slice(m.column, m.column + m.rank)
            buffers = AdapterBuffers(
                matrix_up=self._storage.up[rows, columns],
                matrix_down=self._storage.down[columns],
                scales=None if self.scales is None else self.scales[rows],
                factor_up=self._up[: m.rank, rows],
                scale_down=self._unit_down[columns],
                scale_up=self._unit_up[columns],
            )
            down, up, scaling = m.layer.lora_A[name].weight, m.layer.lora_B[name].weight, float(m.layer.scaling[name])
            adapters.append(Adapter(down, up, scaling, buffers))
            self._parameters += [down, up]
        self._divisors = self._make_divisors([adapter.scaling for adapter in adapters])
        return adapters

    def _make_divisors(self, scalings: list[float]) -> Tensor | None:
        """Return the per-row divisors of B's gradient, which carries W's scales and lacks the adapter's scaling."""
        if self.multiplier is None and all(scaling == 1 for scaling in scalings):
            return None
        divisors = torch.ones(self.height, device=self.device) if self.multiplier is None else self.multiplier.clone()
        adapted = [member for member in self.members if member.rank]
        for member, scaling in zip(adapted, scalings, strict=True):
            divisors[member.start : member.stop] /= scaling
        return divisors

    def why_not(self) -> str | None:
        """Return why this group's layers must run one by one now, or None. Checks only what can change."""
        if any(weight.requires_grad for layer in self.layers for weight in base_of(layer).parameters(recurse=False)):
            return "a weight or bias of the base is trainable"
        for member, name in zip(self.members, self.names, strict=True):
            layer = member.layer
            if name is None:
                continue
            if layer.disable_adapters or layer.merged_adapters:
                return "an adapter is disabled or merged"
            if layer.active_adapters != [name]:
                return "another adapter is active"
            if layer.training and member.has_dropout:
                return "an adapter has dropout"
        return None

    @torch.no_grad()
    def take_over(self) -> str | None:
        """Read the current weights of the layers, some of which may have been replaced; return why that cannot be.

        A script may assign to `weight.data`, load a state dict with `assign=True`, or copy the model: parameters of a
        copy share no memory.
        """
        for member in self.members:
            base, rows = base_of(member.layer), slice(member.start, member.stop)
            for name, current in base._parameters.items():
                matrix = self.bias if name == "bias" else self._storage.frozen_weights()
                if current is None or matrix is None:
                    continue
                own = matrix[rows]
                if name == "bias" and current.dtype == self._cast_biases:
                    continue
                if (current.dtype, current.shape, current.device) != (own.dtype, own.shape, own.device):
                    return "a weight of the base has another dtype, shape or device than it had"
                if current.data_ptr() == own.data_ptr():
                    continue
                if current.requires_grad:  # an optimizer may have put it where it is
                    return "a trainable weight of the base has been replaced"
                own.copy_(current)
                current.data = own
        return None

    def parameters(self) -> list[nn.Parameter]:
        """A and B of every adapter, in the order of the gradients that `backward` returns."""
        return self._parameters

    def weights_read_in_backward(self) -> list[nn.Parameter]:
        """Empty: `GroupSet.refresh` has copied A and B to where forward and backward read them."""
        return []

    @contextlib.contextmanager
    def swapped_parameters(self, others: list[nn.Parameter]) -> Iterator[None]:
        """Context in which autograd sees `others` instead of A and B, whose copied values are unchanged."""
        own, self._parameters = self._parameters, others
        try:
            yield
        finally:
            self._parameters = own

    def operand(self, rows: Tensor) -> Operand:
        """Convert plain rows [rows, width] to this group's input."""
        if self.quantized:
            return Operand(*quantize_rows(rows, pad_cols=self.pad_cols))
        return Operand(copy_rows(rows, pad_cols=self.pad_cols, dtype=self.dtype), None)

    def gradient_operand(self, g: Tensor) -> Operand:
        """Convert a gradient of the output [rows, height] to the input of backward."""
        if self.quantized:
            return Operand(*quantize_rows(g, pad_cols=self.pad_cols, multiplier=self.multiplier))
        return Operand(copy_rows(g, pad_cols=self.pad_cols, dtype=self.dtype), None)

    def frozen_weights(self) -> Tensor:
        """Return the stacked weights [height, width] without the adapters, as `scales` scales them."""
        return self._storage.frozen_weights()

    def begin_forward(self, x: Operand) -> Tensor:
        """Return x A' [rows, ranks]. Fills the padding columns of `x`."""
        if not self.ranks:
            return torch.empty(x.qdata.shape[0], 0, dtype=self.dtype, device=self.device)
        return add_columns(x.qdata, self.width, x.scales, self._down_projection, self.dtype)

    def forward(self, x: Operand) -> tuple[Tensor, Tensor]:
        """Return the output [rows, height], and x A' [rows, ranks] for `backward`."""
        lora_mid = self.begin_forward(x)
        matrix = self._storage.forward_matrix()
        if self.quantized:
            assert x.scales is not None
            out = fp8_matmul(x.qdata, x.scales, matrix, self.scales, self.dtype)
        else:
            out = x.qdata @ matrix.T
        return (out if self.bias is None else out + self.bias), lora_mid

    def backward(
        self, g: Operand, x: Operand, lora_mid: Tensor, *, needs_input_grad: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the input's gradient and those of `parameters()`."""
        d_input, lora_operands = self.begin_backward(g, lora_mid, x.scales, needs_input_grad=needs_input_grad)
        return d_input, self.parameter_gradients(g, x, lora_operands)

    def begin_backward(
        self, g: Operand, lora_mid: Tensor, input_scales: Tensor | None = None, *, needs_input_grad: bool = True
    ) -> tuple[Tensor | None, tuple[LeftOperand, LeftOperand] | None]:
        """Return the input's gradient and what `parameter_gradients` needs (None without adapters).

        Fills the padding columns of `g`. `input_scales`: row scales of the forward's input, if known.
        """
        lora_operands = None
        if self.ranks:
            factor = self.shared_scale or 1.0
            lora_operands = add_columns_backward(
                g.qdata, self.height, g.scales, self._up_projection, factor, lora_mid, input_scales
            )
        return (self._input_gradient(g) if needs_input_grad else None), lora_operands

    def parameter_gradients(
        self, g: Operand, x: Operand, lora_operands: tuple[LeftOperand, LeftOperand] | None
    ) -> list[Tensor]:
        """Return the gradients of `parameters()`."""
        if lora_operands is None:
            return []
        down, up = lora_operands
        dtype, device = self._parameters[0].dtype, self.device
        d_down = torch.empty(self.ranks, self.width, dtype=dtype, device=device)
        d_up = torch.empty(self.height, self._rank, dtype=dtype, device=device)
        adapter_gradients(
            GradMatmul(down, x.scales, x.qdata, self._blocks[0], self.ranks, None, d_down),
            GradMatmul(up, g.scales, g.qdata, self._blocks[1], self._rank, self._divisors, d_up.T),
        )
        gradients: list[Tensor] = []
        for m in self.members:
            if m.rank:
                own_up = d_up[m.start : m.stop, : m.rank]
                gradients += [d_down[m.column : m.column + m.rank], own_up.contiguous()]
        return gradients

    def _input_gradient(self, g: Operand) -> Tensor:
        matrix = self._storage.backward_matrix()
        if not self.quantized:
            return g.qdata @ matrix.T
        assert g.scales is not None
        return fp8_matmul(g.qdata, g.scales, matrix, self._input_scales, self.dtype)


def _shared(scales: Tensor | None) -> float | None:
    if scales is None:
        return None
    low, high = scales.aminmax()
    return float(high) if bool(low == high) else None


def _members(layers: Sequence[nn.Module]) -> list[_Member]:
    members, row, column = [], 0, 0
    for layer in layers:
        height = base_of(layer).out_features
        rank, has_dropout = 0, False
        if isinstance(layer, LoraLayer):
            name = layer.active_adapters[0]
            rank, has_dropout = layer.r[name], not isinstance(layer.lora_dropout[name], nn.Identity)
        members.append(_Member(layer, row, row + height, column, rank, has_dropout))
        row, column = row + height, column + rank
    return members

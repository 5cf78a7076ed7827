"""Linear layers that read the same input, with their adapters, as one matrix product.

A group has one matrix: the frozen weights of its layers below each other, room to the right for every adapter's B, and
room below for every adapter's A (see `kernels.lora_columns` for the algebra); or one matrix for each direction (see
`storage`). The layers keep their names, their PEFT adapters and their weights, which are views of that matrix, or what
it is rebuilt from; so files, merging and switching adapters work as always, and a layer that is called alone gives what
it always gave.

Before each forward pass of the model the adapters' current values are written into the matrices. Always, and not only
when they changed: fused optimizers change parameters without raising their version.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, eq, getitem, is_, itemgetter
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pantheraml.kernels.fp8_product import fp8_product
from pantheraml.kernels.lora_columns import (
    COLUMNS,
    DIVISOR,
    Adapter,
    AdapterPlaces,
    AdapterTable,
    Left,
    Projection,
    Side,
    adapter_gradients,
    add_columns,
    add_columns_back,
    blocks_of,
    segments_of,
)
from pantheraml.kernels.nf4 import BLOCK
from pantheraml.kernels.quantise_rows import copy_rows, quantise_rows
from pantheraml.models.fast.operand import Group, Operand
from pantheraml.models.fast.storage import Extent, KeptTwice, store
from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.models.quantise.nf4 import NF4Linear
from pantheraml.planner.choose import FP8_CAPABILITY
from pantheraml.specs.plan import Layouts

MOST_RANKS = 512
"""Of one adapter: with more, three beside each other are wider than the kernels were made for."""

_PLAIN_COLUMNS = 64
"""Room for adapters comes in multiples of this in bf16, and of COLUMNS in fp8."""


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
    """Why this layer cannot be part of a fused product as it stands, or None if it can."""
    reason = _why_not_base(base_of(layer))
    return _why_not_adapter(layer) if reason is None and isinstance(layer, LoraLayer) else reason


def _why_not_base(base: Any) -> str | None:
    if type(base) is nn.Linear:
        if base.weight.requires_grad:
            return "its weight is trained"
    elif isinstance(base, NF4Linear):
        if base.from_conv1d:
            return "it is a Conv1D in nf4"
        if base.in_features % BLOCK:
            return f"its width is not a multiple of {BLOCK}, so that blocks of nf4 span two rows"
        device = base.qweight.device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            return "nf4 weights are multiplied in fp8, which this GPU cannot do"
    elif not isinstance(base, FP8Linear):
        return f"it is a {type(base).__name__}"
    if base.in_features % DIVISOR or base.out_features % DIVISOR:
        return f"its width or height is not a multiple of {DIVISOR}"
    return None


def _why_not_adapter(layer: Any) -> str | None:
    if layer.disable_adapters or layer.merged:
        return "its adapter is switched off or merged"
    if len(layer.active_adapters) != 1 or layer.active_adapters[0] not in layer.lora_A:
        return "it has not exactly one active adapter"
    name = layer.active_adapters[0]
    if layer.training and not isinstance(layer.lora_dropout[name], nn.Identity):
        return "its adapter has dropout"
    if name in layer.lora_magnitude_vector:
        return "its adapter is DoRA"
    if layer.lora_B[name].bias is not None:
        return "its adapter has a bias"
    if layer.r[name] > MOST_RANKS:
        return f"its adapter's rank is above {MOST_RANKS}"
    return None


class ProjectionGroup:
    """Layers with one input, as one product."""

    def __init__(self, layers: Sequence[nn.Module], layouts: Layouts = 1) -> None:
        """Takes the layers' weights over; none of them may have a reason in `why_not_fused`."""
        self.layers = layers
        bases: list[Any] = [base_of(layer) for layer in layers]
        self.quantised = isinstance(bases[0], FP8Linear | NF4Linear)
        self.width: int = bases[0].in_features
        self.members = _members(layers)
        self.height = self.members[-1].stop
        self.ranks = sum(member.rank for member in self.members)
        unit = COLUMNS if self.quantised else _PLAIN_COLUMNS
        self.room = -(-self.ranks // unit) * unit
        self.names = [layer.active_adapters[0] if isinstance(layer, LoraLayer) else None for layer in layers]
        self._storage = store(bases, Extent(self.height, self.width, self.ranks, self.room), layouts)
        self.scales = self._storage.scales
        self.shared_scale = _shared(self.scales)
        """The scale of all rows of W, if it is one and the same."""
        self.multiplier = self.scales if self.shared_scale is None else None
        """What a gradient of the output is multiplied by before it is quantised: on the way back, scales that differ
        from row to row lie along the inner dimension of the product."""
        self.device = self._storage.up.device
        self.dtype = self._output_dtype()
        self.bias = self._joined_bias(bases)
        self._make_room_for_adapters()

    def _output_dtype(self) -> torch.dtype:
        if not self.quantised:
            return self._storage.up.dtype
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _joined_bias(self, bases: list[Any]) -> Tensor | None:
        if all(base.bias is None for base in bases):
            return None
        pieces = [
            torch.zeros(base.out_features, dtype=self.dtype, device=self.device)
            if base.bias is None
            else base.bias.detach()
            for base in bases
        ]
        return torch.cat(pieces).to(self.dtype)

    def _make_room_for_adapters(self) -> None:
        device, ranks = self.device, self.ranks
        self._rank = max((member.rank for member in self.members), default=0)
        self._up = torch.zeros(self._rank, self.height, dtype=self._storage.up.dtype, device=device)
        self._unit_down, self._unit_up = torch.zeros(2, max(1, self.room), dtype=torch.float32, device=device)
        whole = [(0, self.width, 0, ranks)] if ranks else []
        pieces = [(m.start, m.stop - m.start, m.column, m.rank) for m in self.members if m.rank]
        units = self._unit_down, self._unit_up
        self._forth = Projection(self._storage.down, segments_of(whole, device), ranks, units)
        self._back = Projection(self._up, segments_of(pieces, device), ranks, units[::-1])
        self._blocks = blocks_of(whole, device), blocks_of(pieces, device)
        self._divisors: Tensor | None = None
        self._input_scales = None
        if self.shared_scale is not None:
            self._input_scales = torch.full((self.width,), self.shared_scale, device=device)
        self._parameters: list[nn.Parameter] = []

    def kept_twice(self) -> KeptTwice | None:
        """Where the weights are, if they are kept in two layouts."""
        return self._storage if isinstance(self._storage, KeptTwice) else None

    def adapters(self) -> list[Adapter]:
        """Every adapter as it is now, and where it belongs."""
        found, turned = [], self._storage.turned_down
        self._parameters = []
        for m, name in zip(self.members, self.names, strict=True):
            if name is None:
                continue
            rows, columns = slice(m.start, m.stop), slice(m.column, m.column + m.rank)
            places = AdapterPlaces(
                matrix_up=self._storage.up[rows, columns],
                matrix_down=self._storage.down[columns],
                scales=None if self.scales is None else self.scales[rows],
                factor_up=self._up[: m.rank, rows],
                unit_down=self._unit_down[columns],
                unit_up=self._unit_up[columns],
                turned_down=None if turned is None else turned[:, columns],
            )
            down, up, scaling = m.layer.lora_A[name].weight, m.layer.lora_B[name].weight, float(m.layer.scaling[name])
            found.append(Adapter(down, up, scaling, places))
            self._parameters += [down, up]
        self._divisors = self._make_divisors([adapter.scaling for adapter in found])
        return found

    def _make_divisors(self, scalings: list[float]) -> Tensor | None:
        """What B's gradient is divided by, row for row: the gradient carries W's scales, and lacks the adapter's."""
        if self.multiplier is None and all(scaling == 1 for scaling in scalings):
            return None
        divisors = torch.ones(self.height, device=self.device) if self.multiplier is None else self.multiplier.clone()
        adapted = [member for member in self.members if member.rank]
        for member, scaling in zip(adapted, scalings, strict=True):
            divisors[member.start : member.stop] /= scaling
        return divisors

    def why_not(self) -> str | None:
        """Why this group's layers must be called one by one now, or None. Looks only at what can change."""
        for member, name in zip(self.members, self.names, strict=True):
            layer = member.layer
            if name is None:
                continue
            if layer.disable_adapters or layer.merged_adapters:
                return "an adapter is switched off or merged"
            if layer.active_adapters != [name]:
                return "another adapter is active"
            if layer.training and member.has_dropout:
                return "an adapter has dropout"
        return None

    def parameters(self) -> list[nn.Parameter]:
        """A and B of every adapter, in the order in which `backward` gives their gradients."""
        return self._parameters

    def read_back(self) -> list[nn.Parameter]:
        """None: `GroupSet.refresh` has written them where both ways read them."""
        return []

    @contextlib.contextmanager
    def with_parameters(self, others: list[nn.Parameter]) -> Iterator[None]:
        """Autograd sees `others` in the place of A and B, whose values stay where products read them."""
        own, self._parameters = self._parameters, others
        try:
            yield
        finally:
            self._parameters = own

    def operand(self, rows: Tensor) -> Operand:
        """Plain rows [rows, width] as this group's input."""
        if self.quantised:
            return Operand(*quantise_rows(rows, room=self.room))
        return Operand(copy_rows(rows, room=self.room, dtype=self.dtype), None)

    def gradient_operand(self, g: Tensor) -> Operand:
        """A gradient of the output [rows, height] as input of the way back."""
        if self.quantised:
            return Operand(*quantise_rows(g, room=self.room, multiplier=self.multiplier))
        return Operand(copy_rows(g, room=self.room, dtype=self.dtype), None)

    def begin_forward(self, x: Operand) -> Tensor:
        """x A' [rows, ranks]. Completes `x`."""
        if not self.ranks:
            return torch.empty(x.payload.shape[0], 0, dtype=self.dtype, device=self.device)
        return add_columns(x.payload, self.width, x.scales, self._forth, self.dtype)

    def forward(self, x: Operand) -> tuple[Tensor, Tensor]:
        """The output [rows, height], and x A' [rows, ranks] for `backward`."""
        middle = self.begin_forward(x)
        matrix = self._storage.forward_matrix()
        if self.quantised:
            assert x.scales is not None
            out = fp8_product(x.payload, x.scales, matrix, self.scales, self.dtype)
        else:
            out = x.payload @ matrix.T
        return (out if self.bias is None else out + self.bias), middle

    def backward(
        self, g: Operand, x: Operand, middle: Tensor, *, wants_input: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The input's gradient, and those of `parameters()`."""
        d_input, sides = self.begin_backward(g, middle, x.scales, wants_input=wants_input)
        return d_input, self.parameter_gradients(g, x, sides)

    def begin_backward(
        self, g: Operand, middle: Tensor, input_scales: Tensor | None = None, *, wants_input: bool = True
    ) -> tuple[Tensor | None, tuple[Left, Left] | None]:
        """The input's gradient, and what `parameter_gradients` needs (None: there are no adapters). Completes `g`.
        `input_scales` are those of the rows that the way forward began with, if they are known."""
        sides = None
        if self.ranks:
            factor = self.shared_scale or 1.0
            sides = add_columns_back(g.payload, self.height, g.scales, self._back, factor, middle, input_scales)
        return (self._input_gradient(g) if wants_input else None), sides

    def parameter_gradients(self, g: Operand, x: Operand, sides: tuple[Left, Left] | None) -> list[Tensor]:
        """Gradients of `parameters()`."""
        if sides is None:
            return []
        down, up = sides
        dtype, device = self._parameters[0].dtype, self.device
        d_down = torch.empty(self.ranks, self.width, dtype=dtype, device=device)
        d_up = torch.empty(self.height, self._rank, dtype=dtype, device=device)
        adapter_gradients(
            Side(down, x.scales, x.payload, self._blocks[0], self.ranks, None, d_down),
            Side(up, g.scales, g.payload, self._blocks[1], self._rank, self._divisors, d_up.T),
        )
        gradients: list[Tensor] = []
        for m in self.members:
            if m.rank:
                own_up = d_up[m.start : m.stop, : m.rank]
                gradients += [d_down[m.column : m.column + m.rank], own_up.contiguous()]
        return gradients

    def _input_gradient(self, g: Operand) -> Tensor:
        matrix = self._storage.backward_matrix()
        if not self.quantised:
            return g.payload @ matrix.T
        assert g.scales is not None
        return fp8_product(g.payload, g.scales, matrix, self._input_scales, self.dtype)


class GroupSet:
    """All groups of a model. Before each forward pass `refresh` writes every adapter's current values where products
    read them.

    A model has hundreds of adapters, and at the start of a step the GPU waits while they are looked at. So what was
    found last is compared with what is there, in loops that are not Python's; only if it differs is it looked at anew.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self._with_adapters = [group for group in groups if isinstance(group, ProjectionGroup)]
        self.reason: str | None = None
        """Why the layers must run unfused now, or None."""
        adapted = [
            (member, name)
            for group in self._with_adapters
            for member, name in zip(group.members, group.names, strict=True)
            if name is not None
        ]
        self._layers = [member.layer for member, _ in adapted]
        self._names = [name for _, name in adapted]
        self._has_dropout = any(member.has_dropout for member, _ in adapted)
        self._seen: list[Any] | None = None
        self.arrangement = 0
        """Counts how often places or scalings of the adapters changed: then groups compute with other tensors."""
        self._tables: list[AdapterTable] = []
        self._written: list[Tensor] = []
        self._places: list[Any] = []
        self._twice = [kept for group in self._with_adapters if (kept := group.kept_twice()) is not None]
        self._versions = self._current_versions()

    @torch.no_grad()
    def write(self) -> None:
        """The values of the adapters that were found last, without a look at whether they still are the model's."""
        for table in self._tables:
            table.write()

    @torch.no_grad()
    def refresh(self, *, written: bool = False) -> None:
        """`written`: since the last pass `write` was called."""
        # With dropout the mode counts as well, which is no state of PEFT's.
        if self._has_dropout or self._seen is None or not all(map(eq, map(_STATE, self._layers), self._seen)):
            self._seen = copy.deepcopy([_STATE(layer) for layer in self._layers])
            self.reason = next((why for group in self._with_adapters if (why := group.why_not()) is not None), None)
        if self.reason is not None:
            return
        found = self._current()
        places: list[Any] = [*map(Tensor.data_ptr, found), *map(getitem, map(_SCALING, self._layers), self._names)]
        if places != self._places or not all(map(is_, found, self._written)):
            self._arrange()
            self._written, self._places, written = found, places, False
        self._keep_in_step()
        if not written:
            self.write()
        self._versions = self._current_versions()

    def _keep_in_step(self) -> None:
        """A layer's weight is a view of the first layout: who writes to it raises that one's version."""
        if self._versions != self._current_versions():
            for kept in self._twice:
                kept.turn_weights()

    def _current_versions(self) -> list[int]:
        return list(map(_VERSION, self._twice))

    def _current(self) -> list[Tensor]:
        """A of every adapter, and then B, by the dictionaries behind the modules' attributes."""
        own = list(map(_MODULES, self._layers))
        downs, ups = (map(getitem, map(_MODULES, map(side, own)), self._names) for side in (_DOWN, _UP))
        return list(map(_WEIGHT, map(_PARAMETERS, chain(downs, ups))))

    def _arrange(self) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype], list[Adapter]] = {}
        for adapter in (adapter for group in self._with_adapters for adapter in group.adapters()):
            kinds.setdefault((adapter.down.dtype, adapter.places.matrix_up.dtype), []).append(adapter)
        self._tables = [AdapterTable(kind) for kind in kinds.values()]
        self.arrangement += 1


_STATE = attrgetter("_disable_adapters", "merged_adapters", "_active_adapter")
"""All that PEFT can change of a layer that `ProjectionGroup.why_not` asks about; behind its properties."""
_SCALING, _MODULES, _PARAMETERS = attrgetter("scaling"), attrgetter("_modules"), attrgetter("_parameters")
_DOWN, _UP, _WEIGHT = itemgetter("lora_A"), itemgetter("lora_B"), itemgetter("weight")
_VERSION = attrgetter("first._version")


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

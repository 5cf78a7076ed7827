"""The groups of all fused layers of a model, brought up to date before each of its forward passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, eq, getitem, is_, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor

from pantheraml.base import log
from pantheraml.kernels.lora_columns import Adapter, AdapterTable
from pantheraml.models.fast.group_operand import LinearGroup
from pantheraml.models.fast.linear_groups import LoraGroup, base_of

logger = log.get(__name__)


class GroupSet:
    """All groups of a model. Before each forward, `refresh` copies every adapter's values to where the matmuls read
    them.

    A model has hundreds of adapters, and at the start of a step the GPU idles while they are checked. So the last known
    state is compared with the current one in C loops (`map` over operators), and rebuilt only if it differs.
    """

    def __init__(self, groups: Sequence[LinearGroup]) -> None:
        self.groups = groups
        self._with_adapters = [group for group in groups if isinstance(group, LoraGroup)]
        self.reason: str | None = None
        """Why the adapters cannot run fused now, or None."""
        self.disabled = False
        """Whether all adapters are disabled, and none is merged: the frozen weights alone can run fused."""
        self.failed = False
        """Whether a layer failed when it first ran fused."""
        self._told: set[str] = set()
        adapted = [
            (member, name)
            for group in self._with_adapters
            for member, name in zip(group.members, group.names, strict=True)
            if name is not None
        ]
        self._layers = [member.layer for member, _ in adapted]
        self._names = [name for _, name in adapted]
        self._has_dropout = any(member.has_dropout for member, _ in adapted)
        self._bases = [base_of(layer) for group in self._with_adapters for layer in group.layers]
        self._addresses: list[int] = []
        """Of the weights of the bases, when the groups last took them over."""
        self._replaced: str | None = None
        """Why the groups cannot take over weights that were replaced since, or None."""
        self._trains_base = False
        self._peft_state: list[Any] | None = None
        self.adapter_layout_version = 0
        """Incremented whenever addresses or scalings of the adapters change: groups then use other tensors."""
        self._tables: list[AdapterTable] = []
        self._known_parameters: list[Tensor] = []
        self._known_layout: list[Any] = []

    def tell_unfused(self, why: str | None) -> None:
        """Log, once per reason, that layers train without being fused: right, but slower."""
        if why is not None and why not in self._told:
            self._told.add(why)
            logger.warning("decoder layers run unfused: %s", why)

    @torch.no_grad()
    def write(self) -> None:
        """Copy the values of the last known adapters, without checking that they are still the model's."""
        for table in self._tables:
            table.write()

    @torch.no_grad()
    def refresh(self, *, written: bool = False) -> None:
        """Bring groups up to date with the adapters. `written`: `write` was called since the last pass."""
        bases = self._base_weights()
        trains_base = any(map(_REQUIRES_GRAD, bases))
        changed = trains_base != self._trains_base or list(map(Tensor.data_ptr, bases)) != self._addresses
        if changed:
            self._take_over()
        # With dropout, train/eval mode matters as well, and is not part of PEFT's state.
        if (
            changed
            or self._has_dropout
            or self._peft_state is None
            or not all(map(eq, map(_STATE, self._layers), self._peft_state))
        ):
            self._peft_state = copy.deepcopy([_STATE(layer) for layer in self._layers])
            reasons = (why for group in self._with_adapters if (why := group.why_not()) is not None)
            self.reason = self._replaced or next(reasons, None)
            self._trains_base = trains_base
            may_run_frozen = bool(self._peft_state) and self._replaced is None
            self.disabled = may_run_frozen and all(map(_is_disabled, self._peft_state))
        if self.reason is not None:
            return
        parameters = self._current()
        layout: list[Any] = [*map(Tensor.data_ptr, parameters), *map(getitem, map(_SCALING, self._layers), self._names)]
        if layout != self._known_layout or not all(map(is_, parameters, self._known_parameters)):
            self._build_tables()
            self._known_parameters, self._known_layout, written = parameters, layout, False
        if not written:
            self.write()

    def _take_over(self) -> None:
        """Have the groups read weights of the bases that were replaced."""
        self._replaced = next((why for group in self._with_adapters if (why := group.take_over()) is not None), None)
        self.tell_unfused(self._replaced)
        self._addresses = list(map(Tensor.data_ptr, self._base_weights()))
        self.adapter_layout_version += 1  # a captured pass may have read what was replaced

    def _base_weights(self) -> list[Tensor]:
        """Return the weights and biases of the bases, in C loops as `_current`."""
        found: list[Any] = list(chain.from_iterable(map(dict.values, map(_PARAMETERS, self._bases))))
        return list(compress(found, map(is_not, found, repeat(None))))

    def _current(self) -> list[Tensor]:
        """Return A of every adapter, then B, through the modules' dicts, which is faster than attributes."""
        own = list(map(_MODULES, self._layers))
        downs, ups = (map(getitem, map(_MODULES, map(side, own)), self._names) for side in (_DOWN, _UP))
        return list(map(_WEIGHT, map(_PARAMETERS, chain(downs, ups))))

    def _build_tables(self) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype], list[Adapter]] = {}
        for adapter in (adapter for group in self._with_adapters for adapter in group.adapters()):
            kinds.setdefault((adapter.down.dtype, adapter.buffers.matrix_up.dtype), []).append(adapter)
        self._tables = [AdapterTable(kind) for kind in kinds.values()]
        self.adapter_layout_version += 1


_REQUIRES_GRAD = attrgetter("requires_grad")
_STATE = attrgetter("_disable_adapters", "merged_adapters", "_active_adapter")
"""All state that PEFT can change and `LoraGroup.why_not` reads, without PEFT's properties."""


def _is_disabled(state: Any) -> bool:
    disabled, merged, _ = state
    return bool(disabled) and not merged


_SCALING, _MODULES, _PARAMETERS = attrgetter("scaling"), attrgetter("_modules"), attrgetter("_parameters")
_DOWN, _UP, _WEIGHT = itemgetter("lora_A"), itemgetter("lora_B"), itemgetter("weight")

"""Fast answers to what trainers ask a model every step: `train()`, `parameters()`, `num_parameters()`.

While torch walks the module tree for the answer, the GPU may be idle. PEFT makes eleven modules of each adapted layer,
so a model of 32 layers is a tree of 2,700. Torch walks it with recursive generators that build every module's name, 3
to 7 ms each time; these walks need no names and take about 1 ms at most. There is nothing to invalidate when the tree
changes: it is walked again each time or, where even that is too slow, compared with the last walk, module by module but
not in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from gc import get_referents
from operator import itemgetter
from typing import Any, cast

import peft
from torch import nn
from transformers import PreTrainedModel


class ModuleWalk:
    """Result of a walk through a model, to be compared with its current state.

    It is not part of the model's state: deepcopy and pickle turn it into None.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(dict.fromkeys(every_module(root)))
        self._states = [vars(module) for module in self._modules]
        self._children = self._current_children()

    def is_current(self, root: object) -> bool:
        """Return whether a new walk from `root` would find the same modules."""
        return self._modules[0] is root and self._current_children() == self._children

    def modes(self) -> set[bool]:
        return set(map(itemgetter("training"), self._states))

    def kinds(self) -> set[type[nn.Module]]:
        return set(map(type, self._modules))

    def _current_children(self) -> list[Any]:
        """Return the contents of all modules' child dicts; calling `values()` on each takes twice as long."""
        return get_referents(*map(itemgetter("_modules"), self._states))

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class CachedModuleWalk:
    """Mixin before the class of a whole model; the answers are the same as torch's."""

    _walk: ModuleWalk | None = None

    def train(self, mode: bool = True) -> Any:
        walk = self._walk
        if walk is None or not walk.is_current(self):
            walk = self._walk = ModuleWalk(cast(nn.Module, self))
        if walk.modes() == {mode} and all(kind.train in _PLAIN_TRAIN_METHODS for kind in walk.kinds()):
            return self
        return super().train(mode)  # type: ignore[misc]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield parameters in torch's order, which determines how norms are summed. Lazily: many callers need only the
        first."""
        if not recurse:
            yield from super().parameters(recurse=False)  # type: ignore[misc]
            return
        seen: set[nn.Module] = set()
        yielded: set[int] = set()
        pending: list[nn.Module | None] = [cast(nn.Module, self)]
        while pending:
            module = pending.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            if own := module._parameters:
                for parameter in own.values():
                    if parameter is not None and id(parameter) not in yielded:
                        yielded.add(id(parameter))
                        yield parameter
            if children := module._modules:
                pending += reversed(children.values())


class PeftModelForCausalLM(CachedModuleWalk, peft.PeftModelForCausalLM):
    """PEFT's class under its own name, which users see when they print a model."""


_PLAIN_TRAIN_METHODS = {nn.Module.train, PreTrainedModel.train, CachedModuleWalk.train}


def use_cached_walk(model: peft.PeftModel) -> None:
    """Switch PEFT's causal language model class to the fast one, in place."""
    assert type(model) is peft.PeftModelForCausalLM
    model.__class__ = PeftModelForCausalLM


def every_module(root: nn.Module) -> list[nn.Module]:
    """Return `root.modules()` in another order, with shared modules repeated."""
    modules: list[nn.Module] = []
    level = [root]
    while level:
        modules += level
        level = [
            child
            for module in level
            if (children := module._modules)
            for child in children.values()
            if child is not None
        ]
    return modules

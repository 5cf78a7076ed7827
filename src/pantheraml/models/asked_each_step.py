"""What trainers ask a model once a step, answered sooner.

A trainer asks for the mode to be set, for all parameters (to clip and to reset their gradients) and for their number,
and while torch looks for the answer the GPU may have nothing to do. PEFT makes eleven modules of each layer with an
adapter, so that a model of 32 layers is a tree of 2,700. Torch walks it by recursive generators that build every
module's name, 3 to 7 ms a time; these walks need no names and take about 1 ms at most. Whoever changes the tree has
nothing to tell anyone: it is walked anew each time or, where even that is too long, compared with what the last walk
found, module by module but not in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from gc import get_referents
from operator import itemgetter
from typing import Any, cast

import peft
from torch import nn
from transformers import PreTrainedModel


class Walked:
    """What a walk through a model found, to be compared with what is there. It is no part of the model's state: a copy
    of the model, in memory or in a file, has None in its place."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(dict.fromkeys(every_module(root)))
        self._states = [vars(module) for module in self._modules]
        self._children = self._current_children()

    def is_current(self, root: object) -> bool:
        """Whether another walk from `root` would find the same modules."""
        return self._modules[0] is root and self._current_children() == self._children

    def modes(self) -> set[bool]:
        return set(map(itemgetter("training"), self._states))

    def kinds(self) -> set[type[nn.Module]]:
        return set(map(type, self._modules))

    def _current_children(self) -> list[Any]:
        """What all modules' dictionaries of children hold; asking each of them for its values takes twice as long."""
        return get_referents(*map(itemgetter("_modules"), self._states))

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class AskedEachStep:
    """Mixed in before the class of a whole model; the answers are the same."""

    _walked: Walked | None = None

    def train(self, mode: bool = True) -> Any:
        walked = self._walked
        if walked is None or not walked.is_current(self):
            walked = self._walked = Walked(cast(nn.Module, self))
        if walked.modes() == {mode} and all(kind.train in _ONLY_SET_THE_MODE for kind in walked.kinds()):
            return self
        return super().train(mode)  # type: ignore[misc]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """In torch's order, which decides how norms are summed. One by one: many callers want only the first."""
        if not recurse:
            yield from super().parameters(recurse=False)  # type: ignore[misc]
            return
        seen: set[nn.Module] = set()
        given: set[int] = set()
        pending: list[nn.Module | None] = [cast(nn.Module, self)]
        while pending:
            module = pending.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            if own := module._parameters:
                for parameter in own.values():
                    if parameter is not None and id(parameter) not in given:
                        given.add(id(parameter))
                        yield parameter
            if children := module._modules:
                pending += reversed(children.values())


class PeftModelForCausalLM(AskedEachStep, peft.PeftModelForCausalLM):
    """PEFT's class, under the name that it has there: people see it when they print a model."""


_ONLY_SET_THE_MODE = {nn.Module.train, PreTrainedModel.train, AskedEachStep.train}


def answer_sooner(model: peft.PeftModel) -> None:
    """Give PEFT's model of a causal language model quick answers, in place."""
    assert type(model) is peft.PeftModelForCausalLM
    model.__class__ = PeftModelForCausalLM


def every_module(root: nn.Module) -> list[nn.Module]:
    """`root.modules()` in another order, and what is shared comes more than once."""
    found: list[nn.Module] = []
    level = [root]
    while level:
        found += level
        level = [
            child
            for module in level
            if (children := module._modules)
            for child in children.values()
            if child is not None
        ]
    return found

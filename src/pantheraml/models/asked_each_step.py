"""What trainers ask a model once a step, answered sooner.

A trainer asks for the mode to be set, for all parameters (to clip and to reset their gradients) and for their number,
and while torch looks for the answer the GPU may have nothing to do. PEFT makes eleven modules of each layer with an
adapter, so that a model of 32 layers is a tree of 2,700. Torch walks it by recursive generators that build every
module's name, 3 to 7 ms a time; these walks need no names and take about 1 ms at most. The tree is walked anew each
time: whoever changes it has nothing to tell anyone.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, cast

import peft
from torch import nn
from transformers import PreTrainedModel


class AskedEachStep:
    """Mixed in before the class of a whole model; the answers are the same."""

    def train(self, mode: bool = True) -> Any:
        modules = every_module(cast(nn.Module, self))
        done = set(map(attrgetter("training"), modules)) == {mode}
        kinds: set[type[nn.Module]] = set(map(type, modules))
        if done and all(kind.train in _ONLY_SET_THE_MODE for kind in kinds):
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

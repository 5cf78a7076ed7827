"""Linear layers whose weight a model's own code reads, instead of calling the layer.

Mamba layers, for example, pass `self.out_proj.weight` to a kernel that also computes the projection. A quantized layer
has no such weight, so these layers stay as they are in the checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_READ = re.compile(r"\bself\.((?:\w+\.)*\w+)\.weight\b")


def directly_read(model: nn.Module) -> set[str]:
    """Return the names of the linear layers in `model` whose weight its code reads."""
    modules = dict(model.named_modules())
    read = {
        f"{parent}.{child}" if parent else child
        for parent, module in modules.items()
        for child in _children_read_by(cast(Any, type(module)))
    }
    return {name for name in read if isinstance(modules.get(name), nn.Linear | Conv1D)}


@functools.cache
def _children_read_by(kind: type[Any]) -> frozenset[str]:
    """Return the relative names that occur as `self.NAME.weight` in the methods of a module class."""
    own = [base for base in kind.__mro__ if issubclass(base, nn.Module) and not _is_common(base)]
    methods = [value for base in own for value in vars(base).values() if inspect.isfunction(value)]
    return frozenset(name for method in methods for name in _READ.findall(_source(method)))


def _is_common(kind: type[Any]) -> bool:
    return kind is PreTrainedModel or kind.__module__.partition(".")[0] == "torch"


def _source(method: Any) -> str:
    try:
        return inspect.getsource(method)
    except (OSError, TypeError):  # made at runtime, or shipped without its source
        return ""

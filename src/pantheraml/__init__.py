"""PantheraML: fine-tuning of language models on one, several or many GPUs.

Importing this package imports neither torch nor transformers: the names that need them are loaded at first use, and
the command line leaves them to worker processes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.train import TrainConfig

if TYPE_CHECKING:
    from pantheraml.api import FastLanguageModel
    from pantheraml.multigpu import enable_multi_gpu

__version__ = "0.1.0"

__all__ = ["FastLanguageModel", "MultiGPUConfig", "MultiGPUMode", "TrainConfig", "__version__", "enable_multi_gpu"]

_LOADED_AT_FIRST_USE = {"FastLanguageModel": "pantheraml.api", "enable_multi_gpu": "pantheraml.multigpu"}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # by name, because `import` would make the light half of the package depend on torch
    return getattr(importlib.import_module(_LOADED_AT_FIRST_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

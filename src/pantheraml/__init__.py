"""PantheraML: fine-tuning of language models on one or many GPUs.

Importing this package imports neither torch nor transformers: names that need them are loaded on first use, and the
command line leaves them to worker processes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.base.imports import quick_imports
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.train import TrainConfig

if TYPE_CHECKING:
    from pantheraml.api import (
        FastLanguageModel,
        FastModel,
        FastVisionModel,
        PatchDPOTrainer,
        is_bf16_supported,
        is_bfloat16_supported,
    )
    from pantheraml.api.unsloth_train import unsloth_train
    from pantheraml.chat_templates import get_chat_template
    from pantheraml.models.sampling_params import SamplingParams
    from pantheraml.multi_gpu_config import ConfigManager, DeviceManager
    from pantheraml.multi_gpu_trainer import MultiGPUTrainer
    from pantheraml.multigpu import disable_multi_gpu, enable_multi_gpu, get_multi_gpu_config
    from pantheraml.specs.aggregation import AggregationMethod
    from pantheraml.trainer import (
        PantheraMLDistributedTrainer,
        PantheraMLTrainer,
        UnslothTrainer,
        UnslothTrainingArguments,
    )

__version__ = "0.1.0"

__all__ = [
    "AggregationMethod",
    "ConfigManager",
    "DeviceManager",
    "FastLanguageModel",
    "FastModel",
    "FastVisionModel",
    "MultiGPUConfig",
    "MultiGPUMode",
    "PantheraMLDistributedTrainer",
    "PantheraMLTrainer",
    "MultiGPUTrainer",
    "PatchDPOTrainer",
    "SamplingParams",
    "TrainConfig",
    "UnslothTrainer",
    "UnslothTrainingArguments",
    "__version__",
    "disable_multi_gpu",
    "enable_multi_gpu",
    "get_chat_template",
    "is_bf16_supported",
    "get_multi_gpu_config",
    "is_bfloat16_supported",
    "unsloth_train",
]

_LAZY = {
    "AggregationMethod": "pantheraml.specs.aggregation",
    "ConfigManager": "pantheraml.multi_gpu_config",
    "DeviceManager": "pantheraml.multi_gpu_config",
    "FastLanguageModel": "pantheraml.api",
    "FastModel": "pantheraml.api",
    "FastVisionModel": "pantheraml.api",
    "PantheraMLDistributedTrainer": "pantheraml.trainer",
    "PantheraMLTrainer": "pantheraml.trainer",
    "MultiGPUTrainer": "pantheraml.multi_gpu_trainer",
    "PatchDPOTrainer": "pantheraml.api",
    "SamplingParams": "pantheraml.models.sampling_params",
    "UnslothTrainer": "pantheraml.trainer",
    "UnslothTrainingArguments": "pantheraml.trainer",
    "get_chat_template": "pantheraml.chat_templates",
    "is_bf16_supported": "pantheraml.api",
    "disable_multi_gpu": "pantheraml.multigpu",
    "enable_multi_gpu": "pantheraml.multigpu",
    "get_multi_gpu_config": "pantheraml.multigpu",
    "is_bfloat16_supported": "pantheraml.api",
    "unsloth_train": "pantheraml.api.unsloth_train",
}


# Names that Unsloth scripts import from the top of the package. Not in __all__: each has its place below it.
_CHAT_TEMPLATES = ("apply_chat_template", "standardize_data_formats", "standardize_sharegpt", "to_sharegpt")
_GENERATED_CODE = ("check_python_modules", "create_locked_down_function", "execute_with_time_limit")
_FAMILY_LOADERS = (
    "FastCohereModel", "FastGemmaModel", "FastGemma2Model", "FastGraniteModel", "FastLlamaModel", "FastMistralModel",
    "FastQwen2Model", "FastQwen3Model", "FastQwen3MoeModel",
)  # fmt: skip
_UNSLOTH_NAMES = {
    **{name: ("pantheraml.chat_templates", name) for name in (*_CHAT_TEMPLATES, "train_on_responses_only")},
    **{name: ("pantheraml.api.generated_code", name) for name in _GENERATED_CODE},
    **dict.fromkeys(_FAMILY_LOADERS, ("pantheraml.api", "FastLanguageModel")),
    **{name: ("pantheraml.api", name) for name in ("PatchFastRL", "PatchKTOTrainer")},
    "UnslothVisionDataCollator": ("pantheraml.trainer", "UnslothVisionDataCollator"),
    "vLLMSamplingParams": ("pantheraml.models.sampling_params", "SamplingParams"),
}


_NOT_SUPPORTED = {
    "FastSentenceTransformer": "embedding models: language models and classifiers are trained",
    "launch_openenv": "servers of OpenEnv: a reward function can call an environment itself",
    "is_port_open": "servers of OpenEnv: a reward function can call an environment itself",
}
"""Names that Unsloth scripts import, and what is not supported."""


def __getattr__(name: str) -> Any:
    if name in _NOT_SUPPORTED:
        raise UnsupportedModelError(
            f"pantheraml does not support {name}, which is for {_NOT_SUPPORTED[name]}.",
            fix="Use the library that the script was written for.",
        )
    if name in _LAZY:
        module, attribute = _LAZY[name], name
    elif name in _UNSLOTH_NAMES:
        module, attribute = _UNSLOTH_NAMES[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # by name: an `import` would make the torch-free half of the package depend on torch
    with quick_imports():
        return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)

"""PantheraML: fine-tuning of language models on one, several or many GPUs.

Importing this package imports neither torch nor transformers; they are loaded by the worker processes that need them.
"""

from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.train import TrainConfig

__version__ = "0.1.0"

__all__ = ["MultiGPUConfig", "MultiGPUMode", "TrainConfig", "__version__"]

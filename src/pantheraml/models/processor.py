"""Load the processor of a vision-language model: its tokenizer, image processor and chat template.

The processors of some families (Qwen's) also have a video processor, which needs torchvision. Images do not: without
torchvision, such a processor is loaded without its video part.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

from pantheraml.base import log
from pantheraml.base.errors import ModelError
from pantheraml.models.hub import local_folder
from pantheraml.models.loader import model_folder, read_config
from pantheraml.models.model_kind import VISION
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)


def load_processor(config: ModelConfig) -> Any:
    """Load the model's processor (or the one in the folder that `model.tokenizer` names, if it has one)."""
    named = None if config.tokenizer is None else local_folder(config.tokenizer)
    folder = named if named is not None and _has_processor(named) else model_folder(config)
    source = read_config(config, VISION)
    kind = PROCESSOR_MAPPING.get(type(source), None)
    loader: Any = AutoProcessor
    if not is_torchvision_available() and kind is not None and _takes_videos(kind):
        loader = _without_videos(kind)
        logger.info("%s handles images only: videos need torchvision", kind.__name__)
    try:
        processor = loader.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    # processors, tokenizers and image processors each raise errors of their own
    except Exception as err:
        problem = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise ModelError(
            f"The processor of the vision-language model cannot be loaded: {problem}",
            where=str(folder),
            fix="The folder must contain a tokenizer and a preprocessor_config.json or processor_config.json.",
        ) from err
    if not isinstance(processor, ProcessorMixin):
        raise ModelError(
            f"There is no image processor in {folder}.",
            fix="Add the model's preprocessor_config.json or processor_config.json.",
        )
    return processor


def _has_processor(folder: Path) -> bool:
    """Return whether the folder has more than a tokenizer, which is all that a trainer may have saved."""
    return any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))


def _takes_videos(kind: type[Any]) -> bool:
    return "video_processor" in inspect.signature(kind.__init__).parameters


@functools.cache
def _without_videos(parent: Any) -> type[ProcessorMixin]:
    """Return the processor class without its video part; transformers reads the parts from the constructor."""

    def __init__(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        parent.__init__(self, image_processor, tokenizer, None, chat_template=chat_template, **kwargs)

    return type(parent.__name__, (parent,), {"__module__": parent.__module__, "__init__": __init__})

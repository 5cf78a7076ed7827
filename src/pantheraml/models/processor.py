"""Load the processor of a vision-language model: its tokenizer, image processor and chat template.

The processors of some families (Qwen's) also have a video processor, which needs torchvision. Images do not: without
torchvision, such a processor is loaded without its video part. Scripts use a processor as they use a tokenizer
(`pad_token_id`, `padding_side`): ours has these attributes of its tokenizer, to read and to set.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

from pantheraml.base import log
from pantheraml.base.errors import ModelError
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.hub import local_folder
from pantheraml.models.loader import model_folder, read_config
from pantheraml.models.model_kind import VISION
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)

_VIDEO = "video_processor"
_TOKENIZER_FIELDS = (
    *(f"{name}_token{end}" for name in ("bos", "eos", "pad", "unk") for end in ("", "_id")),
    "padding_side", "truncation_side", "model_max_length", "vocab_size", "all_special_tokens", "all_special_ids",
    "get_vocab", "convert_tokens_to_ids", "convert_ids_to_tokens", "encode", "add_tokens", "add_special_tokens",
)  # fmt: skip


def load_processor(config: ModelConfig) -> Any:
    """Load the model's processor (or the one in the folder that `model.tokenizer` names, if it has one)."""
    named = None if config.tokenizer is None else local_folder(config.tokenizer)
    folder = named if named is not None and _has_processor(named) else model_folder(config)
    source = read_config(config, VISION)
    kind = PROCESSOR_MAPPING.get(type(source), None)
    loader: Any = AutoProcessor
    if not is_torchvision_available() and kind is not None and _ends_with_video(kind):
        loader = with_tokenizer_fields(kind, False)
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
    if not isinstance(processor, RuntimeSubclass):
        parent: Any = type(processor)
        processor.__class__ = with_tokenizer_fields(parent, True)
    return processor


def _has_processor(folder: Path) -> bool:
    """Return whether the folder has more than a tokenizer, which is all that a trainer may have saved."""
    return any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))


def _ends_with_video(kind: Any) -> bool:
    """Return whether the video part comes after all others: parts are passed by position."""
    if not issubclass(kind, ProcessorMixin):  # a placeholder for a class that cannot be imported
        return False
    return bool(kind.get_attributes()[-1:] == [_VIDEO])


def _tokenizer_field(name: str) -> property:
    def get(self: Any) -> Any:
        return getattr(self.tokenizer, name)

    def set_(self: Any, value: Any) -> None:
        setattr(self.tokenizer, name, value)

    return property(get, set_, doc=f"`{name}` of the tokenizer.")


def _accepting_messages(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a processor's `__call__` that also takes chat messages as its text, and renders them.

    Scripts pass rows of a data set for GRPO, whose prompts were texts before TRL 0.24 and are messages since.
    """
    signature = inspect.signature(call)

    @functools.wraps(call)
    def rendered(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        text = given.arguments.get("text")
        if isinstance(text, list) and text and all(isinstance(each, dict) and "role" in each for each in text):
            logger.warning("the processor got chat messages as text: they are rendered with its chat template")
            given.arguments["text"] = self.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        return call(*given.args, **given.kwargs)

    return rendered


@functools.cache
def with_tokenizer_fields(parent: Any, videos: bool) -> type[ProcessorMixin]:
    """Return the processor class with attributes of its tokenizer; the name is kept, because processors save it.

    `videos` False: without its video part. The constructor stays as it is, because transformers reads the names of its
    arguments; the parts that it loads, checks and saves are those of `get_attributes`.
    """

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in parent.get_attributes() if name != _VIDEO]

    namespace: dict[str, Any] = {
        name: _tokenizer_field(name) for name in _TOKENIZER_FIELDS if not hasattr(parent, name)
    }
    made_by = (with_tokenizer_fields, (parent, videos))
    namespace |= {"__module__": parent.__module__, "__doc__": parent.__doc__, "made_by": made_by}
    namespace["__call__"] = _accepting_messages(parent.__call__)
    if not videos:
        namespace["get_attributes"] = classmethod(get_attributes)
    return type(parent.__name__, (RuntimeSubclass, parent), namespace)

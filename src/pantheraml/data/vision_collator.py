"""`UnslothVisionDataCollator`: batches of conversations with images, for TRL's `SFTTrainer`.

The processor renders, tokenizes and pads when a batch is needed: image tensors of a whole data set would not fit in
memory. Padding and image tokens have no loss; with `train_on_responses_only`, only responses have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, DataError
from pantheraml.data.chat_templates.rendering import RENDER_ERRORS
from pantheraml.data.chat_templates.response_mask import IGNORED, ResponseMask
from pantheraml.data.chat_templates.train_on_responses import response_markers
from pantheraml.data.rows import Row, excerpt
from pantheraml.data.vision_rows import Conversation, Picture, has_images, read_conversation, reject_other_media

logger = log.get(__name__)

DEFAULT_SIDE = 512
"""Longest side of an image for models without an image size of their own, as in Unsloth."""
_UNUSED = {"num_proc": None, "completion_only_loss": True, "resize_dimension": 0, "snap_to_patch_size": False}
"""Further arguments of Unsloth's collator, and the values that ask for nothing here; any value of `num_proc` does."""
_IMAGE_TOKENS = (
    "image_token", "video_token", "boi_token", "eoi_token", "image_break_token", "image_end_token",
    "vision_start_token", "vision_end_token", "fake_image_token", "global_image_token",
)  # fmt: skip
_IMAGE_TOKEN_IDS = tuple(f"{name}_{end}" for name in _IMAGE_TOKENS for end in ("id", "index"))
_CHECKED_ROWS = 64


class UnslothVisionDataCollator:
    """Makes batches for a vision-language model from rows with `messages`, and images in them or in `images`.

    `max_seq_length` None: that of the model. Longer rows are truncated; one whose image would be cut is an error.
    `formatting_func`: applied to each row first.
    `resize`: longest side of an image in pixels, or (width, height); "min": the image size of the model, or 512 if it
    has none; "max": images stay as they are. Images are never enlarged by a longest side.
    `train_on_responses_only`: loss on responses only; `instruction_part`, `response_part`, `force_match` and
    `last_response_only` are those of `pantheraml.chat_templates.train_on_responses_only`.
    `allow_text_only`: rows before the first image may be without one; otherwise a data set without images is an error.
    """

    reads_rows = True
    """SFTTrainer must pass the rows of the data set as they are."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        max_seq_length: int | None = None,
        formatting_func: Callable[[Row], Row] | None = None,
        resize: str | int | tuple[int, int] = "min",
        ignore_index: int = IGNORED,
        train_on_responses_only: bool = False,
        instruction_part: str | None = None,
        response_part: str | None = None,
        force_match: bool = True,
        *,
        last_response_only: bool = False,
        pad_to_multiple_of: int | None = None,
        allow_text_only: bool = False,
        **others: Any,
    ) -> None:
        log.start_for_scripts()
        _check_others(others)
        self.processor = _checked_processor(processor)
        self.max_seq_length = getattr(model, "max_seq_length", None) if max_seq_length is None else max_seq_length
        self.formatting_func = formatting_func
        self.ignore_index = ignore_index
        self.pad_to_multiple_of = pad_to_multiple_of
        self.allow_text_only = allow_text_only
        self._side = _image_side(resize, model)
        self._dtype = model.get_input_embeddings().weight.dtype
        self._image_tokens = torch.tensor(sorted(_image_tokens(processor, model.config)))
        self._responses: ResponseMask | None = None
        self._marker_seen = False
        self._resized = self._truncated = False
        if train_on_responses_only:
            self._markers = response_markers(processor, instruction_part, response_part, force_match)
            self._responses = ResponseMask(processor.tokenizer, self._markers, last_only=last_response_only)
        elif instruction_part is not None or response_part is not None:
            raise ConfigError(
                "instruction_part and response_part are for train_on_responses_only.",
                fix="Pass train_on_responses_only=True, or remove them.",
            )

    def __call__(self, examples: list[Row]) -> dict[str, Tensor]:
        rows = examples if self.formatting_func is None else [self.formatting_func(row) for row in examples]
        conversations = [read_conversation(row, number, self._resize) for number, row in enumerate(rows)]
        if any(each.images for each in conversations):
            self.allow_text_only = True  # from now on: the data set has images
        elif not self.allow_text_only:
            raise no_images(f"the {len(rows)} rows of the first batch")
        batch = self._encode(conversations)
        self._truncate(batch)
        batch["labels"] = self._labels(batch)
        return batch

    def require_images(self, dataset: Any) -> None:
        """DataError if none of the first rows of `dataset` has an image."""
        if self.allow_text_only or self.formatting_func is not None:
            return
        count = 0
        for count, row in enumerate(dataset, start=1):
            reject_other_media(row)
            if has_images(row):
                self.allow_text_only = True
                return
            if count == _CHECKED_ROWS:
                break
        raise no_images(f"the first {count} rows of the data set")

    def _encode(self, conversations: list[Conversation]) -> dict[str, Any]:
        template = getattr(self.processor, "chat_template", None) or self.processor.tokenizer.chat_template
        images = [each.images for each in conversations]
        try:
            texts = [
                self.processor.apply_chat_template(each.messages, chat_template=template, tokenize=False)
                for each in conversations
            ]
            encoded = self.processor(
                text=texts,
                images=_nested(images),
                padding=True,
                padding_side="right",
                pad_to_multiple_of=self.pad_to_multiple_of,
                add_special_tokens=False,  # the chat template has written them
                return_tensors="pt",
            )
        except RENDER_ERRORS as err:
            raise DataError(
                f"The processor cannot encode a batch: {excerpt(str(err) or type(err).__name__, 300)}",
                fix="Check that the chat template supports images and these roles.",
            ) from err
        return {name: self._cast(value) for name, value in encoded.items()}

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _truncate(self, batch: dict[str, Any]) -> None:
        ids, limit = batch["input_ids"], self.max_seq_length
        if limit is None or ids.shape[1] <= limit:
            return
        length = int(batch["attention_mask"].sum(dim=1).max())
        if bool(torch.isin(ids[:, limit:], self._image_tokens).any()):
            raise DataError(
                f"A row has {length} tokens, and max_seq_length={limit} would cut an image.",
                fix="Raise max_seq_length, or make images smaller with the collator's resize=.",
            )
        if length > limit and not self._truncated:
            self._truncated = True
            logger.warning("rows longer than max_seq_length=%d are truncated; the first has %d tokens", limit, length)
        per_token = [name for name, value in batch.items() if isinstance(value, Tensor) and value.shape == ids.shape]
        for name in per_token:
            batch[name] = batch[name][:, :limit]

    def _labels(self, batch: dict[str, Any]) -> Tensor:
        ids: Tensor = batch["input_ids"]
        masked = (batch["attention_mask"] == 0) | torch.isin(ids, self._image_tokens)
        if self._responses is not None:
            responses = np.stack([self._responses(row) for row in ids.tolist()])
            self._check_marker(ids)
            masked |= ~torch.from_numpy(responses)
        return ids.masked_fill(masked, self.ignore_index)

    def _check_marker(self, ids: Tensor) -> None:
        assert self._responses is not None
        self._marker_seen = self._marker_seen or any(map(self._responses.has_marker, ids.tolist()))
        if not self._marker_seen:
            raise DataError(
                f"The response marker {self._markers.response!r} occurs in none of the first {len(ids)} rows.",
                where=f"the first row, which starts with: {excerpt(self._responses.text(ids[0].tolist()), 300)}",
                fix="Pass response_part= and instruction_part= as they are in the data.",
            )

    def _resize(self, image: Picture) -> Picture:
        if self._side is None:
            return image
        if isinstance(self._side, tuple):
            size = self._side
        else:
            scale = min(1.0, self._side / max(image.size))
            size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        if size == image.size:
            return image
        if not self._resized:
            self._resized = True
            logger.info("images are resized (the first from %s to %s); resize='max' keeps them", image.size, size)
        return image.resize(size, Image.Resampling.LANCZOS)


def no_images(rows: str) -> DataError:
    return DataError(
        f"None of {rows} has an image.",
        fix='Put {"type": "image", "image": ...} into the messages, or add a column `images`. For a data set of text, '
        "leave out this collator; if text rows are mixed in on purpose, pass allow_text_only=True.",
    )


def _check_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in _UNUSED:
            raise ConfigError(
                f"UnslothVisionDataCollator has no argument {name!r}.",
                fix="Its arguments are those of its docstring.",
            )
        if name != "num_proc" and value != _UNUSED[name]:
            raise ConfigError(f"UnslothVisionDataCollator does not support {name}={value!r}.", fix="Remove it.")


def _checked_processor(processor: Any) -> Any:
    if not isinstance(processor, ProcessorMixin) or getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"UnslothVisionDataCollator needs the processor of a vision-language model, not a "
            f"{type(processor).__name__}.",
            fix="Pass what FastVisionModel.from_pretrained returns with the model.",
        )
    if getattr(processor, "chat_template", None) is None and processor.tokenizer.chat_template is None:
        raise ConfigError(
            "The processor has no chat template.",
            fix="Set one: pantheraml.chat_templates.get_chat_template(processor, NAME).",
        )
    return processor


def _image_side(resize: str | int | tuple[int, int], model: Any) -> int | tuple[int, int] | None:
    """Return the longest side, or the size, that images get; None: their own."""
    if resize == "max":
        return None
    if resize == "min":
        size = getattr(getattr(model.config, "vision_config", None), "image_size", None)
        return size if isinstance(size, int) else DEFAULT_SIDE
    if isinstance(resize, int) and resize > 0:
        return resize
    if isinstance(resize, tuple | list) and len(resize) == 2 and all(isinstance(n, int) and n > 0 for n in resize):
        return (resize[0], resize[1])
    raise ConfigError(
        f'resize={resize!r} is neither "min", "max", a number of pixels nor (width, height).', fix="Pass one of these."
    )


def _image_tokens(processor: Any, config: Any) -> set[int]:
    """Return the ids of tokens that stand for images or enclose them; no model has to predict those."""
    tokenizer = processor.tokenizer
    ids = {getattr(owner, name, None) for owner in (processor, tokenizer, config) for name in _IMAGE_TOKEN_IDS}
    for owner in (processor, tokenizer):
        texts = [getattr(owner, name, None) for name in _IMAGE_TOKENS]
        ids |= {tokenizer.convert_tokens_to_ids(text) for text in texts if isinstance(text, str)}
    return {token for token in ids if isinstance(token, int)}


def _nested(images: Iterable[list[Picture]]) -> list[list[Picture]] | None:
    """Return the images of each row; None if there are none at all, as processors have it."""
    nested = list(images)
    return nested if any(nested) else None

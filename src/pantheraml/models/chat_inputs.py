"""Tokens of a chat template, usable both as transformers 5 returns them and as scripts for transformers 4 use them.

`tokenizer.apply_chat_template(messages)` was a list (or a tensor) of token ids; transformers 5 returns a mapping with
`input_ids` and `attention_mask`. Older scripts then fail, or silently count its keys: `len(...)` is 2. For a tokenizer
that our loader returned, the result is both: the ids, and the mapping. A call with `return_dict` is left alone.

`ChatInputsMixin.generate` accepts such a result, or any other mapping of the tokenizer, in place of the ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from transformers import BatchEncoding, PreTrainedTokenizerBase

from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.eval_mode import without_checkpointing


class ChatTokens(list[Any]):
    """Token ids that also answer as the mapping they came from."""

    def __init__(self, encoding: Mapping[str, Any]) -> None:
        super().__init__(encoding["input_ids"])
        self._encoding = dict(encoding)

    def keys(self) -> Any:
        return self._encoding.keys()

    def __getitem__(self, key: Any) -> Any:
        return self._encoding[key] if isinstance(key, str) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._encoding:
            return self._encoding[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTokens, (self._encoding,)


class ChatTensors(BatchEncoding):
    """A mapping of tensors that also answers as its `input_ids`: by length, index, and attributes such as `shape`.

    Functions of torch compute with the ids, so the forward of any model takes it as well.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return function(*map(_ids, args), **{name: _ids(value) for name, value in (kwargs or {}).items()})

    def __len__(self) -> int:
        return len(self.data["input_ids"])

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else self.data["input_ids"][key]

    def __getattr__(self, name: str) -> Any:
        data = vars(self).get("data", {})
        if name in data:
            return data[name]
        if name.startswith("__") or "input_ids" not in data:
            raise AttributeError(name)
        return getattr(data["input_ids"], name)


def _ids(value: Any) -> Any:
    """Return the token ids in place of the mapping, also within a list such as that of `torch.cat`."""
    if isinstance(value, ChatTensors):
        return value.data["input_ids"]
    return type(value)(map(_ids, value)) if type(value) in (list, tuple) else value


class _ChatTokenizer(RuntimeSubclass):
    """Mixin placed before a tokenizer's own class."""

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer" and vars(self).get("_answers_as_processor"):
            return self
        return super().__getattr__(name)  # type: ignore[misc]

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return super().decode(_ids(token_ids), *args, **kwargs)  # type: ignore[misc]

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        result = super().apply_chat_template(*args, **kwargs)  # type: ignore[misc]
        if "return_dict" in kwargs or kwargs.get("return_assistant_tokens_mask") or not isinstance(result, Mapping):
            return result
        if not isinstance(result["input_ids"], list):
            return ChatTensors(dict(result), result.encodings) if isinstance(result, BatchEncoding) else result
        return ChatTokens(result)


@functools.cache
def _chat_class(parent: type) -> type:
    # The name is kept, because tokenizers save it.
    namespace = {"__module__": parent.__module__, "__doc__": parent.__doc__, "made_by": (_chat_class, (parent,))}
    return type(parent.__name__, (_ChatTokenizer, parent), namespace)


def accept_both_forms(tokenizer: Any) -> Any:
    """Change `tokenizer` in place so that both kinds of scripts can use its `apply_chat_template`; return it."""
    if isinstance(tokenizer, PreTrainedTokenizerBase) and not isinstance(tokenizer, _ChatTokenizer):
        tokenizer.__class__ = _chat_class(cast(Any, type(tokenizer)))
    return tokenizer


def answer_as_processor(tokenizer: Any) -> Any:
    """Give `tokenizer` an attribute `tokenizer`, itself, in place; return it."""
    vars(accept_both_forms(tokenizer))["_answers_as_processor"] = True
    return tokenizer


class ChatInputsMixin:
    """Mixin placed before a model's own class."""

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; a mapping of the tokenizer may take the place of `input_ids`.

        A model in training mode need not be set to eval mode first: activation checkpointing is suspended.
        """
        if isinstance(inputs, Mapping):
            inputs, kwargs = None, {**inputs, **kwargs}
        elif isinstance(given := kwargs.get("input_ids"), Mapping):
            own = {name: value for name, value in kwargs.items() if name != "input_ids" and value is not None}
            kwargs = {**given, **own}
        with without_checkpointing(cast(nn.Module, self)):
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

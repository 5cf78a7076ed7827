"""Texts that `SFTTrainer` trains on, where TRL reads a data set otherwise than the script says.

    dataset_text_field="text", in a data set with messages or prompts too    TRL ignores it for those
    formatting_func, in such a data set                                      TRL ignores what it returns
    texts that already begin with the BOS token                              the tokenizer adds a second one
    formatting_func that takes a batch of rows                               TRL passes single rows

Each is done as the script says, with one warning. `dataset_text_field` counts only if the script sets it. A data set
without rows, or without a column to train on, is an error that says so, instead of a StopIteration or a KeyError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import DataError
from pantheraml.hooks.library_patch import LibraryPatch

logger = log.get(__name__)

TEXT_FIELD_SET = "_dataset_text_field_is_set"
"""Attribute of a config: whether the script set `dataset_text_field`."""

_PREFERRED = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")
"""Columns that TRL reads rather than the text field."""


def _with_texts_as_set(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepare_dataset(
        self: Any, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, name: str
    ) -> Any:
        row = next(iter(dataset), None)
        if row is None:
            raise no_rows(name)
        if "input_ids" not in row:
            _check_columns(row, args.dataset_text_field, formatting_func, name)
            if formatting_func is not None:
                formatting_func = _row_wise(formatting_func, row)
            dataset, formatting_func = _with_one_source(dataset, row, args, formatting_func)
            dataset, formatting_func = _with_one_bos(dataset, processing_class, args, formatting_func)
        return prepare(self, dataset, processing_class, args, packing, formatting_func, name)

    return prepare_dataset


def no_rows(name: str) -> DataError:
    return DataError(f"The {name} data set has no rows.", fix="Check how it was loaded and filtered.")


def _check_columns(row: Mapping[str, Any], field: str, formatting_func: Any, name: str) -> None:
    if formatting_func is None and field not in row and not _reads_others(row):
        raise DataError(
            f"The {name} data set has no column to train on: it has {', '.join(map(repr, row)) or 'none'}.",
            fix="Name the column of the texts with dataset_text_field in SFTConfig, pass formatting_func, or use the"
            " columns messages, or prompt and completion.",
        )


def _with_one_source(dataset: Any, row: Mapping[str, Any], args: Any, formatting_func: Any) -> tuple[Any, Any]:
    """Return the data set without columns that TRL would read instead of the text, and what still formats it."""
    field = args.dataset_text_field
    others = [column for column in _PREFERRED if column in row and column != field] if _reads_others(row) else []
    if not others:
        return dataset, formatting_func
    if formatting_func is not None:
        if not isinstance(_attempt(formatting_func, dict(row)), str):
            return dataset, formatting_func  # the trainer shows what is wrong with it
        logger.warning("SFTTrainer trains on what formatting_func returns, not on the column %r", others[0])
        return dataset.map(lambda each: {field: formatting_func(each)}, remove_columns=others), None
    if not isinstance(row.get(field), str):
        return dataset, None
    if getattr(args, TEXT_FIELD_SET, False):
        logger.warning("SFTTrainer trains on the column %r, as dataset_text_field says, not on %r", field, others[0])
        return dataset.remove_columns(others), None
    logger.warning(
        "SFTTrainer trains on the column %r, not on %r; set dataset_text_field=%r to train on that",
        others[0], field, field,
    )  # fmt: skip
    return dataset, None


def _reads_others(row: Mapping[str, Any]) -> bool:
    """Return whether TRL would train on other columns of such a row than its text."""
    from trl.data_utils import is_conversational, is_conversational_from_value

    return "prompt" in row or is_conversational_from_value(row) or is_conversational(row)


def _with_one_bos(dataset: Any, processing_class: Any, args: Any, formatting_func: Any) -> tuple[Any, Any]:
    """Return the data set, or what formats it, without the BOS token that texts begin with, if one is added."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    bos, field, row = getattr(tokenizer, "bos_token", None), args.dataset_text_field, next(iter(dataset))
    text = row.get(field) if formatting_func is None else _attempt(formatting_func, dict(row))
    if not bos or not isinstance(text, str) or not text.startswith(bos):
        return dataset, formatting_func
    if list(tokenizer(text)["input_ids"][:2]) != [tokenizer.bos_token_id] * 2:
        return dataset, formatting_func
    logger.warning("texts begin with %s, which the tokenizer adds too: one of the two is left out", bos)
    if formatting_func is not None:
        return dataset, lambda each: formatting_func(each).removeprefix(bos)
    return dataset.map(lambda each: {field: each[field].removeprefix(bos)}), None


def _row_wise(function: Callable[[Any], Any], row: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return `function` for one row: as it is, or called with a batch of one row if only that gives one text."""
    if isinstance(_attempt(function, dict(row)), str):
        return function
    texts = _attempt(function, _batch_of_one(row))
    if not (isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str)):
        return function  # whose own error the trainer shows
    logger.warning("formatting_func takes batches of rows; this version of TRL passes single rows")
    return lambda each: function(_batch_of_one(each))[0]


def _attempt(function: Callable[[Any], Any], rows: dict[str, Any]) -> Any:
    try:
        return function(rows)
    except Exception as err:  # noqa: BLE001 - the other form of the call follows, and then the trainer's own
        logger.debug("formatting_func: %s", err)
        return None


def _batch_of_one(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [value] for name, value in row.items()}


SFT_TEXTS = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.sft_trainer",
    class_name="SFTTrainer",
    name="_prepare_dataset",
    make=_with_texts_as_set,
    fallback="formatting_func must take single rows, and texts must be the data set's only source",
    required=False,
)

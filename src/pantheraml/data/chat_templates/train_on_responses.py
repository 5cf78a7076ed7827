"""`train_on_responses_only`: loss on the assistant's responses only, in a trainer that is already made.

Tokenized data sets get a `labels` column. A collator that makes labels of its own, or tokenizes, is wrapped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, DataError
from pantheraml.data.chat_templates.markers import TurnMarkers, infer_markers
from pantheraml.data.chat_templates.rendering import plain_tokenizer
from pantheraml.data.chat_templates.response_mask import IGNORED, ResponseMask
from pantheraml.data.rows import Row, excerpt

logger = log.get(__name__)

_PEEKED_ROWS = 64
"""Rows that are searched for a response where the data set cannot be read as a whole."""
_PEEKED_BATCHES = 8
_SHOWN_CHARACTERS = 300
_TENSORS = ("input_ids", "labels", "attention_mask", "token_type_ids", "position_ids", "seq_lengths")
"""Columns that a collator of tokenized rows uses."""


def train_on_responses_only(
    trainer: Any,
    instruction_part: str | None = None,
    response_part: str | None = None,
    force_match: bool = True,
    tokenizer: Any = None,
    return_function: bool = False,
    num_proc: int | None = None,
    last_response_only: bool = False,
) -> Any:
    """Remove from the loss all tokens but those of the assistant's responses and their end-of-turn tokens.

    Call it on a made trainer (TRL's SFTTrainer, or any of transformers' kind); it is returned. Rows without a response
    are dropped, with a warning.

    `instruction_part`, `response_part`: what precedes a user's and an assistant's message. None: as the tokenizer's
    chat template has it.
    `force_match` False: white space at the ends of the two need not match.
    `tokenizer` None: the trainer's.
    `return_function`: return the function that makes `labels` for a batch of rows, and leave the trainer as it is.
    `num_proc`: processes that make the labels.
    `last_response_only`: only the last response of each conversation.
    """
    tokenizer = tokenizer if tokenizer is not None else getattr(trainer, "processing_class", None)
    if tokenizer is None:
        raise ConfigError("The trainer has no tokenizer.", fix="Pass tokenizer=.")
    markers = response_markers(tokenizer, instruction_part, response_part, force_match)
    mask = ResponseMask(plain_tokenizer(tokenizer), markers, last_only=last_response_only)
    if return_function:
        return _LabelRows(mask)
    if (eval_dataset := getattr(trainer, "eval_dataset", None)) is not None:
        trainer.eval_dataset = _labeled_splits(eval_dataset, "eval_dataset", mask, markers, num_proc)
    if trainer.train_dataset is None:
        raise ConfigError("The trainer has no train_dataset.", fix="Make it with one.")
    trainer.train_dataset = _labeled_splits(trainer.train_dataset, "train_dataset", mask, markers, num_proc)
    if not _keeps_labels(trainer.data_collator, next(iter(trainer.train_dataset))):
        trainer.data_collator = ResponseCollator(trainer.data_collator, mask)
        _check_collated(trainer.data_collator, trainer.train_dataset, markers)
    return trainer


def response_markers(tokenizer: Any, instruction: str | None, response: str | None, force_match: bool) -> TurnMarkers:
    """Return what precedes messages: as given, or as in the chat template."""
    if (instruction is None) != (response is None):
        raise ConfigError(
            "Only one of instruction_part and response_part is given.",
            fix="Pass both, or none to take them from the chat template.",
        )
    if instruction is None or response is None:
        return infer_markers(tokenizer)
    if not instruction.strip() or not response.strip():
        raise ConfigError(
            "instruction_part and response_part must not be blank.",
            fix="Pass the text that starts such a turn in the chat template, or leave both out.",
        )
    try:
        ends = infer_markers(tokenizer).ends
    except ConfigError:  # no template, or none that shows it: responses end with the eos token or an instruction
        ends = frozenset()
    if not force_match:
        instruction, response = instruction.strip(), response.strip()
    return TurnMarkers(instruction, response, ends)


class _LabelRows:
    """Makes the `labels` of a batch of tokenized rows; can be sent to other processes."""

    def __init__(self, mask: ResponseMask) -> None:
        self._mask = mask

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[list[int]]]:
        columns = (rows["input_ids"], *(_column(rows, name) for name in ("labels", "attention_mask", "seq_lengths")))
        return {"labels": [self._mask.labels(*row) for row in zip(*columns, strict=False)]}


def _column(rows: Mapping[str, Any], name: str) -> Any:
    return rows[name] if name in rows else itertools.repeat(None)


def _has_labels(row: Row) -> bool:
    return bool((np.asarray(row["labels"]) != IGNORED).any())


def _labeled_splits(dataset: Any, name: str, mask: ResponseMask, markers: TurnMarkers, num_proc: int | None) -> Any:
    if isinstance(dataset, dict):
        splits = {key: _labeled(rows, f"{name}[{key!r}]", mask, markers, num_proc) for key, rows in dataset.items()}
        return type(dataset)(splits)
    return _labeled(dataset, name, mask, markers, num_proc)


def _labeled(dataset: Any, name: str, mask: ResponseMask, markers: TurnMarkers, num_proc: int | None) -> Any:
    first = next(iter(dataset), None)
    if first is None:
        raise DataError(f"{name} is empty.", fix="Check the split and the filters that it was made with.")
    if "input_ids" not in first:
        return dataset  # the collator tokenizes
    _warn_without_instruction(itertools.islice(dataset, _PEEKED_ROWS), name, mask, markers)
    label_rows = _LabelRows(mask)
    if isinstance(dataset, list):
        made = label_rows({key: [row[key] for row in dataset] for key in first})["labels"]
        labeled: Any = [{**row, "labels": labels} for row, labels in zip(dataset, made, strict=True)]
        kept: Any = [row for row in labeled if _has_labels(row)]
    elif not hasattr(dataset, "map"):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}.", fix="Pass a datasets.Dataset, an IterableDataset or a list."
        )
    elif not hasattr(dataset, "__len__"):
        return _labeled_stream(dataset, name, label_rows, mask, markers)
    else:
        labeled = dataset.map(label_rows, batched=True, num_proc=num_proc, desc=f"Labels of responses in {name}")
        kept = labeled.filter(_has_labels, num_proc=num_proc, desc=f"Rows with a response in {name}")
    if not len(kept):
        raise _no_response(dataset, name, mask, markers)
    if dropped := len(dataset) - len(kept):
        logger.warning("%s: %d of %d rows have no response and are left out", name, dropped, len(dataset))
    return kept


def _labeled_stream(dataset: Any, name: str, label_rows: _LabelRows, mask: ResponseMask, markers: TurnMarkers) -> Any:
    kept = dataset.map(label_rows, batched=True).filter(_has_labels)
    peeked = list(itertools.islice(dataset, _PEEKED_ROWS))
    made = label_rows({key: [row[key] for row in peeked] for key in peeked[0]})["labels"]
    without = sum(not _has_labels({"labels": labels}) for labels in made)
    if without == len(peeked):
        raise _no_response(peeked, name, mask, markers)
    if without:
        logger.warning("%s: %d of the first %d rows have no response; such rows are left out as they are read",
                       name, without, len(peeked))  # fmt: skip
    return kept


def _warn_without_instruction(rows: Iterable[Row], name: str, mask: ResponseMask, markers: TurnMarkers) -> None:
    """Warn if user messages could be taken for a part of the response before them."""
    ids = [row["input_ids"] for row in rows]
    if any(map(mask.has_marker, ids)) and not any(map(mask.has_instruction, ids)):
        logger.warning(
            "%s: the instruction marker %r is in none of the first %d rows, so only end-of-turn and eos tokens end a "
            "response", name, markers.instruction, len(ids),
        )  # fmt: skip


def _no_response(rows: Any, name: str, mask: ResponseMask, markers: TurnMarkers) -> DataError:
    """Return the error for data without a single labeled token."""
    if any(mask.has_marker(row["input_ids"]) for row in rows):
        return DataError(
            f"No token of a response in {name} has a loss: the labels excluded them before, or rows end at the marker.",
            fix="Check the rows' length (max_length), and the trainer's own masks (completion_only_loss).",
        )
    start = excerpt(mask.text(next(iter(rows))["input_ids"]), _SHOWN_CHARACTERS)
    return DataError(
        f"The response marker {markers.response!r} occurs in no row of {name}.",
        where=f"the first row, which starts with: {start}",
        fix="Pass response_part= and instruction_part= as they are in the data, or render the data with this "
        "tokenizer's chat template.",
    )


class ResponseCollator:
    """A collator whose batches have labels on responses only."""

    def __init__(self, collator: Callable[[list[Row]], Any], mask: ResponseMask) -> None:
        self._collator = collator
        self._mask = mask

    def __call__(self, features: list[Row]) -> Any:
        # a collator that makes labels may be unable to pad those of the rows
        batch = self._collator(
            [{name: row[name] for name in row if name != "labels" or "input_ids" not in row} for row in features]
        )
        if not _has_token_labels(batch):
            raise ConfigError(
                "train_on_responses_only needs a trainer that computes its loss from a label for each token, and the "
                "batches of this one have none.",
                fix="Use it with SFTTrainer. Trainers of pairs and rewards (DPO, KTO, ORPO, GRPO, ...) leave prompts "
                "out of the loss by themselves.",
            )
        ids, labels = batch["input_ids"], batch["labels"]
        keep = labels.new_tensor(np.stack([self._mask(row) for row in ids.tolist()]))
        if batch.get("attention_mask") is not None:
            keep = keep * (batch["attention_mask"] != 0)
        batch["labels"] = labels.masked_fill(keep == 0, IGNORED)
        return batch


def _has_token_labels(batch: Any) -> bool:
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
        return False
    return bool(batch["input_ids"].shape == batch["labels"].shape)


def _keeps_labels(collator: Any, row: Row) -> bool:
    """Return whether a collator passes on the labels of tokenized rows."""
    if "input_ids" not in row:
        return False
    features = {name: row[name] for name in _TENSORS if name in row}
    batch = collator([features])
    if not _has_token_labels(batch):
        return False
    labels = np.asarray(batch["labels"])
    return int((labels != IGNORED).sum()) <= int((np.asarray(row["labels"]) != IGNORED).sum())


def _check_collated(collator: ResponseCollator, dataset: Any, markers: TurnMarkers) -> None:
    rows = list(itertools.islice(dataset, _PEEKED_BATCHES))
    if not any(bool((collator([row])["labels"] != IGNORED).any()) for row in rows):
        raise DataError(
            f"The response marker {markers.response!r} occurs in none of the first {len(rows)} rows.",
            fix="Pass response_part= and instruction_part= as they are in the data.",
        )

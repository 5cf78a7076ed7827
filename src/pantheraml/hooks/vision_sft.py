"""Settings that `SFTTrainer` needs with a vision collator, which notebooks set and scripts forget.

The collator makes batches from the rows themselves, so the trainer must neither tokenize rows nor remove their columns.
Rows with PIL images are often a list, which TRL no longer takes: a `Dataset` that reads from the list stands in for it,
since one that copies them would encode every image.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, DataError
from pantheraml.data.rows import Row
from pantheraml.data.vision_collator import UnslothVisionDataCollator

logger = log.get(__name__)

_INDEX = "row"


def prepare_vision_arguments(arguments: dict[str, Any], *, length: int | None) -> None:
    """Adapt the arguments of an SFTTrainer that has a vision collator, in place; `length`: its max_length, if set."""
    collator: UnslothVisionDataCollator = arguments["data_collator"]
    config = arguments.get("args")
    if config is None:
        raise ConfigError("SFTTrainer with a vision collator needs args.", fix="Pass args=SFTConfig(...).")
    if getattr(config, "packing", False) or getattr(config, "padding_free", False):
        raise ConfigError(
            "Rows with images cannot be packed: their positions and masks depend on the images.",
            fix="Set packing=False and padding_free=False in SFTConfig.",
        )
    if collator.max_seq_length is None and length is not None:
        collator.max_seq_length = length
    if config.remove_unused_columns:
        logger.info("SFTConfig.remove_unused_columns is False: the vision collator reads the rows' own columns")
        config.remove_unused_columns = False
    prepared = getattr(config, "dataset_kwargs", None) or {}
    if not prepared.get("skip_prepare_dataset"):
        logger.info("SFTConfig.dataset_kwargs has skip_prepare_dataset: the vision collator tokenizes the rows")
        config.dataset_kwargs = {**prepared, "skip_prepare_dataset": True}
    for name in ("train_dataset", "eval_dataset"):
        if isinstance(dataset := arguments.get(name), list | tuple):
            arguments[name] = rows_as_dataset(list(dataset), name)
    if arguments.get("train_dataset") is not None:
        collator.require_images(arguments["train_dataset"])


def rows_as_dataset(rows: list[Row], name: str) -> Dataset:
    """Return a `Dataset` whose rows are those of the list, as they are."""
    if not rows:
        raise DataError(f"{name} is empty.", fix="Check the split and the filters that it was made with.")
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = [rows[index] for index in batch[_INDEX]]
        return {column: [row.get(column) for row in chosen] for column in columns}

    dataset: Dataset = Dataset.from_dict({_INDEX: list(range(len(rows)))}).with_transform(read)
    return dataset

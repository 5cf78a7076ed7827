"""`standardize_sharegpt` and `standardize_data_formats`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from pantheraml.base.errors import DataError
from pantheraml.chat_templates import standardize_data_formats, standardize_sharegpt

SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "yes"},
    {"from": "observation", "value": "7"},
]
STANDARD = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "tool", "content": "7"},
]
ROWS: list[dict[str, Any]] = [{"conversations": SHAREGPT, "id": 1}, {"conversations": SHAREGPT[1:3], "id": 2}]
EXPECTED = [{"conversations": STANDARD, "id": 1}, {"conversations": STANDARD[1:3], "id": 2}]


def stream() -> Iterator[dict[str, Any]]:
    yield from ROWS


def test_every_kind_of_data_set() -> None:
    assert standardize_sharegpt(ROWS) == EXPECTED
    assert standardize_sharegpt([SHAREGPT]) == [STANDARD]
    dataset = Dataset.from_list(ROWS)
    assert standardize_sharegpt(dataset).to_list() == EXPECTED
    splits = standardize_data_formats(DatasetDict({"train": dataset}))
    assert isinstance(splits, DatasetDict)
    assert splits["train"].to_list() == EXPECTED
    assert list(standardize_data_formats(IterableDataset.from_generator(stream))) == EXPECTED


def test_standard_data_is_left_alone() -> None:
    dataset = Dataset.from_list([{"messages": STANDARD, "text": "x"}])
    assert standardize_data_formats(dataset) is dataset
    rows = [{"messages": STANDARD}]
    assert standardize_data_formats(rows) is rows


def test_other_keys_stay() -> None:
    rows = [{"chat": [{"speaker": "bot", "text": "yes", "weight": 0, "content": None}]}]
    assert standardize_sharegpt(rows) == [{"chat": [{"role": "assistant", "content": "yes", "weight": 0}]}]


def test_an_alias_deep_in_the_data_is_found() -> None:
    rows = [{"messages": STANDARD}] * 200 + [{"messages": [{"role": "human", "content": "late"}]}]
    standardized = standardize_data_formats(Dataset.from_list(rows))
    assert standardized[200]["messages"] == [{"role": "user", "content": "late"}]


@pytest.mark.parametrize("make", [list, Dataset.from_list])
def test_unknown_roles_are_listed(make: Any) -> None:
    rows = [{"conversations": [{"from": role, "value": "x"}]} for role in ("human", "wizard", "elf", "elf")]
    with pytest.raises(DataError, match=r"'wizard' \(1\), 'elf' \(2\)"):
        standardize_sharegpt(make(rows))
    kept = standardize_sharegpt(make(rows), aliases_for_user=("human", "wizard"), aliases_for_assistant=("elf",))
    assert [row["conversations"][0]["role"] for row in kept] == ["user", "user", "assistant", "assistant"]


def test_data_without_conversations_is_an_error() -> None:
    with pytest.raises(DataError, match="No column has conversations; the columns are text"):
        standardize_sharegpt([{"text": "x"}])
    with pytest.raises(DataError, match="messages in `messages` have the keys who, what"):
        standardize_sharegpt([{"messages": [{"who": "x", "what": "y"}]}])
    with pytest.raises(DataError, match="empty"):
        standardize_sharegpt([])

"""`train_on_responses_only` on trainers of TRL and transformers, over a tiny Llama on the CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.utils.logging import disable_progress_bar, enable_progress_bar
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from pantheraml.base.errors import ConfigError, DataError
from pantheraml.chat_templates import train_on_responses_only
from pantheraml.data.chat_templates.rendering import turns
from tests import toy

ROWS = [{"messages": turns("1+1=", "2", "2+2=", "4")}, {"messages": turns("3+3=", "6", system="add")}]
EXPECTED = ["2<eos>4<eos>", "6<eos>"]
NO_RESPONSE = {"messages": turns("7+7=")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    disable_progress_bar()
    yield toy.write_llama(tmp_path_factory.mktemp("responses") / "model")
    enable_progress_bar()


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def sft_trainer(folder: Path, rows: Any, eval_rows: Any = None, **settings: Any) -> SFTTrainer:
    fixed = {"max_steps": 1, "max_length": 128, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        eval_dataset=eval_rows,
        args=SFTConfig(output_dir=str(folder / "out"), **{**fixed, **settings}),
    )


def hf_trainer(folder: Path, rows: Any, collator: Any) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=tokenizer,
        train_dataset=rows,
        data_collator=collator(tokenizer),
        args=TrainingArguments(
            output_dir=str(folder / "out"), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True,
            remove_unused_columns=False,
        ),
    )  # fmt: skip


def tokenized(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    return [dict(tokenizer(text)) for text in texts]


def targets(trainer: Any, labels: Any) -> str:
    kept = [int(each) for each in labels if each != -100]
    decoded: str = trainer.processing_class.decode(kept)
    return decoded


def batch_targets(trainer: Any) -> list[str]:
    """Return the targets of the first batch that the model gets."""
    batch = next(iter(trainer.get_train_dataloader()))
    return sorted(targets(trainer, row) for row in batch["labels"])


def test_only_responses_are_trained(folder: Path) -> None:
    trainer = sft_trainer(folder, ROWS, Dataset.from_list(ROWS[:1]))
    assert train_on_responses_only(trainer) is trainer
    assert [targets(trainer, row["labels"]) for row in trainer.train_dataset] == EXPECTED
    assert [targets(trainer, row["labels"]) for row in trainer.eval_dataset] == EXPECTED[:1]
    assert batch_targets(trainer) == sorted(EXPECTED)
    assert trainer.train().training_loss > 0


def test_explicit_markers_and_the_last_response(folder: Path) -> None:
    trainer = sft_trainer(folder, ROWS)
    train_on_responses_only(trainer, "<user>", "<assistant>", last_response_only=True)
    assert [targets(trainer, row["labels"]) for row in trainer.train_dataset] == ["4<eos>", "6<eos>"]


def test_markers_need_not_match_white_space_if_so_asked(folder: Path) -> None:
    trainer = sft_trainer(folder, ROWS)
    with pytest.raises(DataError, match="occurs in no row"):
        train_on_responses_only(trainer, "<user>\n", "<assistant>\n")
    train_on_responses_only(trainer, "<user>\n", "<assistant>\n", force_match=False)
    assert [targets(trainer, row["labels"]) for row in trainer.train_dataset] == EXPECTED


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packed_rows(folder: Path, strategy: str) -> None:
    trainer = train_on_responses_only(
        sft_trainer(folder, ROWS, packing=True, packing_strategy=strategy, padding_free=strategy == "bfd")
    )
    (row,) = trainer.train_dataset
    assert sorted(targets(trainer, row["labels"]).replace("><", "").split("<eos>")) == ["", "2", "4", "6"]


def test_a_data_set_per_evaluation(folder: Path) -> None:
    trainer = sft_trainer(folder, ROWS, {"one": Dataset.from_list(ROWS[1:])})
    train_on_responses_only(trainer)
    assert targets(trainer, trainer.eval_dataset["one"][0]["labels"]) == "6<eos>"


def test_a_stream(folder: Path) -> None:
    rows = IterableDataset.from_generator(lambda: iter([NO_RESPONSE, *ROWS]))
    trainer = train_on_responses_only(sft_trainer(folder, rows))
    assert [targets(trainer, row["labels"]) for row in trainer.train_dataset] == EXPECTED


def test_rows_without_a_response_are_dropped_and_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = sft_trainer(folder, [NO_RESPONSE, *ROWS, NO_RESPONSE])
    with caplog.at_level(logging.WARNING):
        train_on_responses_only(trainer)
    assert [targets(trainer, row["labels"]) for row in trainer.train_dataset] == EXPECTED
    assert "train_dataset: 2 of 4 rows have no response and are left out" in caplog.text


@pytest.mark.parametrize("instruction", ["<user>", "<human>"])
def test_an_instruction_marker_that_never_occurs_is_told(
    folder: Path, instruction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an end-of-turn token, user messages would be trained on."""
    trainer = sft_trainer(folder, ROWS)
    with caplog.at_level(logging.WARNING):
        train_on_responses_only(trainer, instruction, "<assistant>")
    assert ("'<human>' is in none of the first 2 rows" in caplog.text) == (instruction == "<human>")
    assert [targets(trainer, row["labels"]) for row in trainer.train_dataset] == EXPECTED


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_a_marker_that_never_occurs_is_an_error(folder: Path, kind: str) -> None:
    rows: Any = ROWS if kind == "dataset" else IterableDataset.from_generator(lambda: iter(ROWS))
    trainer = sft_trainer(folder, rows)
    with pytest.raises(DataError, match="marker '<bot>' occurs in no row of train_dataset") as raised:
        train_on_responses_only(trainer, "<user>", "<bot>")
    assert "<user>" in str(raised.value)  # the start of the first row


def test_rows_that_end_at_the_marker_are_an_error_of_their_own(folder: Path) -> None:
    rows = [{"input_ids": AutoTokenizer.from_pretrained(folder)("<user>1+1=<eos><assistant>")["input_ids"]}]
    with pytest.raises(DataError, match="No token of a response in train_dataset has a loss"):
        train_on_responses_only(sft_trainer(folder, rows))


def test_wrong_arguments(folder: Path) -> None:
    trainer = sft_trainer(folder, ROWS)
    with pytest.raises(ConfigError, match="Only one of"):
        train_on_responses_only(trainer, response_part="<assistant>")
    with pytest.raises(ConfigError, match="must not be blank"):
        train_on_responses_only(trainer, "<user>", "\n")
    trainer.processing_class.chat_template = None
    with pytest.raises(ConfigError, match="does not show where responses start"):
        train_on_responses_only(trainer)


@pytest.mark.parametrize("as_list", [True, False])
def test_a_collator_that_passes_labels_on(folder: Path, as_list: bool) -> None:
    rows = tokenized(folder, ROWS)
    trainer = hf_trainer(folder, rows if as_list else Dataset.from_list(rows), DataCollatorForSeq2Seq)
    before = trainer.data_collator
    train_on_responses_only(trainer)
    assert trainer.data_collator is before
    assert batch_targets(trainer) == sorted(EXPECTED)


def test_a_collator_that_makes_its_own_labels_is_wrapped(folder: Path) -> None:
    trainer = hf_trainer(
        folder, Dataset.from_list(tokenized(folder, ROWS)), lambda tok: DataCollatorForLanguageModeling(tok, mlm=False)
    )
    assert batch_targets(trainer) != sorted(EXPECTED)
    train_on_responses_only(trainer)
    assert batch_targets(trainer) == sorted(EXPECTED)


class _TokenizingCollator:
    """As for vision models: rows are conversations, batches are tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        texts = [self._tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
        batch = self._tokenizer(texts, padding=True, return_tensors="pt")
        batch["labels"] = torch.where(batch["attention_mask"] == 0, -100, batch["input_ids"])
        return batch


def test_a_collator_that_tokenizes_is_wrapped(folder: Path) -> None:
    trainer = train_on_responses_only(hf_trainer(folder, ROWS, _TokenizingCollator))
    assert batch_targets(trainer) == sorted(EXPECTED)
    with pytest.raises(DataError, match="occurs in none of the first 2 rows"):
        train_on_responses_only(hf_trainer(folder, ROWS, _TokenizingCollator), "<user>", "<bot>")


def _preference_collator(_tokenizer: Any) -> Any:
    return lambda rows: {name: torch.ones(len(rows), 4) for name in ("input_ids", "completion_mask")}


def _classifier_collator(_tokenizer: Any) -> Any:
    return lambda rows: {"input_ids": torch.ones(len(rows), 4), "labels": torch.ones(len(rows))}


@pytest.mark.parametrize("collator", [_preference_collator, _classifier_collator, lambda _: list])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_trainer_without_a_label_for_each_token(folder: Path, collator: Any, as_tokens: bool) -> None:
    """Those of pairs (DPO), rewards (GRPO) and classes."""
    trainer = hf_trainer(folder, tokenized(folder, ROWS) if as_tokens else ROWS, collator)
    with pytest.raises(ConfigError, match="a label for each token") as raised:
        train_on_responses_only(trainer)
    assert "Use it with SFTTrainer" in str(raised.value)

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BatchEncoding, Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from pantheraml import FastLanguageModel
from pantheraml.hooks import trl
from pantheraml.hooks.prefetch_batches import PREFETCH_BATCHES, PrefetchIterator
from pantheraml.models.async_scalars import host_values
from tests.toy import write_llama


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    trl.revert()


def test_prefetches_as_many_batches_as_were_taken_at_once() -> None:
    read: list[int] = []
    iterator = PrefetchIterator(read.append(n) or n for n in range(9))  # type: ignore[func-returns-value]
    assert [next(iterator), next(iterator)] == [0, 1]
    for _ in range(3):
        iterator.read()
    assert read == [0, 1, 2, 3]
    assert [next(iterator), next(iterator), next(iterator)] == [2, 3, 4]
    assert list(iterator) == [5, 6, 7, 8]
    iterator.read()
    assert not list(iterator)


def test_prefetch_errors_are_raised_by_next() -> None:
    def batches() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("a bad row")

    iterator = PrefetchIterator(batches())
    next(iterator)
    iterator.read()
    assert next(iterator) == 2
    iterator.read()
    with pytest.raises(ValueError, match="a bad row"):
        next(iterator)


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_batches_are_copied_when_read_with_host_copies(kind: type[Any]) -> None:
    on_host = {name: torch.tensor([[1, 2], [3, n]]) for n, name in enumerate(("input_ids", "labels", "attention_mask"))}
    iterator = PrefetchIterator(iter([kind(on_host), kind(on_host)]), torch.device("meta"))
    assert next(iterator)["labels"].is_meta
    iterator.read()
    batch = next(iterator)
    sent_again = send_to_device(batch, torch.device("meta"))  # as accelerate does
    assert sent_again["labels"].is_meta
    assert sent_again["input_ids"].is_meta
    for name in ("labels", "attention_mask"):
        assert host_values(sent_again[name]).tolist() == on_host[name].tolist()
    assert type(batch["input_ids"]) is Tensor


def test_tuple_batches_are_copied() -> None:
    iterator = PrefetchIterator(iter([(torch.ones(1), "a"), (torch.ones(2), "b")]), torch.device("meta"))
    next(iterator)
    iterator.read()
    tensor, name = next(iterator)
    assert tensor.is_meta
    assert name == "b"


@pytest.mark.filterwarnings("ignore:.pin_memory:UserWarning")  # there is no device to pin for on a CPU
@pytest.mark.parametrize("pinned", [True, False])
def test_async_copies_only_from_pinned_memory(pinned: bool, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(write_llama(tmp_path)), max_seq_length=16)
    batches = [{"labels": torch.tensor([n])} for n in range(3)]
    loader = SimpleNamespace(base_dataloader=DataLoader(batches, batch_size=None, pin_memory=pinned))  # type: ignore[arg-type]
    loader.device = torch.device("meta")
    trainer = type("Trainer", (), {})()
    trainer.model, trainer.args = model, SimpleNamespace(n_gpu=1)
    PREFETCH_BATCHES.make(lambda _: loader)(trainer)
    iterator = iter(loader.base_dataloader)
    next(iterator)
    model.after_forward()
    assert next(iterator)["labels"].is_meta == pinned


@pytest.mark.filterwarnings("ignore:.pin_memory:UserWarning")
def test_dispatched_iterable_datasets_are_not_prefetched(tmp_path: Path) -> None:
    """accelerate's loader for them has no device."""
    model, _ = FastLanguageModel.from_pretrained(str(write_llama(tmp_path / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0)
    rows = [[n, n + 1, n + 2, n + 3] for n in range(3, 19)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows}).to_iterable_dataset()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=3, report_to="none", use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    arguments.dataloader_pin_memory = True  # as with a GPU
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=default_data_collator)
    assert trainer.train().global_step == 3


def train(folder: Path, order: list[Any], **changes: Any) -> Any:
    """Train for an epoch; append to `order` the tokens of each batch when it is read, and "step" at each step."""
    model, tokenizer = FastLanguageModel.from_pretrained(str(write_llama(folder / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0)
    data = Dataset.from_dict({"input_ids": [[n, n + 1, n + 2, n + 3] for n in range(3, 19)]})
    arguments = SFTConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, num_train_epochs=1, report_to="none",
        save_strategy="no", use_cpu=True, bf16=False, logging_steps=1, seed=3, **changes,
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    collate, step = trainer.data_collator.torch_call, trainer.training_step

    def collated(examples: Any) -> Any:
        order.append([example["input_ids"][0] for example in examples])
        return collate(examples)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        order.append("step")
        return result

    trainer.data_collator.torch_call, trainer.training_step = collated, stepped
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_prefetch_keeps_batches_and_losses(accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[Any] = []
    between: list[Any] = []
    first = train(tmp_path, during, gradient_accumulation_steps=accumulation)
    trl.revert()
    monkeypatch.setattr(trl, "_ALL", (trl.SFT_HEAD, trl.COLLATOR, trl.PACKING_ATTENTION))
    second = train(tmp_path, between, gradient_accumulation_steps=accumulation)
    assert [batch for batch in during if batch != "step"] == [batch for batch in between if batch != "step"]
    losses = [[entry.get("loss") for entry in run.state.log_history] for run in (first, second)]
    assert losses[0] == losses[1]
    # accelerate is one batch ahead already; prefetch adds one more
    assert during.index("step") == between.index("step") + 1
    assert len(during) == len(between)


def test_a_copied_model_does_not_prefetch(tmp_path: Path) -> None:
    trainer = train(tmp_path, [])
    model = trainer.model.get_base_model()
    assert model.after_forward is not None
    assert copy.deepcopy(model).after_forward is None
    assert pickle.loads(pickle.dumps(model.after_forward)) is None
    del trainer
    gc.collect()
    assert model.after_forward._iterator() is None  # the iterator is gone
    model.after_forward()

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from pantheraml import FastLanguageModel
from pantheraml.hooks import trl
from pantheraml.models import read_ahead
from tests.toy import write_llama


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    trl.revert()


class Order(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seen.append("optimizer")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen.append("end")


def train(place: Path, order: Order, **changes: Any) -> Any:
    model, tokenizer = FastLanguageModel.from_pretrained(str(write_llama(place / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0)
    data = Dataset.from_dict({"input_ids": [[n, n + 1, n + 2, n + 3] for n in range(3, 19)]})
    arguments = SFTConfig(
        output_dir=str(place / "out"), per_device_train_batch_size=2, max_steps=6, report_to="none", seed=3,
        save_strategy="no", use_cpu=True, bf16=False, **{"logging_steps": 1, **changes},
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[order])
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("changes", [{}, {"logging_steps": 3}, {"max_grad_norm": 0.0}, {"max_grad_norm": 1e-3}])
def test_the_same_is_logged(tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = logged(train(tmp_path / "with", Order(), **changes))
    trl.revert()
    others = tuple(each for each in trl._ALL if each is not trl.GRADIENT_NORM)
    monkeypatch.setattr(trl, "_ALL", others)
    assert found == logged(train(tmp_path / "without", Order(), **changes))
    assert len(found) == 6 // changes.get("logging_steps", 1)
    assert len(set(found)) == len(found)


def test_it_is_sent_before_the_optimizers_step_and_read_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order()
    usual = read_ahead.copy_ahead

    def copied(tensor: Tensor) -> Callable[[], Tensor]:
        read = usual(tensor)
        if tensor.requires_grad or tensor.ndim:  # a loss, or numbers of tokens
            return read
        order.seen.append("sent")
        return lambda: order.seen.append("read") or read()  # type: ignore[func-returns-value]

    monkeypatch.setattr(read_ahead, "copy_ahead", copied)
    train(tmp_path, order)
    assert order.seen == 6 * ["sent", "sent", "optimizer", "end", "read", "read"]

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
from pantheraml.models import async_scalars
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


def train(folder: Path, order: Order, **changes: Any) -> Any:
    model, tokenizer = FastLanguageModel.from_pretrained(str(write_llama(folder / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0)
    data = Dataset.from_dict({"input_ids": [[n, n + 1, n + 2, n + 3] for n in range(3, 19)]})
    arguments = SFTConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, max_steps=6, report_to="none", seed=3,
        save_strategy="no", use_cpu=True, bf16=False, **{"logging_steps": 1, **changes},
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[order])
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("changes", [{}, {"logging_steps": 3}, {"max_grad_norm": 0.0}, {"max_grad_norm": 1e-3}])
def test_logged_values_are_equal(tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    actual = logged(train(tmp_path / "with", Order(), **changes))
    trl.revert()
    others = tuple(each for each in trl._ALL if each is not trl.ASYNC_GRAD_NORM)
    monkeypatch.setattr(trl, "_ALL", others)
    assert actual == logged(train(tmp_path / "without", Order(), **changes))
    assert len(actual) == 6 // changes.get("logging_steps", 1)
    assert len(set(actual)) == len(actual)


def test_metrics_are_copied_before_the_optimizer_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order()
    real_copy = async_scalars.start_host_copy

    def logged_copy(tensor: Tensor) -> Callable[[], Tensor]:
        read = real_copy(tensor)
        if tensor.requires_grad or tensor.ndim:  # a loss, or token counts
            return read
        order.seen.append("sent")
        return lambda: order.seen.append("read") or read()  # type: ignore[func-returns-value]

    monkeypatch.setattr(async_scalars, "start_host_copy", logged_copy)
    train(tmp_path, order)
    assert order.seen == 6 * ["sent", "sent", "optimizer", "end", "read", "read"]

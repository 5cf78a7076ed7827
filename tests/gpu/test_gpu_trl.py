"""TRL's SFTTrainer with our model on a GPU: the losses of the plain model, and no full logits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import toy

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel
from pantheraml.kernels.linear_cross_entropy import head
from pantheraml.kernels.token_scores import DeferredGrad
from pantheraml.models.quantize.fp8 import FP8Linear

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "model"
    return toy.write_llama(path, hidden_size=128, intermediate_size=256, initializer_range=0.05)


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def fast_model(folder: Path, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), dtype=torch.bfloat16, **arguments)
    return FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)


def plain_model(folder: Path, like: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    targets = like.peft_config["default"].target_modules
    plain = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    set_peft_model_state_dict(plain, get_peft_model_state_dict(like))
    return plain


def trainer(model: Any, folder: Path, output: Path, **settings: Any) -> SFTTrainer:
    fixed = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "max_length": 128,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": True,
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(output), **{**fixed, **settings}),
        train_dataset=Dataset.from_list(toy.arithmetic(400)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


def losses(model: Any, folder: Path, output: Path, **settings: Any) -> list[float]:
    run = trainer(model, folder, output, **settings)
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("settings", [{}, {"packing": True}, {"gradient_checkpointing": False}])
def test_bf16_gives_the_losses_of_the_plain_model(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    fast = fast_model(folder)
    plain = plain_model(folder, fast)
    ours = losses(fast, folder, tmp_path / "fast", **settings)
    assert ours == pytest.approx(losses(plain, folder, tmp_path / "plain", **settings), rel=2e-2)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("packed", ["load_in_4bit", "load_in_8bit", "load_in_fp8"])
def test_quantized_weights_learn(folder: Path, tmp_path: Path, packed: str) -> None:
    actual = losses(fast_model(folder, **{packed: True}), folder, tmp_path / "run")
    assert actual[-1] < actual[0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # torch warns that it is a prototype, once
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_sync_for_gradients(folder: Path, tmp_path: Path, accumulation: int) -> None:
    """From the queued backward until the optimizer step: the GPU would run dry meanwhile."""
    step_losses = []

    class StepTaken(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    run = trainer(fast_model(folder), folder, tmp_path / "run", gradient_accumulation_steps=accumulation)
    run.add_callback(StepTaken())
    step = run.training_step

    def training_step(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        loss = step(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        step_losses.append(loss)
        return loss

    run.training_step = training_step
    try:
        run.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(step_losses) == STEPS * accumulation
    assert all(bool(loss.isfinite()) for loss in step_losses)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("packed", [False, True])
def test_next_step_starts_without_sync(folder: Path, tmp_path: Path, packed: bool) -> None:
    """From the queued backward until the layers are called again: optimizer step, logging and next batch lie in
    between.
    """
    settings = {"packing": True, "max_length": 64} if packed else {}
    run = trainer(fast_model(folder), folder, tmp_path / "run", **settings)
    step, launches = run.training_step, []

    def on_forward(*_: Any) -> None:
        launches.append(torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("default")

    def training_step(*arguments: Any) -> Any:
        loss = step(*arguments)
        if 2 < len(launches) < STEPS:  # the first batches are not prefetched
            torch.cuda.set_sync_debug_mode("error")
        return loss

    run.training_step = training_step
    run.model.get_base_model().model.register_forward_pre_hook(on_forward)
    try:
        run.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launches.count(2) == STEPS - 3


@pytest.mark.parametrize("fp8", [False, True])
def test_full_logits_are_never_materialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    vocabulary, tokens = 2**17, 4096
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2**24)
    wide = toy.write_llama(tmp_path / "wide", vocab_size=vocabulary, hidden_size=128)
    model = fast_model(wide, load_in_fp8=fp8)
    assert isinstance(model.get_output_embeddings(), FP8Linear) == fp8
    model.train()
    ids = torch.randint(2, vocabulary, (4, tokens // 4), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = model(input_ids=ids, labels=ids, fused_lm_head=True)
    (-scores.log_probs.sum() / tokens).backward()
    assert torch.cuda.max_memory_allocated() - before < vocabulary * tokens * 2 / 2, "half of the logits, in bf16"


def test_metrics_are_readable_during_the_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast_model(folder)
    ids = torch.randint(0, 200, (2, 64), device="cuda")
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    rows = DeferredGrad.rows

    def delayed_rows(deferred: DeferredGrad) -> torch.Tensor | None:
        torch.cuda._sleep(2_000_000_000)  # about a second, in cycles
        return rows(deferred)

    model(**inputs, fused_lm_head=True)  # warm-up
    monkeypatch.setattr(DeferredGrad, "rows", delayed_rows)
    scores = model(**inputs, fused_lm_head=True)
    entropy, correct, count = scores.entropy.sum(), scores.is_top1.sum(), scores.label_mask.sum()
    tokens = inputs["attention_mask"].sum()
    assert count > 0
    assert (count.item(), tokens.item()) == (2 * 63, 2 * 64)
    during = (entropy / count).item(), (correct / count).item()
    assert not torch.cuda.current_stream().query(), "the host synchronized"
    torch.cuda.synchronize()
    with torch._C.DisableTorchFunctionSubclass():
        after = (entropy / count).item(), (correct / count).item()
    assert during == pytest.approx(after, rel=1e-6)

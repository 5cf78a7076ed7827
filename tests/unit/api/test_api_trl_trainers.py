"""TRL's preference and reward-driven trainers over our models and over plain PEFT: the same weights after training."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from pantheraml import FastLanguageModel
from pantheraml.hooks import trl as trl_hooks
from pantheraml.models.fast import is_fused
from pantheraml.models.quantize.fp8 import FP8Linear
from tests import toy

STEPS = 3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    return toy.write_llama(tmp_path_factory.mktemp("trl") / "model", hidden_size=64, initializer_range=0.2)


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def rows(kind: str) -> Dataset:
    pairs = [(row["prompt"], row["completion"]) for row in toy.arithmetic(16)]
    if kind in ("grpo", "rloo"):
        return Dataset.from_list([{"prompt": prompt} for prompt, _ in pairs])
    if kind == "dpo":
        return Dataset.from_list([{"prompt": p, "chosen": c, "rejected": c[::-1] + "0"} for p, c in pairs])
    if kind == "kto":
        return Dataset.from_list(
            [{"prompt": p, "completion": c, "label": i % 2 == 0} for i, (p, c) in enumerate(pairs)]
        )
    return Dataset.from_list([{"prompt": p, "completion": c} for p, c in pairs])


def settings(kind: str) -> dict[str, Any]:
    fixed: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,  # AdamW turns rounding of tiny gradients into this much of a step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    if kind in ("grpo", "rloo"):
        fixed |= {"max_completion_length": 8, "num_generations": 2, "beta": 0.1}
    return fixed


def make_trainer(kind: str, model: Any, folder: Path, output: Path, *, peft_config: Any = None, **changes: Any) -> Any:
    trainer, config = TRAINERS[kind]
    more = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    return trainer(
        model=model,
        args=config(output_dir=str(output), **{**settings(kind), **changes}),
        train_dataset=rows(kind),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=peft_config,
        **(more if kind in ("grpo", "rloo") else {}),
    )


def loaded(folder: Path, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", **arguments)
    return model


def fast_model(folder: Path, *, checkpointing: Any = False, **loading: Any) -> Any:
    return FastLanguageModel.get_peft_model(
        loaded(folder, **loading),
        r=4,
        lora_alpha=8,
        target_modules=TARGETS,
        use_gradient_checkpointing=checkpointing,
    )


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **{"target_modules": TARGETS, **changes})


def plain_model(folder: Path, like: Any) -> Any:
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora())
    set_peft_model_state_dict(plain, get_peft_model_state_dict(like))
    return plain


def trained(run: Any) -> dict[str, torch.Tensor]:
    set_seed(0)
    run.train()
    return dict(get_peft_model_state_dict(run.model))


def assert_same_training(ours: Any, theirs: Any) -> None:
    start = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(theirs.model).items()}
    mine, other = trained(ours), trained(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=2e-5, msg=name)
    assert any(not torch.equal(start[name], tensor) for name, tensor in other.items())


def assert_trains(run: Any) -> None:
    start = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(run.model).items()}
    after = trained(run)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(start[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
@pytest.mark.parametrize("checkpointing", [None, True, "offload", "selective"], ids=str)
def test_reference_passes_between_forward_and_recomputation(
    folder: Path, tmp_path: Path, kind: str, checkpointing: Any
) -> None:
    """None: the trainer's own checkpointing, on by default."""
    fast = fast_model(folder, checkpointing=checkpointing or False)
    assert any(is_fused(layer) for layer in fast.modules())
    plain = plain_model(folder, fast)
    chosen = [
        (m.gradient_checkpointing, vars(m).get("_gradient_checkpointing_func")) for m in fast.modules() if is_fused(m)
    ]
    assert_same_training(
        make_trainer(kind, fast, folder, tmp_path / "fast"), make_trainer(kind, plain, folder, tmp_path / "plain")
    )
    after = [
        (m.gradient_checkpointing, vars(m).get("_gradient_checkpointing_func")) for m in fast.modules() if is_fused(m)
    ]
    assert all(on for on, _ in after)
    assert checkpointing is None or after == chosen, "the trainer suspends it for the reference pass"


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
@pytest.mark.parametrize("option", ["load_in_fp8", "load_in_4bit", "load_in_8bit"])
def test_quantized_weights(folder: Path, tmp_path: Path, kind: str, option: str) -> None:
    """These trainers multiply the hidden states by `lm_head.weight`."""
    assert_trains(make_trainer(kind, fast_model(folder, **{option: True}), folder, tmp_path))


def test_sft_over_fp8_without_our_hooks(folder: Path, tmp_path: Path) -> None:
    """As with a TRL version that the hooks do not know."""
    losses = []
    for name in ("hooked", "plain"):
        fast = fast_model(folder, load_in_fp8=True)
        if name == "plain":
            trl_hooks.revert()
        run = make_trainer("sft", fast, folder, tmp_path / name)
        assert_trains(run)
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_an_fp8_head_shows_its_weight(folder: Path) -> None:
    head = fast_model(folder, load_in_fp8=True).get_output_embeddings()
    assert isinstance(head, FP8Linear)
    weight = head.weight
    assert torch.equal(weight, head.to_linear(torch.float32).weight)
    assert head.weight is weight, "readers share a copy"
    assert not list(head.parameters())
    assert copy.deepcopy(head).weight is not weight

"""Embedding and output head trained in full beside adapters: the same as plain PEFT, saved, merged and loaded again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.models.fast import is_fused
from pantheraml.models.saving.merged_folder import write_merged
from pantheraml.models.trained_copies import use_float32_copies
from tests import toy
from tests.unit.api.test_api_trl_trainers import _trainers_write_to_the_environment, assert_same_training
from tests.unit.api.trl_runs import TARGETS, loaded, lora, make_trainer, plain_base

__all__ = ["_trainers_write_to_the_environment"]

ENDS = ["lm_head", "embed_tokens"]
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {}, "bf16": {"dtype": torch.bfloat16}, "fp8": {"load_in_fp8": True}, "nf4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
}  # fmt: skip
IDS = torch.arange(2, 22)[None]
Folders = dict[bool, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models by whether their head is tied."""
    disable_progress_bar()
    root = tmp_path_factory.mktemp("copies")
    sizes = {"hidden_size": 64, "initializer_range": 0.2}
    return {tied: toy.write_llama(root / str(tied), tie_word_embeddings=tied, **sizes) for tied in (False, True)}


def adapted(folder: Path, *, ends: list[str] = ENDS, settings: dict[str, Any] | None = None, **loading: Any) -> Any:
    return FastLanguageModel.get_peft_model(
        loaded(folder, **loading), r=4, lora_alpha=8, target_modules=[*TARGETS, *ends], **(settings or {})
    )


def plain_like(folder: Path, model: Any) -> Any:
    """Plain PEFT with the same adapter."""
    config = model.peft_config["default"]
    full = {"modules_to_save": list(config.modules_to_save), "ensure_weight_tying": config.ensure_weight_tying}
    plain = get_peft_model(plain_base(folder), lora(**full))
    set_peft_model_state_dict(plain, get_peft_model_state_dict(model, save_embedding_layers=False))
    return plain


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def copies(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "modules_to_save" in name}


def change(model: Any) -> Any:
    """Give adapters and copies an effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`")  # DPO's adapter of the reference
def test_training_equals_plain_peft(folders: Folders, tmp_path: Path, kind: str, tied: bool) -> None:
    fast = adapted(folders[tied])
    assert sum(is_fused(layer) for layer in fast.modules()) == 2
    assert fast.get_base_model().why_full_logits() is None
    assert len(copies(fast)) == (1 if tied else 2)
    mine, _ = assert_same_training(
        make_trainer(kind, fast, folders[tied], tmp_path / "fast"),
        make_trainer(kind, plain_like(folders[tied], fast), folders[tied], tmp_path / "plain"),
    )
    trained = [name for name in mine.weights if "lora_" not in name]
    assert len(trained) == 2, "a tied one is listed under both names"
    assert all(not torch.equal(mine.weights[name], mine.start[name]) for name in trained)


def test_one_end_alone_and_rslora(folders: Folders, tmp_path: Path) -> None:
    settings = {"modules_to_save": ["lm_head"], "use_rslora": True}
    fast = adapted(folders[False], ends=[], settings=settings)
    assert list(copies(fast)) == ["base_model.model.lm_head.modules_to_save.default.weight"]
    config = lora(modules_to_save=["lm_head"], use_rslora=True)
    plain = get_peft_model(plain_base(folders[False]), config)
    set_peft_model_state_dict(plain, get_peft_model_state_dict(fast))
    runs = [make_trainer("sft", m, folders[False], tmp_path / n) for n, m in (("fast", fast), ("plain", plain))]
    assert_same_training(*runs)


@pytest.mark.parametrize(
    "names", [{"modules_to_save": ENDS}, {"target_modules": [*TARGETS, "embed_tokens"]}], ids=["copies", "lora"]
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_peft_config_of_a_trainer_means_what_it_does_in_peft(
    folders: Folders, tmp_path: Path, names: dict[str, Any]
) -> None:
    """PEFT puts LoRA on target modules, whatever they are."""
    runs = []
    for name, model in (("fast", loaded(folders[False])), ("plain", plain_base(folders[False]))):
        set_seed(1)
        runs.append(make_trainer("sft", model, folders[False], tmp_path / name, peft_config=lora(**names)))
    assert_same_training(*runs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant_format", FORMATS)
def test_copies_are_float32_over_any_base(folders: Folders, tmp_path: Path, quant_format: str, tied: bool) -> None:
    """Trained, saved, loaded again over the same base; what goes through the layers keeps the base's dtype."""
    model = adapted(folders[tied], **FORMATS[quant_format])
    base = model.get_base_model()
    assert {p.dtype for p in copies(model).values()} == {torch.float32}
    assert base.model.embed_tokens(IDS).dtype == base.dtype
    assert logits(model).isfinite().all()
    before = {name: p.detach().clone() for name, p in copies(model).items()}
    make_trainer("sft", model, folders[tied], tmp_path / "run", max_steps=2).train()
    assert all(not torch.equal(p, before[name]) for name, p in copies(model).items())
    model.save_lora(tmp_path / "lora")
    again = loaded(tmp_path / "lora", **FORMATS[quant_format])
    assert all(torch.equal(p, copies(again)[name]) for name, p in copies(model).items())
    assert all(p.requires_grad for p in copies(again).values())
    # a trained model runs in another order of operations, which bf16 and fp8 round differently
    assert relative(logits(again), logits(model)) <= (0.08 if quant_format in ("bf16", "fp8") else 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_adapters_are_plain_pefts(folders: Folders, tmp_path: Path, tied: bool) -> None:
    model = change(adapted(folders[tied]))
    model.save_lora(tmp_path / "ours")
    model.save_pretrained(tmp_path / "peft")
    for saved in ("ours", "peft"):
        plain = PeftModel.from_pretrained(plain_base(folders[tied]), str(tmp_path / saved))
        assert relative(logits(plain), logits(model)) <= 1e-5
        assert relative(logits(loaded(tmp_path / saved)), logits(model)) <= 1e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant_format", ["plain", "nf4"])
def test_merged_models_have_the_trained_copies(folders: Folders, tmp_path: Path, quant_format: str, tied: bool) -> None:
    model = change(adapted(folders[tied], **FORMATS[quant_format]))
    write_merged(model.get_base_model(), tmp_path, AutoTokenizer.from_pretrained(folders[tied]), dtype=torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert relative(logits(read), logits(model)) <= 1e-5
    assert relative(logits(read), logits(plain_base(folders[tied]))) > 0.1


def test_the_base_is_what_passes_without_the_adapter_use(folders: Folders) -> None:
    model = change(adapted(folders[False]))
    with model.disable_adapter():
        assert relative(logits(model), logits(plain_base(folders[False]))) <= 1e-5


def test_a_tied_head_is_reported(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pantheraml"):
        model = adapted(folders[True], ends=["embed_tokens"])
    assert "one copy is trained for both" in caplog.text
    assert "trained in full, in float32: embed_tokens" in caplog.text
    base = model.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight


def test_a_tied_head_may_be_trained_apart(folders: Folders, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ensure_weight_tying"):
        model = change(adapted(folders[True], settings={"ensure_weight_tying": False}))
    assert len(copies(model)) == 2
    write_merged(model.get_base_model(), tmp_path, dtype=torch.float32)
    assert relative(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model)) <= 1e-5


def test_gemmas_scale_is_rounded_as_in_its_base(tiny_model: Callable[..., Path]) -> None:
    model = loaded(tiny_model("gemma", hidden_size=48), dtype=torch.bfloat16)
    expected = model.model.embed_tokens(IDS)
    assert relative(expected, model.model.embed_tokens.weight[IDS] * 48**0.5) > 1e-4
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "embed_tokens"])
    assert torch.equal(model.get_base_model().model.embed_tokens(IDS), expected)


def test_quantized_modules_are_dequantized(folders: Folders) -> None:
    model = loaded(folders[False], load_in_4bit=True)
    expected = logits(model)
    adapters: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["o_proj"]))
    use_float32_copies(adapters, torch.float32)
    assert [p.shape for p in copies(adapters).values()] == [(64, 64)] * 2
    assert all(p.requires_grad for p in copies(adapters).values())
    assert relative(logits(adapters), expected) <= 1e-5


def test_bad_names(folders: Folders, tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="does not have: head") as caught:
        adapted(folders[False], ends=[], settings={"modules_to_save": ["head"]})
    assert "embed_tokens, lm_head" in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="wte") as refused:
        FastLanguageModel.get_peft_model(loaded(tiny_model("gpt2")), target_modules=["c_attn", "lm_head"])
    assert "ensure_weight_tying=False" in str(refused.value)

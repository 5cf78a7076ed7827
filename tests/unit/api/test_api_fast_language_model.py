"""FastLanguageModel against plain transformers and PEFT: same loss, same gradients, same files."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import pantheraml
from pantheraml import FastLanguageModel
from pantheraml.base.errors import (
    ConfigError,
    DeviceError,
    ModelError,
    OutOfMemoryError,
    PantheraError,
    UnsupportedModelError,
)
from pantheraml.models.attention import uses_document_attention
from pantheraml.models.fast import is_fused
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.fp8_training import FP8TrainingLinear
from tests import toy
from tests.unit.models.conftest import TinyModel

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gemma2": {},  # logit soft-capping: the loss needs full logits
}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def batch() -> dict[str, Tensor]:
    """Two rows, one of them padded, and labels with a gap."""
    ids = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.clone()
    labels[mask == 0] = -100
    labels[0, 2:5] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def randomize_adapter(model: Any) -> None:
    """Give the adapter values that have an effect; a fresh one has none."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def fast_model(folder: Path, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu")
    adapted = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, **arguments)
    randomize_adapter(adapted)
    return adapted.train()


def plain_model(folder: Path, like: Any) -> Any:
    """Return the same model and adapter, from transformers and PEFT alone."""
    config = like.peft_config["default"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=config.target_modules,
        fan_in_fan_out=config.fan_in_fan_out,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
    )
    plain = get_peft_model(base, lora)
    set_peft_model_state_dict(plain, get_peft_model_state_dict(like))
    return plain.train()


def gradients(model: Any) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert grads
    return grads


def assert_trains_alike(fast: Any, plain: Any, **more: Any) -> None:
    ours, theirs = fast(**batch(), **more), plain(**batch(), **more)
    torch.testing.assert_close(ours.loss, theirs.loss, **CLOSE)
    ours.loss.backward()
    theirs.loss.backward()
    mine, other = gradients(fast), gradients(plain)
    assert mine.keys() == other.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], **CLOSE, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_and_peft(tiny_model: TinyModel, family: str) -> None:
    folder = tiny_model(family, **FAMILIES[family])
    fast = fast_model(folder)
    plain = plain_model(folder, fast)
    assert_trains_alike(fast, plain)
    assert_trains_alike(fast, plain, num_items_in_batch=torch.tensor(7))


@pytest.mark.seed("S0-097")
@pytest.mark.parametrize(
    "variant", [{"use_dora": True}, {"use_rslora": True}, {"target_modules": ["q_proj", "v_proj"]}]
)
def test_kinds_of_adapters(tiny_model: TinyModel, variant: dict[str, Any]) -> None:
    fast = fast_model(tiny_model("llama"), **variant)
    assert_trains_alike(fast, plain_model(tiny_model("llama"), fast))


def test_full_fine_tuning(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    fast, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", full_finetuning=True)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_trains_alike(fast.train(), plain.train())
    assert not any(is_fused(layer) for layer in fast.modules()), "compiled layers were measured faster"
    fast.save_pretrained(tmp_path)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path))
    assert after == before
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(batch()["input_ids"]).logits, fast.eval()(batch()["input_ids"]).logits, **CLOSE)


def test_logits_in_evaluation_but_not_in_training(tiny_model: TinyModel) -> None:
    fast = fast_model(tiny_model("llama"))
    plain = plain_model(tiny_model("llama"), fast)
    made = fast(**batch())
    assert made[0] is made["loss"] is made.loss
    assert "logits" not in made, "nobody has read them"
    assert fast(input_ids=batch()["input_ids"]).logits is not None
    with torch.no_grad():
        ours, theirs = FastLanguageModel.for_inference(fast)(**batch()), plain.eval()(**batch())
    torch.testing.assert_close(ours.loss, theirs.loss, **CLOSE)
    attended = batch()["attention_mask"].bool()  # padding positions do not matter
    torch.testing.assert_close(ours.logits[attended], theirs.logits[attended], rtol=1e-4, atol=1e-5)
    assert FastLanguageModel.for_training(fast).training


@pytest.mark.parametrize("more", [{"logits_to_keep": 3}, {"return_dict": False}])
def test_requested_logits_in_training(tiny_model: TinyModel, more: dict[str, Any]) -> None:
    fast = fast_model(tiny_model("llama"))
    inputs = {name: tensor[:1] for name, tensor in batch().items()}
    if "logits_to_keep" in more:
        inputs["labels"] = inputs["labels"][:, -3:]
    ours, theirs = fast(**inputs, **more), plain_model(tiny_model("llama"), fast)(**inputs, **more)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[0], theirs[0], **CLOSE)


@pytest.mark.parametrize("training", [True, False])
def test_token_scores(tiny_model: TinyModel, training: bool) -> None:
    fast = fast_model(tiny_model("llama")).train(training)
    inputs = batch()
    scores = fast(**inputs, fused_lm_head=True)
    labels = inputs["labels"][:, 1:]
    log_p = plain_model(tiny_model("llama"), fast)(**inputs).logits[:, :-1].log_softmax(-1)
    mask = labels != -100
    expected = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    torch.testing.assert_close(scores.log_probs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.entropy, -(log_p.exp() * log_p).sum(-1) * mask, rtol=1e-4, atol=1e-5)
    assert torch.equal(scores.is_top1, (log_p.argmax(-1) == labels) & mask)
    assert torch.equal(scores.label_mask, mask)


def test_no_token_scores_from_a_non_linear_head(tiny_model: TinyModel) -> None:
    with pytest.raises(UnsupportedModelError, match="capped"):
        fast_model(tiny_model("gemma2"))(**batch(), fused_lm_head=True)


def test_documents_of_a_packed_row_do_not_see_each_other(tiny_model: TinyModel) -> None:
    fast = fast_model(tiny_model("llama"))
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, 250, (1, length), generator=generator) for length in (7, 3, 11)]
    alone = sum(fast(input_ids=d, labels=d, num_items_in_batch=1).loss for d in documents)
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    labels = torch.cat(documents, dim=1)
    labels = labels.masked_fill(positions == 0, -100)
    packed = fast(input_ids=torch.cat(documents, dim=1), position_ids=positions, labels=labels, num_items_in_batch=1)
    torch.testing.assert_close(packed.loss, alone, **CLOSE)


def test_the_saved_adapter_is_plain_peft(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    fast = fast_model(folder)
    fast.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, tmp_path)
    ids = batch()["input_ids"]
    torch.testing.assert_close(fast.eval()(ids).logits, plain.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_generation(tiny_model: TinyModel) -> None:
    fast = fast_model(tiny_model("llama"))
    plain = plain_model(tiny_model("llama"), fast)
    ids = batch()["input_ids"][:1]
    ours, theirs = (m.eval().generate(input_ids=ids, max_new_tokens=8, do_sample=False) for m in (fast, plain))
    assert ours.shape == (1, 20)
    assert torch.equal(ours, theirs)


def test_adapter_init_depends_on_the_seed_only(tiny_model: TinyModel) -> None:
    def first(seed: int) -> Tensor:
        model, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu")
        adapted = FastLanguageModel.get_peft_model(model, random_state=seed)
        return next(p for n, p in adapted.named_parameters() if "lora_A" in n)

    torch.manual_seed(0)
    one = first(1)
    torch.manual_seed(99)
    assert torch.equal(one, first(1))
    assert not torch.equal(one, first(2))


@pytest.mark.seed("S0-098", "S0-099")
@pytest.mark.parametrize(("option", "cosine"), [("load_in_4bit", 0.8), ("load_in_8bit", 0.99), ("load_in_fp8", 0.95)])
def test_over_quantized_weights(tiny_model: TinyModel, option: str, cosine: float) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu", **{option: True})
    adapted = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    randomize_adapter(adapted)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trained)
    plain = plain_model(tiny_model("llama"), adapted)
    ours, theirs = adapted.train()(**batch()), plain(**batch())
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=0.1, atol=0)
    ours.loss.backward()
    theirs.loss.backward()
    mine, other = (torch.cat([g.flatten() for g in gradients(m).values()]) for m in (adapted, plain))
    assert torch.cosine_similarity(mine, other, dim=0) > cosine
    # the adapter has an effect on the loss
    with adapted.disable_adapter(), torch.no_grad():
        assert abs(float(adapted(**batch()).loss) - float(ours.loss.detach())) > 0.01


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary size is a multiple of 16, as fp8 tensor cores need."""
    return toy.write_llama(tmp_path_factory.mktemp("fp8") / "model", hidden_size=64, initializer_range=0.1)


def fp8_model(folder: Path, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", load_in_fp8=True)
    adapted = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, **arguments)
    randomize_adapter(adapted)
    return adapted.train()


def test_a_loss_of_the_scripts_own_reads_the_logits(tiny_model: TinyModel) -> None:
    """Although labels are passed, as `model(**inputs).logits` in a `compute_loss`: same values, same gradients."""
    fast = fast_model(tiny_model("llama"))
    plain = plain_model(tiny_model("llama"), fast)
    for read in (
        lambda out: out.logits,
        lambda out: out["logits"],
        lambda out: out[1],
        lambda out: out[:2][1],
        lambda out: out.get("logits"),
        lambda out: out.to_tuple()[1],
    ):
        ours, theirs = fast(**batch(), output_hidden_states=True), plain(**batch(), output_hidden_states=True)
        with torch.no_grad():
            read(ours)
        attended = batch()["attention_mask"].bool()
        mine, other = (read(out)[attended] for out in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert list(ours)[:2] == list(theirs)[:2] == ["loss", "logits"]
        for logits, out in ((mine, ours), (other, theirs)):
            (logits.logsumexp(-1).mean() + 0.1 * out.loss).backward()
        actual, expected = gradients(fast), gradients(plain)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-6)


def test_logits_survive_a_conversion_of_the_outputs(tiny_model: TinyModel) -> None:
    """As accelerate does under mixed precision; nothing is kept after the backward."""
    fast = fast_model(tiny_model("llama"))
    made = fast(**batch())
    converted = convert_outputs_to_fp32(lambda: made)()
    assert converted is not made
    expected = made.logits.detach()
    assert torch.equal(converted.logits, expected)
    again = convert_outputs_to_fp32(lambda: fast(**batch()))()
    again.loss.backward()
    assert again.logits is None
    with torch.autocast("cpu", torch.bfloat16):
        outside = fast(**batch())
    assert outside.logits.dtype == torch.float32
    torch.testing.assert_close(outside.logits, expected, rtol=0.05, atol=0.05)


def test_a_forward_without_a_backward_is_freed(tiny_model: TinyModel) -> None:
    fast = fast_model(tiny_model("llama"))
    made: list[weakref.ref[torch.Tensor]] = []
    fast.get_base_model().model.norm.register_forward_hook(lambda _, __, hidden: made.append(weakref.ref(hidden)))
    fast(**batch()).loss.item()
    gc.collect()
    assert [hidden() for hidden in made] == [None]


def test_an_fp8_base_has_an_fp8_head(fp8_folder: Path, tmp_path: Path) -> None:
    fast = fp8_model(fp8_folder)
    head = fast.get_output_embeddings()
    assert isinstance(head, FP8Linear)
    assert fast.get_base_model().why_full_logits() is None
    plain = plain_model(fp8_folder, fast)
    ours, theirs = fast(**batch()), plain(**batch())
    assert "logits" not in ours
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=0.01, atol=0)
    ours.loss.backward()
    theirs.loss.backward()
    mine, other = (torch.cat([g.flatten() for g in gradients(m).values()]) for m in (fast, plain))
    assert torch.cosine_similarity(mine, other, dim=0) > 0.98

    scores = fast(**batch(), fused_lm_head=True)
    torch.testing.assert_close(scores.loss, ours.loss, rtol=1e-5, atol=0)
    scores.loss.backward()
    again = torch.cat([g.flatten() for g in gradients(fast).values()])
    assert torch.cosine_similarity(again, mine, dim=0) > 0.9999

    ids = batch()["input_ids"][:1]
    with torch.no_grad():  # transformers' own forward, which calls the head's
        evaluated = FastLanguageModel.for_inference(fast)(**batch(), use_cache=False)
        torch.testing.assert_close(evaluated.loss, ours.loss, rtol=1e-5, atol=0)
        assert evaluated.logits.shape == (2, 12, head.out_features)
        assert fast.generate(input_ids=ids, max_new_tokens=4, do_sample=False).shape == (1, 16)
    fast.save_pretrained(tmp_path)
    assert not any("lm_head" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_full_finetuning_with_fp8_matmuls(fp8_folder: Path, tmp_path: Path) -> None:
    fast, _ = FastLanguageModel.from_pretrained(str(fp8_folder), full_finetuning=True, load_in_fp8=True)
    kinds = {type(layer) for layer in fast.model.layers.modules() if isinstance(layer, torch.nn.Linear)}
    assert kinds == {FP8TrainingLinear}
    assert type(fast.lm_head) is torch.nn.Linear
    assert all(parameter.requires_grad for parameter in fast.parameters())
    fused = [layer for layer in fast.modules() if is_fused(layer)]
    assert [layer.fused_parts.graphs is not None for layer in fused] == [True] * len(fast.model.layers)
    fast.train()(**batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in fast.parameters())
    fast.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(map(torch.equal, again.state_dict().values(), fast.state_dict().values()))


def test_a_trained_head_is_not_quantized(fp8_folder: Path) -> None:
    fast = fp8_model(fp8_folder, target_modules=["q_proj", "lm_head"])
    head = fast.get_output_embeddings()
    assert isinstance(head, ModulesToSaveWrapper)
    assert type(head.original_module) is type(head.modules_to_save["default"]) is torch.nn.Linear
    assert_trains(fast)


def test_an_nf4_base_is_not_fused_on_a_cpu(tmp_path: Path) -> None:
    """Nothing would be gained, and its matmuls would round to fp8."""
    folder = toy.write_llama(tmp_path / "model", hidden_size=64)
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", load_in_4bit=True)
    fast = FastLanguageModel.get_peft_model(model, r=4).train()
    assert type(fast.get_output_embeddings()) is torch.nn.Linear
    assert not any(is_fused(layer) for layer in fast.modules())
    assert_trains(fast)


def test_a_dense_base_keeps_its_head(fp8_folder: Path) -> None:
    assert type(fast_model(fp8_folder).get_output_embeddings()) is torch.nn.Linear


def assert_trains(model: Any) -> None:
    model(**batch()).loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("length", [2, 8], ids=["few labels", "nearly all"])
@pytest.mark.parametrize("num_items", [7, torch.tensor(7), None], ids=["number", "tensor", "none"])
def test_any_share_of_labeled_tokens(tiny_model: TinyModel, length: int, num_items: Any) -> None:
    """The head runs on labeled tokens only, or on all."""
    fast = fast_model(tiny_model("llama"))
    plain = plain_model(tiny_model("llama"), fast)
    inputs = {"input_ids": batch()["input_ids"], "labels": batch()["input_ids"].clone()}
    inputs["labels"][:, :-length] = -100
    ours, theirs = (m(**inputs, num_items_in_batch=num_items).loss for m in (fast, plain))
    torch.testing.assert_close(ours, theirs, **CLOSE)
    scores = fast(**inputs, num_items_in_batch=num_items, fused_lm_head=True)
    torch.testing.assert_close(scores.loss, theirs, **CLOSE)
    assert scores.log_probs.shape == scores.label_mask.shape == (2, 11)
    assert int(scores.label_mask.sum()) == 2 * length


def test_shifted_labels(tiny_model: TinyModel) -> None:
    fast = fast_model(tiny_model("llama"))
    ids = batch()["input_ids"]
    unshifted = fast(input_ids=ids, labels=ids, fused_lm_head=True)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    scores = fast(input_ids=ids, shift_labels=shifted, fused_lm_head=True)
    assert scores.log_probs.shape == (2, 12)
    assert torch.equal(scores.log_probs[:, :-1], unshifted.log_probs)
    assert not scores.log_probs[:, -1].any()


@pytest.mark.seed("C22", "S2-018")
@pytest.mark.parametrize("mode", [True, "unsloth", "offload", "selective"])
def test_checkpointed_activations_give_the_same_gradients(tiny_model: TinyModel, mode: Any) -> None:
    fast = fast_model(tiny_model("llama"), use_gradient_checkpointing=mode)
    layers = fast.get_base_model().model.layers
    chosen = [layer._gradient_checkpointing_func for layer in layers]
    fast.gradient_checkpointing_enable()  # as a trainer does; must not replace or duplicate the requested mode
    assert [layer._gradient_checkpointing_func for layer in layers] == chosen
    assert_trains_alike(fast, plain_model(tiny_model("llama"), fast))


def test_checkpointing_is_left_to_the_trainer(tiny_model: TinyModel) -> None:
    fast = fast_model(tiny_model("llama"))
    assert not fast.is_gradient_checkpointing
    fast.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert fast.is_gradient_checkpointing
    assert_trains_alike(fast, plain_model(tiny_model("llama"), fast))


def test_a_loaded_model_is_frozen_and_on_document_attention(tiny_model: TinyModel) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert uses_document_attention(model)


def test_max_seq_length_sets_tokenizer_truncation(tiny_model: TinyModel) -> None:
    _, tokenizer = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu", max_seq_length=5)
    assert len(tokenizer("many more characters than five", truncation=True)["input_ids"]) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_seq_length": 0}, ConfigError, "max_seq_length=0"),
        ({"dtype": "int8"}, ConfigError, "float32, bfloat16, float16, auto"),
        ({"load_in_4bit": True, "load_in_8bit": True}, ConfigError, "mutually exclusive"),
        ({"load_in_4bit": True, "full_finetuning": True}, ConfigError, "nf4 weights cannot be trained"),
        ({"device_map": {"layer": "cpu"}}, ConfigError, "modules that the model does not have: layer"),
        ({"device_map": {"": "cpu", "lm_head": "cuda:63"}}, DeviceError, "cuda:63"),
        ({"max_memory": {"cpu": "1KB"}}, OutOfMemoryError, "device cpu"),
        ({"device_map": None, "max_memory": {"cpu": "1GB"}}, ConfigError, "max_memory needs a device_map"),
        ({"device_map": "nowhere"}, ConfigError, "not a valid device"),
        ({"device_map": "cuda:63"}, DeviceError, "cuda:63"),
        ({"use_gradient_checkpointing": "some"}, ConfigError, "'selective'"),
        ({"load_in_16bit": True, "load_in_4bit": True}, ConfigError, "mutually exclusive"),
        ({"auto_model": "AutoModelForMaskedLM"}, ConfigError, "models that answer in text, and classifiers"),
        ({"token": False}, ConfigError, "token=False"),
        ({"use_gradient_checkpointing": "some", "full_finetuning": True}, ConfigError, "'selective'"),
        ({"rope_scaling": {"factor": 2}}, ConfigError, "no known rope_type"),
        ({"load_in_5bit": True}, ConfigError, r"(?s)no argument 'load_in_5bit'.*max_seq_length"),
        ({"model_name": "/nowhere/at/all"}, ModelError, "nowhere"),
    ],
)
def test_loading_errors(tiny_model: TinyModel, arguments: Any, error: type[PantheraError], words: str) -> None:
    with pytest.raises(error, match=words):
        FastLanguageModel.from_pretrained(**{"model_name": str(tiny_model("llama")), "device_map": "cpu", **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"r": 0}, ConfigError, "r=0"),
        ({"lora_dropout": 1.5}, ConfigError, "lora_dropout=1.5"),
        ({"bias": "some"}, ConfigError, "Use one of 'none', 'lora_only', 'all'"),
        ({"target_modules": ["qq_proj"]}, ModelError, "qq_proj"),
        ({"task_type": "SEQ_CLS"}, ConfigError, "does not support task_type"),
        ({"finetune_language_layers": False}, ConfigError, "does not support finetune_language_layers"),
        ({"finetune_attention_modules": False, "finetune_mlp_modules": False}, ConfigError, "left to train"),
        ({"max_seq_length": 65}, UnsupportedModelError, "64 positions"),
        ({"use_gradient_checkpointing": "some"}, ConfigError, "'offload'"),
        ({"loftq_config": {"bits": 4}}, ConfigError, "does not support loftq_config"),
        ({"modules_to_save": ["head"]}, ConfigError, "does not have: head"),
        ({"rank": 8}, ConfigError, "no argument 'rank'"),
    ],
)
def test_adapter_errors(tiny_model: TinyModel, arguments: Any, error: type[PantheraError], words: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu")
    with pytest.raises(error, match=words) as caught:
        FastLanguageModel.get_peft_model(model, **arguments)
    assert str(caught.value).count("fix:") == 1


def test_get_peft_model_rejects_other_models(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="already has adapters"):
        FastLanguageModel.get_peft_model(fast_model(tiny_model("llama")))
    other = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        FastLanguageModel.get_peft_model(other)


@pytest.mark.seed("S0-087", "S2-016", "S2-017")
def test_arguments_of_scripts_written_for_unsloth(tiny_model: TinyModel) -> None:
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(tiny_model("llama")),
        max_seq_length=64,
        dtype=None,
        load_in_4bit=False,
        token=None,
        device_map="cpu",
    )
    adapted = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )
    assert sum(p.requires_grad for p in adapted.parameters()) == 2 * 2 * 7


@pytest.mark.seed("S0-038", "S3-035")
def test_the_package_loads_torch_at_first_use() -> None:
    code = (
        "import sys, pantheraml; assert 'FastLanguageModel' in dir(pantheraml);"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert pantheraml.FastLanguageModel is FastLanguageModel
    with pytest.raises(AttributeError, match="SlowLanguageModel"):
        pantheraml.SlowLanguageModel  # noqa: B018


@pytest.mark.seed("S0-038", "S0-039", "S3-035")
def test_exported_names_exist_and_are_documented() -> None:
    assert pantheraml.__doc__
    for name in pantheraml.__all__:
        if name != "__version__":
            assert (getattr(pantheraml, name).__doc__ or "").strip(), name

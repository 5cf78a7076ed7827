"""Classifiers: reward models by TRL's RewardTrainer, and labels by transformers' Trainer, as with plain PEFT."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from pantheraml import FastLanguageModel, FastModel, FastVisionModel
from pantheraml.base.errors import ConfigError, PantheraError, UnsupportedModelError
from pantheraml.models.fast import is_fused
from pantheraml.models.quantize.quantized_linear import QuantizedLinear
from tests import toy, toy_vision
from tests.unit.api.trl_runs import (
    SETTINGS,
    STEPS,
    fast_model,
    gradient_error,
    largest_update,
    lora,
    make_trainer,
    plain_peft,
    recorded,
    rows,
    weight_error,
)

pytestmark = pytest.mark.usefixtures("restored_environment")

ROOT = Path(__file__).parents[3]
GRADIENTS, WEIGHTS = 5e-5, 1e-5
HEAD = "base_model.model.score.weight"
LABELS = {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}


@pytest.fixture(scope="module")
def folder(wide_llama: Path) -> Path:
    return wide_llama


def loaded(folder: Path, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), **{"device_map": "cpu", "num_labels": 1, **arguments})
    return model


def adapted(folder: Path, *, checkpointing: Any = False, **loading: Any) -> Any:
    return FastLanguageModel.get_peft_model(
        loaded(folder, **loading), r=4, lora_alpha=8, use_gradient_checkpointing=checkpointing
    )


def plain_base(folder: Path, like: Any, **labels: Any) -> Any:
    """Return transformers' own model with the same head."""
    plain = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, **{"num_labels": 1, **labels}
    )
    plain.score.weight.data.copy_(head_of(like))
    plain.config.pad_token_id = AutoTokenizer.from_pretrained(folder).pad_token_id
    return plain


def head_of(model: Any) -> Tensor:
    (weight,) = (w for n, w in model.named_parameters() if n.endswith(("score.weight", "score.original_module.weight")))
    return weight.detach()


def plain_adapted(folder: Path, like: Any, **labels: Any) -> Any:
    return plain_peft(plain_base(folder, like, **labels), lora(task_type="SEQ_CLS"), like)


def reward_trainer(model: Any, folder: Path, output: Path, *, peft_config: Any = None, **changes: Any) -> RewardTrainer:
    return RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(output), **{**SETTINGS, **changes}),
        train_dataset=rows("dpo"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=peft_config,
    )


def assert_same_training(ours: Any, theirs: Any) -> None:
    mine, other = recorded(ours), recorded(theirs)
    assert len(mine.losses) == STEPS
    assert mine.losses == pytest.approx(other.losses, rel=1e-5, abs=1e-5)
    assert gradient_error(mine, other) <= GRADIENTS
    assert float((mine.weights[HEAD] - mine.start[HEAD]).abs().max()) > 1e-3, "the head is trained"
    assert largest_update(other) > 5e-3, "equal because nothing was trained"
    assert weight_error(mine, other) <= WEIGHTS


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
def test_reward_model_with_adapters_of_get_peft_model(folder: Path, tmp_path: Path, checkpointing: bool) -> None:
    fast = adapted(folder)
    assert any(is_fused(layer) for layer in fast.modules())
    plain = plain_adapted(folder, fast)
    settings = {"gradient_checkpointing": checkpointing}
    assert_same_training(
        reward_trainer(fast, folder, tmp_path / "fast", **settings),
        reward_trainer(plain, folder, tmp_path / "plain", **settings),
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("head", [{"task_type": "SEQ_CLS"}, {"task_type": None, "modules_to_save": ["score"]}], ids=str)
def test_reward_model_with_the_trainers_peft_config(
    folder: Path, tmp_path: Path, checkpointing: bool, head: dict[str, Any]
) -> None:
    fast = loaded(folder)
    plain = plain_base(folder, fast)
    settings = {"gradient_checkpointing": checkpointing}
    ours = reward_trainer(fast, folder, tmp_path / "fast", peft_config=lora(**head), **settings)
    theirs = reward_trainer(plain, folder, tmp_path / "plain", peft_config=lora(**head), **settings)
    assert any(is_fused(layer) for layer in ours.model.modules())
    set_peft_model_state_dict(theirs.model, get_peft_model_state_dict(ours.model))
    assert_same_training(ours, theirs)


@pytest.mark.parametrize("mode", [True, "offload", "selective"], ids=str)
def test_our_activation_checkpointing(folder: Path, tmp_path: Path, mode: Any) -> None:
    fast = adapted(folder, checkpointing=mode)
    plain = plain_adapted(folder, fast)
    assert_same_training(
        reward_trainer(fast, folder, tmp_path / "fast"), reward_trainer(plain, folder, tmp_path / "plain")
    )


@pytest.mark.parametrize("option", ["load_in_4bit", "load_in_8bit"])
def test_over_quantized_weights(folder: Path, tmp_path: Path, option: str) -> None:
    """As plain PEFT over the dequantized weights; the head is not quantized."""
    fast = adapted(folder, **{option: True})
    quantized = [name for name, layer in fast.named_modules() if isinstance(layer, QuantizedLinear)]
    assert quantized
    assert not any("score" in name for name in quantized)
    dense = adapted(folder, **{option: True}).merge_and_unload()
    dense.save_pretrained(tmp_path / "dense")
    toy.write_tokenizer(tmp_path / "dense")
    plain = plain_adapted(tmp_path / "dense", fast)
    torch.testing.assert_close(scores(fast, folder), scores(plain, folder), rtol=1e-5, atol=1e-5)
    assert_same_training(
        reward_trainer(fast, folder, tmp_path / "fast"), reward_trainer(plain, folder, tmp_path / "plain")
    )


def test_over_fp8_weights(folder: Path, tmp_path: Path) -> None:
    """fp8 matmuls also round their inputs, so the body is compared with that of a causal model in fp8, bit for bit."""
    fast = adapted(folder, load_in_fp8=True)
    causal, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", load_in_fp8=True)
    causal = FastLanguageModel.get_peft_model(causal, r=4)
    inputs = AutoTokenizer.from_pretrained(folder)("12+30=42", return_tensors="pt")
    with torch.no_grad():
        hidden = causal.get_base_model().model(**inputs).last_hidden_state
        expected = hidden[:, -1] @ head_of(fast).T
        assert torch.equal(fast.get_base_model().model(**inputs).last_hidden_state, hidden)
        torch.testing.assert_close(fast(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    record = recorded(reward_trainer(fast, folder, tmp_path / "fast"))
    assert largest_update(record) > 5e-3
    assert record.losses[-1] < record.losses[0]


def test_full_finetuning(folder: Path, tmp_path: Path) -> None:
    fast = loaded(folder, full_finetuning=True)
    plain = plain_base(folder, fast)
    start = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    for model in (fast, plain):
        reward_trainer(model, folder, tmp_path / "run").train()
    ours = dict(fast.named_parameters())
    for name, weight in plain.named_parameters():
        assert float((weight.detach() - start[name]).abs().max()) > 1e-3, name
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=WEIGHTS)


def label_trainer(model: Any, folder: Path, output: Path, **changes: Any) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["prompt"] + row["completion"] for row in toy.arithmetic(16)]
    data = Dataset.from_list([{**tokenizer(text), "labels": i % 3} for i, text in enumerate(texts)])
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(output), **{**SETTINGS, **changes}),
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_a_body_in_bf16_has_a_head_in_float32(folder: Path, tmp_path: Path, autocast: bool) -> None:
    fast = adapted(folder, dtype=torch.bfloat16)
    record = recorded(reward_trainer(fast, folder, tmp_path, bf16=autocast))
    assert record.weights[HEAD].dtype == torch.float32
    assert float((record.weights[HEAD] - record.start[HEAD]).abs().max()) > 1e-3
    assert record.losses[-1] < record.losses[0]


def test_a_reward_model_rewards_in_grpo(folder: Path, tmp_path: Path) -> None:
    fast = loaded(folder)
    rewards = []
    for model in (fast, plain_base(folder, fast)):
        run = GRPOTrainer(
            model=fast_model(folder),
            args=GRPOConfig(output_dir=str(tmp_path), **SETTINGS, max_completion_length=8, num_generations=2),
            train_dataset=rows("grpo"),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=[model],
        )
        recorded(run)
        rewards.append([entry["reward"] for entry in run.state.log_history if "reward" in entry])
    assert len(rewards[0]) == STEPS
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-5, abs=1e-5)
    assert len(set(rewards[0])) > 1


def test_labels_by_transformers_trainer(folder: Path, tmp_path: Path) -> None:
    """Rows of different lengths, and gradient accumulation."""
    fast = adapted(folder, **LABELS)
    plain = plain_adapted(folder, fast, **LABELS)
    assert fast.config.id2label == plain.config.id2label == LABELS["id2label"]
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    ours = label_trainer(fast, folder, tmp_path / "fast", **settings)
    assert_same_training(ours, label_trainer(plain, folder, tmp_path / "plain", **settings))
    assert ours.predict(ours.train_dataset).predictions.shape == (16, 3)


@pytest.mark.parametrize("write", [toy.write_gpt2, toy.write_qwen3, toy.write_mixtral], ids=lambda f: f.__name__)
def test_families(tmp_path: Path, write: Callable[..., Path]) -> None:
    folder = write(tmp_path / "model")
    fast = adapted(folder)
    plain = plain_base(folder, fast)
    inputs = AutoTokenizer.from_pretrained(folder)(["1+1=2", "12+30=42"], return_tensors="pt", padding=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(**inputs).logits, plain(**inputs).logits, rtol=1e-5, atol=1e-5)
    record = recorded(reward_trainer(fast, folder, tmp_path / "run", max_steps=2))
    assert largest_update(record) > 1e-3


def scores(model: Any, folder: Path) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer([row["prompt"] for row in toy.arithmetic(8)], return_tensors="pt", padding=True)
    with torch.no_grad():
        logits: Tensor = model.eval()(**inputs).logits
    return logits


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A reward model of 6 steps, and the folder of its adapter."""
    place = tmp_path_factory.mktemp("trained")
    run = reward_trainer(adapted(folder), folder, place)
    run.train()
    run.save_model(str(place / "adapter"))
    return run.model, place / "adapter"


def test_the_adapter_and_its_head_load_in_plain_peft(folder: Path, trained: tuple[Any, Path]) -> None:
    model, adapter = trained
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = model.config.pad_token_id
    plain = PeftModel.from_pretrained(base, adapter)
    torch.testing.assert_close(scores(plain, folder), scores(model, folder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"auto_model": AutoModelForSequenceClassification}], ids=["", "auto_model"])
def test_the_adapter_is_loaded_again_and_trained_further(
    folder: Path, trained: tuple[Any, Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """Its number of labels is read from its head."""
    model, adapter = trained
    again, tokenizer = FastModel.from_pretrained(str(adapter), device_map="cpu", **arguments)
    torch.testing.assert_close(scores(again, folder), scores(model, folder), rtol=1e-5, atol=1e-5)
    assert tokenizer.pad_token_id == again.config.pad_token_id
    record = recorded(reward_trainer(again, folder, tmp_path / "run", max_steps=2))
    assert float((record.weights[HEAD] - record.start[HEAD]).abs().max()) > 1e-3


def test_the_merged_model_is_transformers_own(folder: Path, trained: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = trained
    _, tokenizer = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", num_labels=1)
    model.save_pretrained_merged(str(tmp_path / "merged"), tokenizer)
    plain, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert (plain.config.num_labels, plain.config.pad_token_id) == (1, tokenizer.pad_token_id)
    expected = scores(model, folder)
    torch.testing.assert_close(scores(plain, folder), expected, rtol=0.02, atol=0.05)  # rounded to bf16
    again = FastLanguageModel.from_pretrained(str(tmp_path / "merged"), device_map="cpu")[0]
    assert type(again).__name__ == "LlamaForSequenceClassification", "by its config.json"
    torch.testing.assert_close(scores(again, folder), scores(plain, folder), rtol=1e-5, atol=1e-5)
    model.save_lora(str(tmp_path / "lora"))
    again = FastLanguageModel.from_pretrained(str(tmp_path / "lora"), device_map="cpu")[0]
    torch.testing.assert_close(scores(again, folder), expected, rtol=1e-5, atol=1e-5)


def test_the_new_head_depends_on_the_seed_alone(folder: Path) -> None:
    before = torch.random.get_rng_state()
    heads = [head_of(loaded(folder, random_state=seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert torch.equal(head_of(loaded(folder, random_state=1, dtype=torch.bfloat16)), heads[0].bfloat16())
    assert 0.5 < float(heads[0].std()) / 0.2 < 1.5, "as the config's initializer_range asks"


def test_padding_is_that_of_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    """A checkpoint may name another token, or none; the head would then score padding."""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    toy.write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": 5}))
    model = loaded(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.pad_token_id == tokenizer.pad_token_id != 5
    texts = ["1+1=2", "12+30=42"]
    together = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: model.generate(torch.tensor([[1]])), "there is no generate"),
        (lambda model: model.fast_generate("1+1="), "there is no fast_generate"),
        (lambda model: model.save_pretrained_gguf("out"), "writes causal language models only"),
        (lambda model: model.push_to_hub_gguf("me/out"), "writes causal language models only"),
    ],
    ids=["generate", "fast_generate", "gguf", "gguf to hub"],
)
def test_what_needs_a_next_token_is_refused(folder: Path, call: Callable[[Any], None], words: str) -> None:
    for model in (loaded(folder), adapted(folder)):
        with pytest.raises(UnsupportedModelError, match=words):
            call(model)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo", "rloo"])
def test_trainers_of_causal_models_are_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    for model in (loaded(folder), adapted(folder)):
        with pytest.raises(ConfigError, match=r"(?s)trains causal language models.*RewardTrainer"):
            make_trainer(kind, model, folder, tmp_path)


def test_adapters_of_another_task_are_refused(folder: Path, tmp_path: Path) -> None:
    """As `trl reward --use_peft` asks for, unless it is told otherwise."""
    with pytest.raises(ConfigError, match=r"(?s)task_type='CAUSAL_LM' does not fit.*SEQ_CLS"):
        reward_trainer(loaded(folder), folder, tmp_path, peft_config=lora())


def test_adapters_under_a_random_head_are_refused(folder: Path, tmp_path: Path) -> None:
    run = reward_trainer(loaded(folder), folder, tmp_path, peft_config=lora(task_type=None))
    with pytest.raises(ConfigError, match=r"(?s)head \(score\) is new.*SEQ_CLS"):
        run.train()


def test_adapters_under_a_trained_head_may_leave_it_frozen(
    folder: Path, trained: tuple[Any, Path], tmp_path: Path
) -> None:
    trained[0].save_pretrained_merged(str(tmp_path / "merged"), AutoTokenizer.from_pretrained(folder))
    model = loaded(tmp_path / "merged")
    run = reward_trainer(model, folder, tmp_path / "run", peft_config=lora(task_type=None), max_steps=1)
    assert recorded(run).losses


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_labels": 0}, ConfigError, "num_labels=0 is not a positive integer"),
        ({"num_labels": 2, "id2label": {0: "a"}}, ConfigError, "num_labels=2, but id2label has 1"),
        ({"num_labels": 2, "auto_model": AutoModelForCausalLM}, ConfigError, "num_labels, which a model of auto_model"),
        ({"max_seq_length": -1}, PantheraError, "max_seq_length"),
    ],
)
def test_bad_arguments(folder: Path, arguments: dict[str, Any], error: type[PantheraError], words: str) -> None:
    with pytest.raises(error, match=words):
        loaded(folder, **arguments)


def test_models_with_vision_are_refused(tmp_path: Path) -> None:
    folder = toy_vision.write("gemma3", tmp_path)
    with pytest.raises(UnsupportedModelError, match="is not a text classifier"):
        loaded(folder)


def test_bad_adapter_arguments(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not support task_type='CAUSAL_LM' for a LlamaForSequenceClass"):
        FastLanguageModel.get_peft_model(loaded(folder), task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="FastVisionModel loads no classifiers"):
        FastVisionModel.from_pretrained(str(folder), auto_model=AutoModelForSequenceClassification)
    names = FastLanguageModel.get_peft_model(
        loaded(folder), task_type="SEQ_CLS", target_modules=["q_proj", "score"], modules_to_save=["classifier", "score"]
    )
    assert HEAD in get_peft_model_state_dict(names)


def test_another_number_of_labels_than_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder, num_labels=2)
    model.save_pretrained(tmp_path)
    toy.write_tokenizer(tmp_path)
    again = loaded(tmp_path, num_labels=2, load_in_4bit=True)
    assert torch.equal(head_of(again), head_of(model)), "the checkpoint's head is not quantized"
    with pytest.raises(ConfigError, match=r"score\.weight is not for num_labels=3"):
        loaded(tmp_path, num_labels=3)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ModernBERT that was trained to fill in masks."""
    folder = tmp_path_factory.mktemp("encoder")
    config = ModernBertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    set_seed(0)
    ModernBertForMaskedLM(config).save_pretrained(folder)
    toy.write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_encoders(encoder: Path, tmp_path: Path, full: bool) -> None:
    """Of their layers none is fused."""
    model = loaded(encoder, **LABELS, full_finetuning=full)
    plain = AutoModelForSequenceClassification.from_pretrained(encoder, dtype=torch.float32, **LABELS)
    plain.load_state_dict(model.state_dict())
    if not full:
        model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
        config = LoraConfig(r=4, lora_alpha=8, task_type="SEQ_CLS", target_modules=["Wqkv", "Wo", "Wi"])
        plain = plain_peft(plain, config, model)
    for each in (model, plain):
        label_trainer(each, encoder, tmp_path).train()
    ours = dict(model.named_parameters())
    assert {name for name, w in ours.items() if w.requires_grad} == {
        name for name, w in plain.named_parameters() if w.requires_grad
    }
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=WEIGHTS)


def test_a_classifier_is_pickled(folder: Path) -> None:
    model = loaded(folder)
    other = pickle.loads(pickle.dumps(model))
    assert type(other) is type(model)
    assert torch.equal(scores(other, folder), scores(model, folder))


def test_the_code_of_the_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/classifiers.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(folder)
    toy.write_jsonl(tmp_path / "my-pairs.jsonl", list(rows("dpo")))
    exec(code, {})
    assert load_file(tmp_path / "my-reward-model/adapter_model.safetensors")[HEAD].shape == (1, 64)


def test_packed_rows_are_refused(folder: Path) -> None:
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(
        UnsupportedModelError, match="packs several documents into a row, but a classifier scores whole"
    ):
        loaded(folder)(input_ids=ids, position_ids=positions)

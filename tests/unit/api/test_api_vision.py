"""`FastVisionModel` under TRL's SFTTrainer and in generation: equal to plain PEFT on the plain transformers model."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel, FastModel, FastVisionModel, SamplingParams
from pantheraml.base.errors import ConfigError, DataError, ModelError, UnsupportedModelError
from pantheraml.hooks.vision_sft import rows_as_dataset
from pantheraml.models.adapters import linear_layers
from pantheraml.models.fast import is_fused
from pantheraml.models.quantize.quantized_linear import QuantizedLinear
from pantheraml.trainer import UnslothVisionDataCollator
from tests import toy_vision

STEPS = 6
FUSED = {"qwen2_5_vl", "qwen3_vl", "llava", "pixtral", "mistral3", "gemma3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in made:
            made[family] = toy_vision.write(family, tmp_path_factory.mktemp(family))
        return made[family]

    return write


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def rows(family: str, count: int = 8) -> list[dict[str, Any]]:
    return toy_vision.rows(count, square=family in toy_vision.SQUARE)


def loaded(folder: Path, **arguments: Any) -> tuple[Any, Any]:
    return FastVisionModel.from_pretrained(str(folder), device_map="cpu", **arguments)


def with_adapters(model: Any, **arguments: Any) -> Any:
    adapted = FastVisionModel.get_peft_model(model, r=4, lora_alpha=8, **arguments)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # nothing depends on A while B is zero
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    return adapted


def plain(folder: Path, like: Any) -> Any:
    config = like.peft_config["default"]
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=list(config.target_modules), task_type="CAUSAL_LM")
    made = get_peft_model(base, lora)
    set_peft_model_state_dict(made, get_peft_model_state_dict(like))
    return made


def train(model: Any, processor: Any, data: Any, output: Path, **changes: Any) -> dict[str, torch.Tensor]:
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "remove_unused_columns": False, "dataset_text_field": "", "dataset_kwargs": {"skip_prepare_dataset": True},
        "max_length": 256,
    }  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        processing_class=processor,
        data_collator=UnslothVisionDataCollator(model, processor),
        train_dataset=data,
        args=SFTConfig(output_dir=str(output), **{**settings, **changes}),
    )
    set_seed(0)
    trainer.train()
    return dict(get_peft_model_state_dict(trainer.model))


@pytest.mark.seed("S0-102")
@pytest.mark.parametrize("checkpointing", [False, "unsloth"])
@pytest.mark.parametrize("family", toy_vision.FAMILIES)
def test_training_equals_plain_peft(
    family: str, checkpointing: Any, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, processor = loaded(folder(family))
    ours = with_adapters(model, use_gradient_checkpointing=checkpointing)
    theirs = plain(folder(family), ours)
    start = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(theirs).items()}
    assert any(map(is_fused, ours.modules())) == (family in FUSED)
    mine = train(ours, processor, rows(family), tmp_path)
    expected = train(theirs, processor, rows_as_dataset(rows(family), "rows"), tmp_path)
    assert mine.keys() == expected.keys()
    moved = {name for name, tensor in expected.items() if not torch.equal(tensor, start[name])}
    for part in ("language_model", "visual" if family.startswith("qwen") else "vision_tower"):
        assert any(part in name for name in moved)
    for name, tensor in expected.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_accumulated_passes_equal_one_pass(family: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """As in text models: the mean is over tokens, not over passes, of which transformers' own forward says it is."""
    results = []
    for passes in (1, 2):
        model, processor = loaded(folder(family))
        sizes = {"per_device_train_batch_size": 4 // passes, "gradient_accumulation_steps": passes}
        adapted = with_adapters(model)
        results.append(train(adapted, processor, rows(family), tmp_path, optim="sgd", max_grad_norm=0.0, **sizes))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_checkpointing_of_the_trainer_equals_plain_peft(
    family: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, processor = loaded(folder(family))
    ours = with_adapters(model)
    theirs = plain(folder(family), ours)
    mine = train(ours, processor, rows(family), tmp_path, gradient_checkpointing=True)
    expected = train(theirs, processor, rows_as_dataset(rows(family), "rows"), tmp_path)
    for name, tensor in expected.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_trl_own_vision_collator_equals_plain_peft(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Rows with an `images` column need no collator of ours; image tokens then have a loss, as TRL has it."""
    data = Dataset.from_list(
        [
            {"images": [toy_vision.picture(number)], "messages": [{"role": "user", "content": "What is it?"},
                                                                  {"role": "assistant", "content": f"N {number}"}]}
            for number in range(4)
        ]
    )  # fmt: skip
    results = []
    model, processor = loaded(folder("qwen2_5_vl"))
    ours = with_adapters(model)
    for each in (ours, plain(folder("qwen2_5_vl"), ours)):
        settings = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_strategy": "no"}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
        args = SFTConfig(output_dir=str(tmp_path), **settings, **quiet)
        trainer = SFTTrainer(model=each, processing_class=processor, train_dataset=data, args=args)
        set_seed(0)
        trainer.train()
        results.append(get_peft_model_state_dict(trainer.model))
    for name, tensor in results[1].items():
        torch.testing.assert_close(results[0][name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", toy_vision.FAMILIES)
def test_generation_equals_the_plain_model(family: str, folder: Callable[[str], Path]) -> None:
    model, processor = loaded(folder(family))
    ours = with_adapters(model)
    theirs = plain(folder(family), ours).eval()
    FastVisionModel.for_inference(ours)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    pictures = [toy_vision.picture(number, square=True) for number in (1, 2)]
    made = []
    for image in pictures:
        inputs = processor(image, text, add_special_tokens=False, return_tensors="pt")
        options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
        made.append(ours.generate(**inputs, **options))
        assert torch.equal(made[-1], theirs.generate(**inputs, **options))
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=0, atol=1e-5)
    FastVisionModel.for_training(ours)
    assert ours.training


@pytest.mark.parametrize("family", toy_vision.FAMILIES)
def test_saved_models_and_adapters_are_standard(family: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, processor = loaded(folder(family))
    ours = with_adapters(model)
    inputs = dict(UnslothVisionDataCollator(ours, processor)(rows(family, 2)))
    inputs.pop("labels")
    with torch.no_grad():
        expected = ours.eval()(**inputs).logits
    ours.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folder(family)), tmp_path / "adapter")
    processor.tokenizer.save_pretrained(tmp_path / "adapter")  # as a trainer does that was given the tokenizer
    reloaded, other_processor = loaded(tmp_path / "adapter")
    assert type(other_processor).__name__ == type(processor).__name__
    ours.merge_and_unload().save_pretrained(tmp_path / "merged")
    processor.save_pretrained(tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    for each in (again, reloaded, merged):
        with torch.no_grad():
            torch.testing.assert_close(each.eval()(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    files = [load_file(at / "model.safetensors") for at in (folder(family), tmp_path / "merged")]
    assert files[0].keys() == files[1].keys()  # the names under which the family is published
    assert any(parameter.requires_grad for parameter in reloaded.parameters())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("quant_format", ["load_in_4bit", "load_in_8bit", "load_in_fp8"])
def test_only_language_layers_are_quantized(
    family: str, quant_format: str, folder: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="pantheraml")
    model, processor = loaded(folder(family), **{quant_format: True})
    quantized = {name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    decoder = {name for name, layer in linear_layers(model).items() if "language_model" in name}
    assert quantized == decoder
    assert "of the vision tower are not quantized" in caplog.text
    assert "host memory" not in caplog.text
    ours = with_adapters(model)
    before = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(ours).items()}
    after = train(ours, processor, rows(family), tmp_path, max_steps=2)
    assert any(not torch.equal(after[name], before[name]) for name in after if "language_model" not in name)
    assert all(tensor.isfinite().all() for tensor in after.values())
    ours.save_pretrained(tmp_path / "adapter")
    PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folder(family)), tmp_path / "adapter")


@pytest.mark.parametrize("family", toy_vision.FAMILIES)
def test_weights_are_streamed_under_their_published_names(
    family: str, folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="pantheraml")
    model, _ = loaded(folder(family))
    assert "host memory" not in caplog.text
    expected = AutoModelForImageTextToText.from_pretrained(folder(family), dtype=torch.float32).state_dict()
    assert {name: tensor.sum() for name, tensor in model.state_dict().items()} == {
        name: tensor.sum() for name, tensor in expected.items()
    }


@pytest.mark.parametrize(
    ("switches", "has", "lacks"),
    [
        ({"finetune_vision_layers": False}, "language_model", "vision_tower"),
        ({"finetune_language_layers": False}, "vision_tower", "language_model"),
        ({"finetune_attention_modules": False}, "mlp", "self_attn"),
        ({"finetune_mlp_modules": False}, "self_attn", "mlp"),
        ({"target_modules": ["q_proj", "v_proj"]}, "q_proj", "k_proj"),
        ({}, "vision_tower", "multi_modal_projector"),
        ({"target_modules": ["linear_1", "q_proj"]}, "multi_modal_projector", "v_proj"),
    ],
)
def test_switches_choose_the_adapted_layers(
    switches: dict[str, Any], has: str, lacks: str, folder: Callable[[str], Path]
) -> None:
    ours = FastVisionModel.get_peft_model(loaded(folder("llava"))[0], r=4, **switches)
    names = [name for name, layer in ours.named_modules() if isinstance(layer, LoraLayer)]
    assert any(has in name for name in names)
    assert not any(lacks in name for name in names)


def test_fast_model_chooses_by_the_checkpoint(
    folder: Callable[[str], Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    vision, processor = FastModel.from_pretrained(str(folder("gemma3")), device_map="cpu", max_seq_length=64)
    assert isinstance(processor, ProcessorMixin)
    assert processor.tokenizer.model_max_length == 64
    adapted = FastModel.get_peft_model(vision, r=4, finetune_vision_layers=False)
    assert not any("vision_tower" in name for name in get_peft_model_state_dict(adapted))
    adapted.save_pretrained(tmp_path)
    assert isinstance(FastModel.from_pretrained(str(tmp_path), device_map="cpu")[1], ProcessorMixin)
    text, tokenizer = FastModel.from_pretrained(str(tiny_model("llama")), device_map="cpu")
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    FastModel.get_peft_model(text, r=4)
    _, tokenizer = FastModel.from_pretrained(str(folder("gemma3")), device_map="cpu", text_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)


def test_fast_language_model_takes_every_checkpoint(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As a text model where transformers can; scripts then expect a processor in the tokenizer's place."""
    _, tokenizer = FastLanguageModel.from_pretrained(str(folder("gemma3")), device_map="cpu")
    assert tokenizer.tokenizer is tokenizer
    assert copy.deepcopy(tokenizer).tokenizer("a")["input_ids"] == tokenizer("a")["input_ids"]
    caplog.clear()
    with caplog.at_level("INFO", logger="pantheraml"):
        _, processor = FastLanguageModel.from_pretrained(str(folder("mistral3")), device_map="cpu")
    assert isinstance(processor, ProcessorMixin)
    assert "a mistral3 model has no text-only form" in caplog.text


def test_processors_take_messages_as_text(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    _, processor = loaded(folder("llava"))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    picture = toy_vision.picture(1)
    expected = processor(picture, text, return_tensors="pt")
    assert not caplog.text
    for result in (processor(picture, messages, return_tensors="pt"), processor(text=messages, images=picture)):
        assert torch.equal(torch.as_tensor(result["input_ids"]), expected["input_ids"])
    assert caplog.text.count("the processor got chat messages as text") == 2


def test_wrong_kind_of_model(folder: Callable[[str], Path], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"(?s)'llama' is not a vision-language model.*FastLanguageModel"):
        loaded(tiny_model("llama"))
    with pytest.raises(UnsupportedModelError, match="FastVisionModel"):
        FastLanguageModel.from_pretrained(str(folder("llava")), device_map="cpu", text_only=True)
    text, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu")
    with pytest.raises(ConfigError, match="needs a vision-language model"):
        FastVisionModel.get_peft_model(text)
    with pytest.raises(ConfigError, match=r"(?s)does not support auto_model=AutoModelForCausalLM.*Remove auto_model"):
        loaded(folder("llava"), auto_model=AutoModelForCausalLM)
    model, _ = loaded(folder("llava"))
    with pytest.raises(ConfigError, match=r"No layer .* is left to train"):
        FastVisionModel.get_peft_model(model, finetune_vision_layers=False, finetune_language_layers=False)
    adapted = FastVisionModel.get_peft_model(model, r=4)
    with pytest.raises(ConfigError, match="already has adapters"):
        FastVisionModel.get_peft_model(adapted)
    without = shutil.copytree(folder("llava"), tmp_path / "without")
    (without / "processor_config.json").unlink()
    with pytest.raises(ModelError, match="processor"):
        loaded(without)


def test_packing_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, processor = loaded(folder("llava"))
    ours = with_adapters(model)
    with pytest.raises(ConfigError, match="cannot be packed"):
        train(ours, processor, rows("llava"), tmp_path, packing=True)
    ids = torch.randint(3, 200, (1, 12))
    positions = torch.tensor([[*range(6), *range(6)]])
    with pytest.raises(UnsupportedModelError, match="packs several documents"):
        ours.train()(input_ids=ids, position_ids=positions, labels=ids)


def test_rows_need_no_settings_of_the_notebooks(
    folder: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="pantheraml")
    model, processor = loaded(folder("llava"))
    plain_settings = {"remove_unused_columns": True, "dataset_kwargs": None, "max_steps": 1}
    train(with_adapters(model), processor, rows("llava"), tmp_path, **plain_settings)
    assert "remove_unused_columns is False" in caplog.text
    with pytest.raises(DataError, match=r"None of the first 8 rows .* has an image"):
        text = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
        train(with_adapters(loaded(folder("llava"))[0]), processor, text, tmp_path)


def text_rows(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": "a" * number}, {"role": "assistant", "content": f"b {number}"}]}
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llava"])
def test_training_on_text_equals_plain_peft(family: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """`FastModel` on a vision-language model, with rows of text and the processor in place of a tokenizer."""
    model, processor = FastModel.from_pretrained(str(folder(family)), device_map="cpu")
    ours = with_adapters(model, finetune_vision_layers=False)
    results = []
    for each in (ours, plain(folder(family), ours)):
        args = SFTConfig(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-3,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
        )  # fmt: skip
        data = Dataset.from_list(text_rows())
        trainer = SFTTrainer(model=each, processing_class=processor, train_dataset=data, args=args)
        set_seed(0)
        trainer.train()
        results.append(get_peft_model_state_dict(trainer.model))
    assert any(name.endswith("lora_B.weight") for name in results[1])
    for name, tensor in results[1].items():
        torch.testing.assert_close(results[0][name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_processors_have_fields_of_their_tokenizer(family: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    _, processor = loaded(folder(family))
    assert (processor.pad_token, processor.pad_token_id) == ("<pad>", processor.tokenizer.pad_token_id)
    assert processor.encode("a") == processor.tokenizer.encode("a")
    processor.padding_side = "left"
    assert processor.tokenizer.padding_side == "left"
    for other in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        assert other.pad_token == "<pad>"
        assert other.tokenizer.padding_side == "left"
    processor.save_pretrained(tmp_path)
    assert "pad_token_id" not in (tmp_path / "processor_config.json").read_text()
    assert (
        json.loads((tmp_path / "processor_config.json").read_text())["processor_class"]
        == json.loads((folder(family) / "processor_config.json").read_text())["processor_class"]
    )


def test_layers_that_are_never_called_get_no_adapters(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """SigLIP's pooling head is an `nn.MultiheadAttention`, whose output layer cannot be merged either."""
    model, processor = loaded(folder("gemma3"))
    heads = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.MultiheadAttention)]
    assert heads
    ours = FastVisionModel.get_peft_model(model, r=4)
    adapted = [name for name, layer in ours.named_modules() if isinstance(layer, LoraLayer)]
    assert any("vision_tower" in name for name in adapted)
    assert not any(head in name for head in heads for name in adapted)
    ours.save_pretrained_merged(str(tmp_path), processor)
    AutoModelForImageTextToText.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_fast_generate_takes_images(family: str, folder: Callable[[str], Path]) -> None:
    model, processor = loaded(folder(family))
    (result,) = model.fast_generate("Hello", SamplingParams(max_tokens=4, temperature=0))
    ids = processor.tokenizer("Hello", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert result.outputs[0].token_ids == expected.tolist()
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures = [toy_vision.picture(number) for number in (1, 2)]
    prompts = [{"prompt": text, "multi_modal_data": {"image": picture}} for picture in pictures]
    results = model.fast_generate([*prompts, "Hello"], SamplingParams(max_tokens=4, temperature=0, n=1))
    for picture, each in zip(pictures, results, strict=False):
        inputs = processor(text=[text], images=[[picture]], return_tensors="pt")
        whole = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0]
        assert each.prompt_token_ids + each.outputs[0].token_ids == whole.tolist()
    assert results[2].outputs[0].token_ids == expected.tolist()
    with pytest.raises(ConfigError, match="video, which fast_generate does not support"):
        model.fast_generate({"prompt": text, "multi_modal_data": {"video": []}})


def test_fast_generate_with_images_needs_vision(tiny_model: Callable[..., Path]) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu")
    with pytest.raises(ConfigError, match=r"(?s)Prompt 1 has images.*FastVisionModel"):
        model.fast_generate({"prompt": "Hello", "multi_modal_data": {"image": toy_vision.picture(1)}})

"""`fast_generate`: vLLM's call and results from our own batched generation, equal to `generate` prompt by prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pantheraml import FastLanguageModel, SamplingParams
from pantheraml.base.errors import ConfigError, DataError, ModelError
from pantheraml.models.sampling_params import read_sampling_params

PROMPTS = ["a", "Hello there", "12+30=", "the longest of these five prompts", "xyz"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def loaded(folder: Path) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=64)


def adapted(model: Any, scale: float, seed: int = 0, **settings: Any) -> Any:
    """Return the model with an adapter whose effect can be seen."""
    peft_model = FastLanguageModel.get_peft_model(model, r=4, **settings)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return peft_model


def one_by_one(model: Any, tokenizer: Any, **settings: Any) -> list[list[int]]:
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**inputs, do_sample=False, use_cache=True, **{"max_new_tokens": 8, **settings})
        rows.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return rows


def texts(results: list[Any]) -> list[str]:
    return [result.outputs[0].text for result in results]


def state(model: Any) -> dict[str, Any]:
    tensors = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    modules = {name: (type(module), module.training) for name, module in model.named_modules()}
    active = {name: m._active_adapter for name, m in model.named_modules() if hasattr(m, "_active_adapter")}
    return {
        "tensors": tensors,
        "modules": modules,
        "active": active,
        "attributes": sorted(set(vars(model)) - {"_walk"}),
    }


def assert_unchanged(model: Any, before: dict[str, Any]) -> None:
    after = state(model)
    assert {name: after[name] for name in ("modules", "active", "attributes")} == {
        name: before[name] for name in ("modules", "active", "attributes")
    }
    assert after["tensors"].keys() == before["tensors"].keys()
    for name, (tensor, trainable) in before["tensors"].items():
        assert torch.equal(after["tensors"][name][0], tensor), name
        assert after["tensors"][name][1] == trainable, name


def test_greedy_results_equal_generate(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    expected = one_by_one(model, tokenizer)
    for batch in (64, 2):
        monkeypatch.setattr("pantheraml.models.fast_generate.BATCH", batch)
        results = model.fast_generate(PROMPTS, sampling_params=GREEDY)
        assert [result.prompt for result in results] == PROMPTS
        assert [result.outputs[0].token_ids for result in results] == expected
        assert [result.prompt_token_ids for result in results] == [tokenizer(p)["input_ids"] for p in PROMPTS]
        assert texts(results) == [tokenizer.decode(row, skip_special_tokens=True) for row in expected]
        assert len(set(texts(results))) > 1


def test_forms_of_prompts(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    (expected,) = texts(model.fast_generate("Hello there", GREEDY))
    ids = tokenizer("Hello there")["input_ids"]
    forms: list[Any] = [
        ["Hello there"], {"prompt": "Hello there"}, [{"prompt": "Hello there"}], {"prompt_token_ids": ids}, [ids], ids,
    ]  # fmt: skip
    for form in forms:
        assert texts(model.fast_generate(form, GREEDY)) == [expected]
    assert model.fast_generate([], GREEDY) == []
    with pytest.raises(ConfigError, match="Prompt 1 has images"):
        model.fast_generate({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY)
    with pytest.raises(DataError, match="Prompt 2 has no tokens"):
        model.fast_generate(["a", []], GREEDY)
    with pytest.raises(DataError, match="64 positions"):
        model.fast_generate("x" * 64, GREEDY)


def test_end_of_text_ends_a_completion(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    plain = [result.outputs[0] for result in model.fast_generate(PROMPTS, GREEDY)]
    assert {output.finish_reason for output in plain} == {"length"}
    eos = plain[0].token_ids[3]
    model.generation_config.eos_token_id = eos
    output, *others = [result.outputs[0] for result in model.fast_generate(PROMPTS, GREEDY)]
    end = plain[0].token_ids.index(eos) + 1
    assert output.token_ids == plain[0].token_ids[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == tokenizer.decode(plain[0].token_ids[: end - 1], skip_special_tokens=True)
    for before, after in zip(plain[1:], others, strict=True):
        cut = before.token_ids.index(eos) + 1 if eos in before.token_ids else 8
        assert after.token_ids == before.token_ids[:cut]
    ignored = model.fast_generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [result.outputs[0].token_ids for result in ignored] == [output.token_ids for output in plain]


def test_stop_strings_and_tokens(loaded: tuple[Any, Any]) -> None:
    model, _tokenizer = loaded
    params = {"temperature": 0, "max_tokens": 12}
    full = [result.outputs[0] for result in model.fast_generate(PROMPTS, SamplingParams(**params))]
    stop = next(char for out in full for char in out.text[2:] if char.isascii() and char.isprintable())
    cut = [r.outputs[0] for r in model.fast_generate(PROMPTS, SamplingParams(**params, stop=[stop, "\0never"]))]
    kept = model.fast_generate(PROMPTS, SamplingParams(**params, stop=stop, include_stop_str_in_output=True))
    stopped = 0
    for whole, output, with_stop in zip(full, cut, texts(kept), strict=True):
        assert output.text == whole.text.split(stop)[0]
        assert with_stop == (output.text + stop if stop in whole.text else whole.text)
        assert (output.finish_reason, output.stop_reason) == (
            ("stop", stop) if stop in whole.text else ("length", None)
        )
        assert whole.token_ids[: len(output.token_ids)] == output.token_ids
        stopped += stop in whole.text
    assert stopped > 0
    token = full[0].token_ids[2]
    (one,) = model.fast_generate(PROMPTS[:1], SamplingParams(**params, stop_token_ids=[token]))
    assert one.outputs[0].token_ids == full[0].token_ids[: full[0].token_ids.index(token) + 1]
    assert one.outputs[0].stop_reason == token


def test_length_ends_at_the_positions_of_the_model(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    long, short = model.fast_generate(["x" * 60, "ab"], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert len(long.outputs[0].token_ids) == 4
    assert len(short.outputs[0].token_ids) == 10
    (all_of_them,) = model.fast_generate("x" * 50, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(all_of_them.outputs[0].token_ids) == 14


def test_sampling_is_seeded_and_has_several_results(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    params = SamplingParams(n=3, seed=5, top_k=20, top_p=0.9, min_p=0.01, max_tokens=6)
    torch.manual_seed(1)
    expected_next = torch.rand(1)
    torch.manual_seed(1)
    first, again = (model.fast_generate(PROMPTS, params) for _ in range(2))
    assert torch.rand(1) == expected_next  # a seed leaves the global RNG alone
    for one, other in zip(first, again, strict=True):
        assert [output.index for output in one.outputs] == [0, 1, 2]
        assert [output.token_ids for output in one.outputs] == [output.token_ids for output in other.outputs]
    assert len({output.text for result in first for output in result.outputs}) > 5
    torch.manual_seed(1)
    unseeded = [texts(model.fast_generate(PROMPTS, SamplingParams(max_tokens=6))) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_a_batch_that_does_not_fit_is_split(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = loaded
    expected = texts(model.fast_generate(PROMPTS, GREEDY))
    sizes = []
    generate = type(model).generate

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(kwargs["input_ids"]))
        if sizes[-1] > fits:
            raise torch.OutOfMemoryError
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", limited)
    fits = 2
    assert texts(model.fast_generate(PROMPTS, GREEDY)) == expected
    assert sizes == [5, 2, 2, 1]
    fits = 0
    with pytest.raises(Exception, match="one prompt of 1 tokens does not fit in GPU memory"):
        model.fast_generate("a", GREEDY)


@pytest.mark.parametrize("quantized", [False, True])
def test_an_adapter_is_requested_and_the_trained_one_is_untouched(
    folder: Path, tmp_path: Path, quantized: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> tuple[Any, Any]:
        return FastLanguageModel.from_pretrained(str(folder), load_in_4bit=quantized)

    base = texts(load()[0].fast_generate(PROMPTS, GREEDY))
    # an adapter of another rank and on other layers than the one that is trained
    saved = adapted(load()[0], 1.0, seed=1, target_modules=["q_proj", "down_proj"], lora_alpha=8)
    saved.save_pretrained(tmp_path)
    inner, tokenizer = load()
    model = adapted(inner, 0.5, seed=2, target_modules=["q_proj", "v_proj", "up_proj"]).train()
    trained = [tokenizer.decode(row, skip_special_tokens=True) for row in one_by_one(model.eval(), tokenizer)]
    model.train()
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in one_by_one(saved.eval(), tokenizer)]
    assert len({*map(tuple, (base, trained, expected))}) == 3
    before = state(model)
    request = SimpleNamespace(path=str(tmp_path), name="saved")
    with caplog.at_level(logging.INFO, logger="pantheraml"):
        assert texts(model.fast_generate(PROMPTS, GREEDY, lora_request=request)) == expected
        assert "uses the base model" not in caplog.text
        assert texts(model.fast_generate(PROMPTS, GREEDY, lora_request=None)) == base
        assert "uses the base model, without its adapter" in caplog.text
    assert_unchanged(model, before)
    rows = one_by_one(model.eval(), tokenizer)
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in rows] == trained
    plain, _ = load()
    before = state(plain)
    assert texts(plain.fast_generate(PROMPTS, GREEDY, lora_request=request)) == expected
    assert_unchanged(plain, before)


def test_a_bad_adapter_is_an_error_and_leaves_the_model_alone(
    loaded: tuple[Any, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    other, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama", hidden_size=16)))
    FastLanguageModel.get_peft_model(other, r=2).save_pretrained(tmp_path)
    model, _ = loaded
    before = state(model)
    for request, error, message in (
        (SimpleNamespace(path=tmp_path, name="x"), ModelError, "does not fit"),
        (SimpleNamespace(path=tmp_path / "none", name="x"), ModelError, "no adapter"),
        ("folder", ConfigError, "load_lora"),
    ):
        with pytest.raises(error, match=message):
            model.fast_generate("a", GREEDY, lora_request=request)
        assert_unchanged(model, before)


def test_settings_of_other_objects() -> None:
    class Struct:  # as vLLM's class, a msgspec struct
        __struct_fields__ = ("temperature", "top_k", "max_tokens", "logprobs", "output_kind", "_private")
        temperature, top_k, max_tokens, logprobs, output_kind, _private = 0.5, -1, 7, None, 0, 1

    params = read_sampling_params(Struct())
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, -1, 7)
    assert params.generation_settings()["top_k"] == 0
    assert read_sampling_params({"min_p": 0.1}).min_p == 0.1
    assert read_sampling_params(None) == SamplingParams()
    with pytest.raises(ConfigError, match="logprobs=1"):
        read_sampling_params({"temperature": 0.1, "logprobs": 1})
    with pytest.raises(ConfigError, match="presence_penalty"):
        read_sampling_params(SimpleNamespace(presence_penalty=0.5))
    with pytest.raises(ConfigError, match="without attributes"):
        read_sampling_params(SimpleNamespace(colour=1))
    for bad in ({"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"n": 2, "temperature": 0}, {"top_p": "x"}):
        with pytest.raises(ConfigError, match=next(iter(bad)) if "x" not in bad.values() else "type"):
            read_sampling_params(bad)


def test_unknown_settings_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pantheraml"):
        read_sampling_params(SimpleNamespace(temperature=1.0, brand_new=3))
    assert "without effect: brand_new" in caplog.text


def test_fast_inference_without_vllm_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pantheraml"):
        model, _ = FastLanguageModel.from_pretrained(
            str(folder), fast_inference=True, max_lora_rank=8, gpu_memory_utilization=0.5
        )
    lines = [record.getMessage() for record in caplog.records if "vLLM" in record.getMessage()]
    assert lines == ["fast_generate uses PantheraML's own batched generation: vLLM is not installed"]
    model.vllm_engine.sleep()  # as scripts do before they train
    model.vllm_engine.wake_up()
    assert len(model.fast_generate("abc", SamplingParams(max_tokens=2))) == 1
    assert texts(model.fast_generate("a", GREEDY))

"""Arguments of PEFT's `LoraConfig` that scripts pass to `get_peft_model`: what is trained is what PEFT trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import VeloraConfig
from transformers import AutoModelForCausalLM

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, ModelError, UnsupportedModelError
from pantheraml.models.fast import is_fused
from tests import toy

IDS = (torch.arange(40).reshape(2, 20) * 7) % 300 + 2
NAMES = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases."""
    folder = toy.write_llama(tmp_path_factory.mktemp("biased") / "model", attention_bias=True, mlp_bias=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return folder


def trained(model: Any) -> list[float]:
    """Losses of three steps."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, losses = torch.optim.SGD(weights, lr=0.5), []
    for _ in range(3):
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:.*LoRA tensor.* have invalid shape")  # PEFT's, of its own biases
@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 32}}, 2),
        ({"layers_to_transform": [1]}, 1),
        ({"layers_to_transform": 1, "layers_pattern": "layers"}, 1),
        ({"target_modules": r".*self_attn\.(q|v)_proj"}, 2),
        ({"target_modules": "all-linear", "exclude_modules": ["down_proj"]}, 2),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"}, 1),
        ({"bias": "lora_only"}, 0),
        ({"bias": "all"}, 0),
        ({"lora_bias": True}, 0),
        ({"trainable_token_indices": [5, 9]}, 2),
        ({"init_lora_weights": "gaussian"}, 2),
        ({"init_lora_weights": "pissa"}, 2),
        ({"init_lora_weights": False}, 2),
    ],
    ids=str,
)
def test_it_trains_as_peft_does(folder: Path, tmp_path: Path, changes: dict[str, Any], fused: int) -> None:
    arguments = {"r": 8, "lora_alpha": 16, "target_modules": NAMES, **changes}
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**arguments, task_type="CAUSAL_LM"))
    model, _ = FastLanguageModel.from_pretrained(str(folder))
    ours = FastLanguageModel.get_peft_model(model, **arguments)
    assert sum(map(is_fused, ours.modules())) == fused
    theirs = {name: weight for name, weight in plain.named_parameters() if weight.requires_grad}
    mine = {name: weight for name, weight in ours.named_parameters() if weight.requires_grad}
    assert mine.keys() == theirs.keys()
    start = dict(ours.named_parameters())
    with torch.no_grad():  # PiSSA changes the base, too
        for name, weight in plain.named_parameters():
            weight.copy_(start[name])
    before = {name: weight.detach().clone() for name, weight in mine.items()}
    assert trained(ours) == pytest.approx(trained(plain), abs=1e-5)
    for name, weight in mine.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(weight, before[name]) for name, weight in mine.items())

    ours.save_pretrained(tmp_path)
    if "pissa" not in changes.values():
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path).eval()
        torch.testing.assert_close(again(IDS).logits, ours.eval()(IDS).logits, rtol=1e-4, atol=1e-5)


def test_biases_of_a_peft_config_are_trained(folder: Path) -> None:
    """Fused layers leave biases frozen."""
    model, _ = FastLanguageModel.from_pretrained(str(folder))
    adapted = get_peft_model(model, LoraConfig(target_modules=NAMES, bias="lora_only", task_type="CAUSAL_LM"))
    before = adapted.get_base_model().model.layers[0].self_attn.q_proj.base_layer.bias.detach().clone()
    trained(adapted)
    assert not torch.equal(before, adapted.get_base_model().model.layers[0].self_attn.q_proj.base_layer.bias)


@pytest.mark.parametrize("changes", [{"velora_config": VeloraConfig()}, {"init_lora_weights": "mica"}], ids=str)
def test_a_variant_of_lora_is_left_to_peft(folder: Path, changes: dict[str, Any]) -> None:
    """Its layers compute, or keep, something else than plain LoRA's do."""
    model, _ = FastLanguageModel.from_pretrained(str(folder))
    adapted = get_peft_model(model, LoraConfig(target_modules=NAMES, task_type="CAUSAL_LM", **changes))
    assert not any(map(is_fused, adapted.modules()))
    trained(adapted)


def test_initial_values_depend_on_the_seed_alone(folder: Path) -> None:
    def first(seed: int, caller: int) -> torch.Tensor:
        model, _ = FastLanguageModel.from_pretrained(str(folder))
        torch.manual_seed(caller)
        state = torch.get_rng_state()
        adapted = FastLanguageModel.get_peft_model(model, init_lora_weights="gaussian", random_state=seed)
        assert torch.equal(torch.get_rng_state(), state), "the caller's own draws stay as they were"
        return next(weight for name, weight in adapted.named_parameters() if "lora_A" in name).detach()

    assert torch.equal(first(3, 1), first(3, 2))
    assert not torch.equal(first(3, 1), first(4, 1))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"target_modules": ".*no_proj"}, ModelError, "names layers that this model does not have: .*no_proj"),
        ({"target_modules": "(q_proj"}, ConfigError, "no regular expression"),
        ({"exclude_modules": "all(.*"}, ConfigError, "no regular expression"),
        ({"layers_to_transform": [7]}, ConfigError, "No layer is left to train: layers_to_transform="),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, ConfigError, "layers_pattern='blocks'"),
        ({"load_in_4bit": True, "init_lora_weights": "pissa"}, ConfigError, "needs unquantized weights"),
        ({"load_in_4bit": True, "bias": "all"}, ConfigError, "needs unquantized weights"),
        ({"layer_replication": [[0, 2]]}, ConfigError, "no argument 'layer_replication'"),
    ],
    ids=str,
)
def test_bad_input(folder: Path, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder), load_in_4bit="load_in_4bit" in changes)
    arguments = {name: value for name, value in changes.items() if name != "load_in_4bit"}
    with pytest.raises(error) as caught:
        FastLanguageModel.get_peft_model(model, **arguments)
    assert words in str(caught.value)
    assert not any("lora_" in name for name, _ in model.named_modules()), "nothing half-applied"


@pytest.mark.parametrize("loading", [{}, {"load_in_8bit": True}])
def test_merging_adapters_with_a_bias(folder: Path, tmp_path: Path, loading: dict[str, Any]) -> None:
    """The merged files have it, as often as they are written, and the model stays as it is."""
    base, tokenizer = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", **loading)
    model: Any = FastLanguageModel.get_peft_model(base, r=4, target_modules=NAMES, lora_bias=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.3)
        expected = model.eval()(input_ids=IDS).logits
        for number in range(2):
            model.save_pretrained_merged(tmp_path / str(number), tokenizer)
            plain = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), dtype=torch.float32)
            difference = (plain(input_ids=IDS).logits - expected).norm()
            assert difference <= 0.03 * expected.norm()
            assert torch.equal(model(input_ids=IDS).logits, expected)


@pytest.mark.filterwarnings("ignore:.*has no bias")
def test_no_merging_of_a_bias_into_layers_without(tmp_path: Path) -> None:
    base, tokenizer = FastLanguageModel.from_pretrained(str(toy.write_llama(tmp_path / "base")), device_map="cpu")
    model: Any = FastLanguageModel.get_peft_model(base, r=4, target_modules=NAMES, lora_bias=True)
    with pytest.raises(UnsupportedModelError, match="it has a bias, and its layer has none"):
        model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert not list((tmp_path / "merged").glob("*.safetensors"))

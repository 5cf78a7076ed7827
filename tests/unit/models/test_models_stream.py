"""Streaming: which checkpoints match tensor for tensor, which are loaded by transformers, and memory use."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig

from pantheraml.base.env import child_environment
from pantheraml.base.errors import ModelError
from pantheraml.models.loader import load_model
from pantheraml.specs.train import ModelConfig

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pantheraml")


def load(folder: Path, quantize: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(ModelConfig(path=str(folder)), dtype=dtype, device=CPU, quantize=quantize)


def rewritten(made: Path, place: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a model folder with its tensors changed."""
    folder = Path(shutil.copytree(made, place / "changed"))
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_matches_transformers(folder: Path) -> Any:
    actual = load(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mine, theirs = actual.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert (actual.lm_head.weight is actual.get_input_embeddings().weight) == (
        expected.lm_head.weight is expected.get_input_embeddings().weight
    )
    return actual


def copy_of_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def head_alone(tensors: Tensors) -> Tensors:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    return tensors


def another_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def with_old_buffers(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        (dict, True),
        (copy_of_head, True),
        (head_alone, True),
        (another_head, False),
        (without_prefix, True),
        (with_old_buffers, True),
    ],
)
def test_one_tensor_per_weight_is_streamed(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Tensors], Tensors],
    tied: bool,
) -> None:
    folder = rewritten(tiny_model("llama", tie_word_embeddings=True), tmp_path, change)
    model = assert_matches_transformers(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert "host memory" not in caplog.text
    assert ("not used by this model, such as" in caplog.text) == (change is with_old_buffers)


def test_published_gpt2_has_no_prefix(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    def published(tensors: Tensors) -> Tensors:
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}

    assert_matches_transformers(rewritten(tiny_model("gpt2"), tmp_path, published))


def test_checkpoints_that_need_conversion_are_loaded_by_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert_matches_transformers(tmp_path)
    assert "needs conversion" in caplog.text


def test_renamed_weights_are_loaded_by_transformers(
    tiny_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def renamed(tensors: Tensors) -> Tensors:
        tensors["transformer.LayerNorm.gamma"] = tensors.pop("transformer.ln_f.weight")
        return tensors

    folder = rewritten(tiny_model("gpt2"), tmp_path, renamed)
    with pytest.raises(ModelError, match=r"ln_f\.weight"):
        load(folder)
    assert "needs conversion" in caplog.text


@pytest.mark.parametrize("quant_format", ["fp8", "int8", "nf4"])
def test_streaming_and_transformers_quantize_identically(
    tiny_model: Callable[..., Path], tmp_path: Path, quant_format: Any
) -> None:
    made = tiny_model("qwen2")  # has biases
    folder = Path(shutil.copytree(made, tmp_path / "pickled"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    config = ModelConfig(path=str(folder), allow_pickle=True)
    whole = load_model(config, dtype=torch.bfloat16, device=CPU, quantize=quant_format)
    streamed = load(made, quant_format, torch.bfloat16)
    mine, theirs = (dict(model.named_buffers()) | dict(model.named_parameters()) for model in (streamed, whole))
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_layer_may_span_several_files(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    made = tiny_model("qwen2")
    folder = Path(shutil.copytree(made, tmp_path / "spread"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {
        "a.safetensors": [n for n in tensors if "bias" in n],
        "b.safetensors": [n for n in tensors if "bias" not in n],
    }
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    where = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    spread, whole = load(folder, "int8").state_dict(), load(made, "int8").state_dict()
    assert list(spread) == list(whole)
    assert all(torch.equal(spread[name], whole[name]) for name in whole)


def test_weights_do_not_depend_on_the_file_after_loading(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))
    model = load(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = folder / "model.safetensors"
    with open(file, "r+b") as stream:  # the same inode, not a new file
        stream.write(b"\xff" * file.stat().st_size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_loading_preserves_the_rng(tiny_model: Callable[..., Path]) -> None:
    state = torch.get_rng_state()
    load(tiny_model("gemma2"), "nf4")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_generation_config_is_loaded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))
    settings = {"do_sample": True, "temperature": 0.3, "eos_token_id": [257, 5]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    actual = load(folder).generation_config
    assert (actual.do_sample, actual.temperature, actual.eos_token_id) == (True, 0.3, [257, 5])


def test_a_saved_model_matches_its_source(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    load(tiny_model("qwen3")).save_pretrained(tmp_path)
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path, tiny_model("qwen3")))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in original.items())
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen3"


MEASURE = """
import sys, threading, torch
from pantheraml.models.loader import load_model
from pantheraml.specs.train import ModelConfig

def anonymous():  # memory that is not file-backed
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10

def load(folder, quant_format):
    config = ModelConfig(path=folder)
    return load_model(config, dtype=torch.bfloat16, device=torch.device("cpu"), quantize=quant_format)

def watch(done, seen):
    while not done.wait(0.001):
        seen.append(anonymous())

for quant_format in (None, "int8", "nf4", "fp8"):
    load(sys.argv[1], quant_format)
    done, seen = threading.Event(), [anonymous()]
    watcher = threading.Thread(target=watch, args=(done, seen))
    watcher.start()
    model = load(sys.argv[2], quant_format)
    done.set()
    watcher.join()
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    print(quant_format, size, max(seen) - seen[0])
    del model
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 MB in bf16, no tensor larger than 4 MB."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=264, hidden_size=1024, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(0.01 * number)
    model.save_pretrained(folder)
    return folder


@pytest.mark.seed("S0-034", "S3-054")
@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_stays_near_the_loaded_size(large: Path, tiny_model: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", MEASURE, str(tiny_model("llama")), str(large)]
    # malloc caches freed blocks of up to 32 MiB, which real models' tensors exceed; here it must not
    environment = child_environment(MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    file_size = (large / "model.safetensors").stat().st_size
    left = {"None": 1.01, "int8": 0.51, "nf4": 0.27, "fp8": 0.51}
    measured = [line.split() for line in done.stdout.splitlines()]
    assert [quant_format for quant_format, _, _ in measured] == list(left)
    for quant_format, size, growth in measured:
        assert int(size) < left[quant_format] * file_size
        # five tensors of 4 MB are queued or in use, and quantizing one takes a few float32 copies of it: measured were
        # 0, 18, 32 and 28 MiB above the finished model
        assert int(growth) < int(size) + (48 << 20), (
            f"{quant_format}: {int(growth) >> 20} MiB for {int(size) >> 20} MiB"
        )

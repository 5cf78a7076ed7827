"""Quantized checkpoints: read bit-exactly where possible, rejected with a clear error where not.

`data/bitsandbytes.json` holds weights quantized by bitsandbytes, with the SHA-256 of their dequantized values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.kernels.nf4.format import NF4Weight, nf4_levels
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.lazy_weights import materialize
from pantheraml.models.loader import check_model, load_model
from pantheraml.models.quantize.checkpoint_formats import CheckpointFormat, read_quantized_weight
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.int8 import Int8Linear, Int8Weight
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.specs.train import MethodConfig, ModelConfig

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12) * 7
BITSANDBYTES = Path(__file__).with_name("data") / "bitsandbytes.json"
Tensors = dict[str, torch.Tensor]
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FP8 = {"quant_method": "fp8"}


def bitsandbytes_layer(name: str) -> tuple[Tensors, torch.Size, dict[str, str]]:
    recorded = json.loads(BITSANDBYTES.read_text())
    parts = {}
    for key, tensor in recorded["tensors"].items():
        if key.startswith(name):
            values = torch.frombuffer(bytearray.fromhex("".join(tensor["hex"])), dtype=getattr(torch, tensor["dtype"]))
            parts[key.removeprefix(f"{name}.")] = values.view(tensor["shape"])
    facts = recorded["metadata"]
    return parts, torch.Size(json.loads(facts[f"{name}.shape"])), facts


@pytest.mark.seed("S0-065")
@pytest.mark.parametrize("name", ["single", "double"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_matches_bitsandbytes_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    parts, shape, facts = bitsandbytes_layer(name)
    weight = read_quantized_weight(CheckpointFormat("nf4"), parts, shape, where="here")
    assert isinstance(weight, NF4Weight)
    actual = NF4Linear(weight, None).dequantize(dtype)
    digest = hashlib.sha256(actual.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest == facts[f"{name}.{str(dtype).removeprefix('torch.')}"]


def test_nf4_bytes_may_be_stored_in_another_dtype() -> None:
    parts, shape, _ = bitsandbytes_layer("double")
    plain = read_quantized_weight(CheckpointFormat("nf4"), parts, shape, where="here")
    parts["weight"] = parts["weight"].flatten().view(torch.bfloat16)[:, None]
    other = read_quantized_weight(CheckpointFormat("nf4"), parts, shape, where="here")
    assert isinstance(plain, NF4Weight)
    assert isinstance(other, NF4Weight)
    assert torch.equal(plain.qdata, other.qdata)


def test_int8_matches_bitsandbytes() -> None:
    parts, shape, _ = bitsandbytes_layer("eight")
    weight = read_quantized_weight(CheckpointFormat("int8"), parts, shape, where="here")
    assert isinstance(weight, Int8Weight)
    expected = parts["weight"].float() * parts["SCB"][:, None] / 127
    torch.testing.assert_close(Int8Linear(weight, None).dequantize(), expected, atol=0, rtol=3e-7)


# ---- whole folders; each function quantizes one weight and returns its tensors and dequantized values


def nf4_single(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    blocks = weight.flatten().view(-1, 64)
    absmax = blocks.abs().amax(dim=1)
    codes = (blocks[..., None] / absmax[:, None, None] - nf4_levels()).abs().argmin(dim=-1)
    qdata = (codes.view(-1, 2)[:, :1] * 16 + codes.view(-1, 2)[:, 1:]).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight": qdata, "weight.absmax": absmax, "weight.quant_map": nf4_levels(), **state_tensor(state)}
    return tensors, (nf4_levels()[codes] * absmax[:, None]).view(weight.shape)


def nf4_double(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = nf4_single(weight)
    absmax = tensors["weight.absmax"]
    table = torch.linspace(-1, 1, 256) ** 3
    offset = float(absmax.mean())
    step = (absmax - offset).abs().amax()[None]  # fewer than 256 blocks
    codes = ((absmax - offset)[:, None] / step - table).abs().argmin(dim=1)
    state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    nested = {"weight.nested_absmax": step, "weight.nested_quant_map": table, **state_tensor(state)}
    again = table[codes] * step + offset
    dense = (dense.view(-1, 64) / absmax[:, None] * again[:, None]).view(weight.shape)
    return tensors | {"weight.absmax": codes.to(torch.uint8)} | nested, dense


def state_tensor(state: dict[str, Any]) -> Tensors:
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {"weight.quant_state.bitsandbytes__nf4": text}


def int8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = weight.abs().amax(dim=1)
    qdata = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": qdata, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, qdata.float() * (largest / 127)[:, None]


def fp8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    qdata = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": qdata, "weight_scale": scale, "input_scale_ub": torch.ones(1)}, qdata.float() * scale


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / 448
    qdata = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": qdata, "weight_scale": scale, "input_scale": torch.ones(())}, qdata.float() * scale


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = 16, 12  # neither divides all sides
    scale = torch.stack(
        [
            torch.stack([part.abs().amax() / 448 for part in band.split(columns, dim=1)])
            for band in weight.split(rows, dim=0)
        ]
    )
    wide = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    qdata = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": qdata, "weight_scale_inv": scale}, qdata.float() * wide


FORMATS: dict[str, tuple[Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any], type[nn.Module]]] = {
    "nf4": (nf4_single, NF4, NF4Linear),
    "nf4 twice": (nf4_double, NF4, NF4Linear),
    "int8": (int8_rows, INT8, Int8Linear),
    "fp8 by row": (fp8_rows, {"quant_method": "fbgemm_fp8"}, FP8Linear),
    "fp8 by tensor": (fp8_tensor, {"quant_method": "compressed-tensors", "format": "float-quantized"}, FP8Linear),
    "fp8 by block": (fp8_blocks, {**FP8, "weight_block_size": [16, 12]}, FP8Linear),
}


@pytest.fixture
def made(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen2", hidden_size=64, intermediate_size=96, initializer_range=0.05)


def quantized_folder(made: Path, place: Path, name: str) -> tuple[Path, Any]:
    """A folder with quantized linear layers, and transformers' model with the dequantized weights."""
    pack, settings, _ = FORMATS[name]
    folder = Path(shutil.copytree(made, place / "quantized"))
    tensors = load_file(folder / "model.safetensors")
    expected: Any = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    for key in [key for key in tensors if key.endswith("proj.weight")]:
        layer = key.removesuffix(".weight")
        parts, dense = pack(tensors.pop(key))
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        expected.get_submodule(layer).weight.data = dense
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, settings)
    return folder, expected


def set_quantization(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def load(folder: Path, quantize: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(ModelConfig(path=str(folder)), dtype=dtype, device=CPU, quantize=quantize)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FORMATS)
def test_a_dequantized_folder_matches_the_plain_model(made: Path, tmp_path: Path, name: str) -> None:
    folder, expected = quantized_folder(made, tmp_path, name)
    model = load(folder, "dense")
    for key, weight in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], weight, atol=0, rtol=3e-7)
    torch.testing.assert_close(logits(model), logits(expected), atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_folder_stays_quantized(made: Path, tmp_path: Path, name: str) -> None:
    folder, expected = quantized_folder(made, tmp_path, name)
    model = load(folder)
    kind = FORMATS[name][2]
    assert sum(type(layer) is kind for layer in model.modules()) == 14
    for key, layer in model.named_modules():
        if type(layer) is kind:
            weight = expected.get_submodule(key).weight.detach()
            actual = layer(torch.eye(layer.in_features)) - (0 if layer.bias is None else layer.bias)
            # rows scaled to e4m3's maximum are restored exactly; others are rounded once more
            error = float((actual.T - weight).norm() / weight.norm())
            assert error < (0.035 if name in ("fp8 by tensor", "fp8 by block") else 1e-5), key
    if kind is not FP8Linear:  # which quantizes its input, too
        torch.testing.assert_close(logits(model), logits(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.seed("S0-065", "S3-019")
@pytest.mark.parametrize("name", FORMATS)
def test_an_adapter_trains_over_a_quantized_folder(made: Path, tmp_path: Path, name: str) -> None:
    folder, _ = quantized_folder(made, tmp_path, name)
    model: Any = apply_method(load(folder), MethodConfig(rank=2), seed=0).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert any(p.grad is not None and bool(p.grad.abs().max() > 0) for _, p in trainable_parameters(model))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("quantize", [None, "dense"])
def test_a_quantized_folder_can_be_read_lazily(made: Path, tmp_path: Path, name: str, quantize: Any) -> None:
    folder, _ = quantized_folder(made, tmp_path, name)
    models = []
    for lazy in (False, True):
        config = ModelConfig(path=str(folder))
        loaded = load_model(config, dtype=torch.float32, device=CPU, quantize=quantize, lazy_layers=lazy)
        models.append(apply_method(loaded, MethodConfig(rank=2), seed=0))
    assert logits(models[1]).isnan().all()
    materialize(models[1])
    assert torch.equal(logits(models[1]), logits(models[0]))
    first, second = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models)
    assert {name: tensor.requires_grad for name, tensor in first.items()} == {
        name: tensor.requires_grad for name, tensor in second.items()
    }


def test_quantized_weights_cannot_be_fully_trained(made: Path, tmp_path: Path) -> None:
    folder, _ = quantized_folder(made, tmp_path, "nf4")
    with pytest.raises(UnsupportedModelError, match="checkpoint is quantized"):
        apply_method(load(folder), MethodConfig(kind="full"), seed=0)


def test_requantizing_is_logged(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, expected = quantized_folder(made, tmp_path, "fp8 by block")
    caplog.set_level(logging.INFO, "pantheraml")
    model = load(folder, "int8")
    assert "fp8 weights are requantized to int8" in caplog.text
    actual = model.model.layers[0].mlp.up_proj.dequantize()
    weight = expected.model.layers[0].mlp.up_proj.weight.detach()
    assert float((actual - weight).norm() / weight.norm()) < 0.01


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"load_in_4bit": True}, "fp4"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"bits": 4}, "unknown"),
    ],
)
def test_unsupported_formats_are_rejected_before_loading(
    made: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "other"))
    set_quantization(folder, settings)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        check_model(ModelConfig(path=str(folder)))
    assert "plain (bf16) weights" in str(caught.value)


def corrupted(name: str, change: Callable[[Tensors], None]) -> tuple[Tensors, torch.Size]:
    torch.manual_seed(0)
    parts, dense = FORMATS[name][0](torch.randn(32, 24))
    change(parts)
    return parts, dense.shape


def changed_state(**changes: Any) -> Callable[[Tensors], None]:
    def change(parts: Tensors) -> None:
        state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
        parts |= state_tensor(state | changes)

    return change


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("nf4", lambda p: p.pop("weight.absmax"), ModelError, "missing its weight.absmax"),
        ("nf4", lambda p: p.update(state_tensor({})), ModelError, "corrupted"),
        ("nf4", changed_state(shape=[32, 25]), ModelError, "does not fit"),
        ("nf4", changed_state(blocksize=128), UnsupportedModelError, "blocks of 128"),
        ("nf4", lambda p: p["weight.quant_map"].mul_(1.01), UnsupportedModelError, "standard levels"),
        ("nf4 twice", changed_state(nested_offset=None), ModelError, "corrupted"),
        ("nf4 twice", lambda p: p.pop("weight.nested_absmax"), ModelError, "missing its weight.nested_absmax"),
        ("int8", lambda p: p.pop("SCB"), ModelError, "missing its SCB"),
        ("int8", lambda p: p.update(weight_format=torch.tensor(2)), UnsupportedModelError, "GPU-specific layout"),
        ("fp8 by row", lambda p: p.pop("weight_scale"), ModelError, "missing its weight_scale"),
        ("fp8 by row", lambda p: p.update(weight=p["weight"].to(torch.float8_e5m2)), UnsupportedModelError, "e5m2"),
        ("fp8 by row", lambda p: p.update(weight_scale=torch.ones(4, 3)), UnsupportedModelError, "neither per row"),
    ],
)
def test_corrupted_or_unsupported_layers(
    name: str, change: Callable[[Tensors], None], error: type[ModelError], words: str
) -> None:
    parts, shape = corrupted(name, change)
    quant_format = FORMATS[name][2].__name__.removesuffix("Linear").lower()
    with pytest.raises(error, match=words) as caught:
        read_quantized_weight(CheckpointFormat(quant_format), parts, shape, where="model.layers.0")  # type: ignore[arg-type]
    assert type(caught.value) is error
    assert caught.value.where == "model.layers.0"


def test_a_quantized_folder_that_does_not_match_is_rejected(made: Path, tmp_path: Path) -> None:
    folder, _ = quantized_folder(made, tmp_path, "nf4")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is missing"):
        load(folder)

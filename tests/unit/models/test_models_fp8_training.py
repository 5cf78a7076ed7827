"""Trainable layers with fp8 matmuls: near the exact results, exact weight gradients, and training works."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.engine.memory.checkpointing import MIN_INNER_DIM, _selective_contexts
from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.models.quantize.fp8_training import FP8TrainingLinear, use_fp8_matmuls
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, merged, train_here, values
from tests.unit.models.conftest import FAMILIES

ROWS, WIDTH, HEIGHT = 37, 96, 64


def pair_of_layers(*, bias: bool = False) -> tuple[nn.Linear, nn.Linear]:
    """A plain and an fp8 layer with the same weights."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, HEIGHT, bias=bias)
    fp8 = copy.deepcopy(plain)
    fp8.__class__ = FP8TrainingLinear
    return plain, fp8


def run(layer: nn.Linear, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.backward(g)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return out.detach(), x.grad, layer.weight.grad


def inputs() -> tuple[Tensor, Tensor]:
    """Rows of very different magnitude, like gradients."""
    sizes = 10 ** torch.linspace(-4, 2, ROWS)[:, None]
    return torch.randn(ROWS, WIDTH) * sizes, torch.randn(ROWS, HEIGHT) * sizes.flip(0)


def row_errors(actual: Tensor, exact: Tensor) -> Tensor:
    errors: Tensor = (actual - exact).norm(dim=1) / exact.norm(dim=1)
    return errors


def rounded(rows: Tensor) -> Tensor:
    qdata, scales = reference_quantize_rows(rows)
    return qdata.float() * scales[:, None]


def test_matmuls_use_quantized_rows_and_weight_gradients_are_exact() -> None:
    plain, fp8 = pair_of_layers()
    x, g = inputs()
    out, d_input, d_weight = run(fp8, x, g)
    weight = plain.weight.detach()
    assert row_errors(out, rounded(x) @ rounded(weight).T).max() < 1e-6
    assert row_errors(d_input, rounded(g) @ rounded(weight.T).T).max() < 1e-6
    assert torch.equal(d_weight, run(plain, x, g)[2])


def test_every_row_is_near_the_exact_one_whatever_its_magnitude() -> None:
    plain, fp8 = pair_of_layers()
    given = inputs()
    for actual, exact in list(zip(run(fp8, *given), run(plain, *given), strict=True))[:2]:
        errors = row_errors(actual, exact)
        assert 0.005 < errors.median() < 0.05
        assert errors.max() < 0.08


def test_compiled_results_are_identical() -> None:
    _, fp8 = pair_of_layers()
    given = inputs()
    compiled: Any = torch.compile(copy.deepcopy(fp8), fullgraph=True, backend="aot_eager")
    for actual, expected in zip(run(compiled, *given), run(fp8, *given), strict=True):
        assert torch.equal(actual, expected)


def test_selective_checkpointing_saves_the_matmul() -> None:
    wide = nn.Linear(MIN_INNER_DIM, HEIGHT)
    wide.__class__ = FP8TrainingLinear
    calls = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(op.name())
            return op(*args, **(kwargs or {}))

    x = torch.randn(3, MIN_INNER_DIM, requires_grad=True)
    with Counted():
        checkpoint(
            lambda x: wide(x).sin().sin(), x, use_reentrant=False, context_fn=_selective_contexts
        ).sum().backward()
    assert calls.count("pantheraml::fp8_linear") == 1
    assert calls.count("aten::sin") == 3, "the second is not recomputed"


def test_the_ops_pass_opcheck() -> None:
    x, g = (tensor[:5].clone().requires_grad_() for tensor in inputs())
    weight = torch.randn(HEIGHT, WIDTH, requires_grad=True)
    torch.library.opcheck(torch.ops.pantheraml.fp8_linear.default, (x, weight))
    torch.library.opcheck(torch.ops.pantheraml.fp8_linear_back.default, (g.detach(), weight.detach()))


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_sets_the_output_dtype(bias: bool) -> None:
    plain, fp8 = pair_of_layers(bias=bias)
    x, g = torch.randn(2, 5, WIDTH), torch.randn(2, 5, HEIGHT).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = fp8(x), plain(x)
    out.backward(g)
    assert out.dtype == torch.bfloat16
    assert out.shape == expected.shape
    assert (out - expected).float().norm() < 0.05 * expected.float().norm()
    assert fp8.weight.grad is not None
    assert fp8.weight.grad.dtype == torch.float32


def test_compiles_without_graph_breaks() -> None:
    _, fp8 = pair_of_layers(bias=True)
    x, g = inputs()
    expected = run(fp8, x, g)
    compiled: Any = torch.compile(fp8, backend="aot_eager", fullgraph=True)
    x = x.clone().requires_grad_()
    fp8.zero_grad()
    compiled(x).backward(g)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected[1])
    torch.testing.assert_close(fp8.weight.grad, expected[2])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_only_decoder_layers_change_and_names_stay(family: str) -> None:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    names = list(model.state_dict())
    frozen = model.model.layers[0].mlp.up_proj.requires_grad_(False)
    assert use_fp8_matmuls(model) == 7 * config.num_hidden_layers - 1
    assert type(model.lm_head) is nn.Linear
    assert type(frozen) is nn.Linear
    assert list(model.state_dict()) == names
    assert use_fp8_matmuls(model) == 0


def test_layers_of_unsupported_sizes_are_unchanged() -> None:
    config = AutoConfig.for_model("llama", **{**FAMILIES["llama"], "intermediate_size": 100})
    model = AutoModelForCausalLM.from_config(config)
    assert use_fp8_matmuls(model) == 4 * config.num_hidden_layers
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear


def test_full_fine_tuning_learns_as_well_as_in_bf16(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(400))
    base = {
        "model": {"path": str(tmp_path / "model"), "precision": "bf16"},
        "data": {"path": str(tmp_path / "data.jsonl"), "seq_len": 64, "cache_dir": str(tmp_path / "cache")},
        "method": {"kind": "full"},
        "train": {"global_batch_size": 8, "max_steps": 30, "learning_rate": 3e-3},
    }
    losses = {}
    for precision in ("bf16", "fp8"):
        config = TrainConfig.model_validate(merged(base, {"model": {"precision": precision}}))
        plan = make_plan(config, precision="bf16").model_copy(update={"fp8_matmuls": precision == "fp8"})
        losses[precision] = values(train_here(make_run(tmp_path / precision, config, plan)), "train.step", "loss")
    assert losses["fp8"] != losses["bf16"]
    assert losses["bf16"][-1] < 0.8 * losses["bf16"][0]
    assert losses["fp8"][-1] == pytest.approx(losses["bf16"][-1], rel=0.02)

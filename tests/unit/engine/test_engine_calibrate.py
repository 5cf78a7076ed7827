"""Calibration moments, computed layer by layer, equal those of a full backward pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.data.batch import Batch, collate
from pantheraml.data.documents import TokenSequence
from pantheraml.engine.calibrate import LayerMoments, calibrate_layers, decoder_layers
from pantheraml.engine.step.loss import LossModel
from pantheraml.models.attention import use_document_attention
from pantheraml.models.lazy_weights import DEFERRED_WEIGHTS, materialize_per_layer
from pantheraml.models.loader import load_model
from pantheraml.models.quantize.quantized_linear import quantizable_linears
from pantheraml.specs.train import ModelConfig
from tests import toy
from tests.unit.models.conftest import TinyModel, tiny_model  # noqa: F401

CPU = torch.device("cpu")


def loaded(folder: Path, *, unread: bool = True) -> Any:
    config = ModelConfig(path=str(folder))
    model = load_model(config, dtype=torch.float32, device=CPU, quantize="dense", lazy_layers=unread)
    with materialize_per_layer(model):
        use_document_attention(model)
    return model


def text(rows: int = 3, length: int = 24, seed: int = 0) -> Batch:
    """Rows of two documents each, with some tokens masked out of the loss."""
    random = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(rows):
        ids = torch.randint(3, 250, (length,), generator=random, dtype=torch.int32).numpy()
        labels = ids.copy()
        labels[[0, 1, length // 2]] = -100
        lengths = torch.tensor([length // 2, length - length // 2], dtype=torch.int32).numpy()
        sequences.append(TokenSequence(ids, labels, lengths))
    return collate(sequences, pad_id=0, width=length)


def quiet(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def expected_moments(model: Any, batches: list[Batch], names: list[str]) -> dict[str, LayerMoments]:
    """Moments from a forward and backward pass through the full model."""
    found = {name: LayerMoments.zero(model.get_submodule(name)) for name in names}

    def seen(own: LayerMoments, _layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        rows = args[0].detach().flatten(0, -2)
        own.inputs += rows.T @ rows
        output.register_hook(partial(seen_back, own))

    def seen_back(own: LayerMoments, gradient: Tensor) -> None:
        rows = gradient.flatten(0, -2)
        own.gradients += rows.T @ rows

    loss_model = LossModel(model)
    handles = [model.get_submodule(name).register_forward_hook(partial(seen, found[name])) for name in names]
    for batch in batches:
        loss_model(batch.input_ids, batch.position_ids, batch.targets, batch.boundaries, batch.max_length).backward()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma", "phi3", "gemma2", "granite"])
def test_moments_match_a_full_backward(family: str, tiny_model: TinyModel) -> None:  # noqa: F811
    folder = tiny_model(family)
    model, whole = loaded(folder), loaded(folder, unread=False)
    names, batches = quantizable_linears(model, "nf4"), [text(seed=0), text(seed=1)]
    expected = expected_moments(whole, batches, names)
    seen = []
    for visit in calibrate_layers(model, batches, names, quiet):
        seen.append(visit.name)
        for name, moments in visit.moments.items():
            wanted = expected.pop(name)
            torch.testing.assert_close(moments.inputs, wanted.inputs, rtol=1e-4, atol=1e-5)
            scale = float(wanted.gradients.abs().max())
            torch.testing.assert_close(moments.gradients / scale, wanted.gradients / scale, rtol=1e-3, atol=1e-5)
            assert torch.equal(
                visit.layer.get_submodule(name.removeprefix(f"{visit.name}.")).weight, weight(whole, name)
            )
    assert seen == [name for name, _ in reversed(decoder_layers(model))]
    assert not expected


def weight(model: Any, name: str) -> Tensor:
    found: Tensor = model.get_submodule(name).weight
    return found


def unread(model: Any) -> list[bool]:
    return [any(DEFERRED_WEIGHTS in vars(module) for module in layer.modules()) for _, layer in decoder_layers(model)]


def test_one_layer_is_materialized_at_a_time(tmp_path: Path) -> None:
    model = loaded(toy.write_llama(tmp_path, num_hidden_layers=3))
    during = [unread(model) for _ in calibrate_layers(model, [text()], quantizable_linears(model, "nf4"), quiet)]
    assert during == [[True, True, False], [True, False, True], [False, True, True]]
    assert unread(model) == [True, True, True]


def test_calibration_reports_progress(tmp_path: Path) -> None:
    progress_calls: list[tuple[str, int, int]] = []
    model = loaded(toy.write_llama(tmp_path))
    for _ in calibrate_layers(model, [text(), text()], [], lambda *progress: progress_calls.append(progress)):
        pass
    assert progress_calls == [
        ("reading text", 0, 2),
        ("reading text", 1, 2),
        ("rounding layers", 1, 2),
        ("rounding layers", 2, 2),
    ]


def test_layers_that_are_not_sequential_are_rejected(tmp_path: Path) -> None:
    model = loaded(toy.write_llama(tmp_path))
    (_, first), _ = decoder_layers(model)
    calls = []

    def only_at_first(_layer: nn.Module, _args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output + 1 if len(calls) <= 3 else output  # two probes of the head, and the text

    first.register_forward_hook(only_at_first)
    with pytest.raises(UnsupportedModelError, match=r"after model\.layers\.0"):
        list(calibrate_layers(model, [text()], [], quiet))


def test_nonfinite_calibration_loss_raises(tmp_path: Path) -> None:
    model = loaded(toy.write_poisoned_llama(tmp_path))
    model.get_input_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="not finite"):
        list(calibrate_layers(model, [text()], [], quiet))


def test_a_model_without_decoder_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no decoder layers"):
        decoder_layers(nn.Linear(2, 2))

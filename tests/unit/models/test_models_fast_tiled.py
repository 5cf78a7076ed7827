"""The MLP of fused layers over long sequences, in tiles: the same numbers, and less memory, in the lean modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import fuse, long_sequence_note, tiled_mlp
from pantheraml.models.fast import layers as fast_layers
from pantheraml.planner.memory import fused_layers
from tests.unit.models.test_models_fast import (
    LAYERS,
    adapted,
    assert_same,
    base_model,
    logits,
    quantize_to_fp8,
    relative_error,
    results,
)

IDS = torch.randint(4, 256, (2, 29), generator=torch.Generator().manual_seed(3))
WIDE = {"intermediate_size": 256}


def fused_model(family: str = "llama", *, fp8: bool = False, mode: Any = "full", **changes: Any) -> Any:
    base = base_model(family, **{"initializer_range": 0.05, **WIDE, **changes})
    model = adapted(quantize_to_fp8(base) if fp8 else base, size=0.05)
    assert fuse(model, compare=False).fused == LAYERS
    apply_checkpointing(model, mode)
    return model


class Tiles:
    """The numbers of rows that pass through the part after attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        real = tiled_mlp.after_attention_whole

        def run(x: Tensor, *args: Any) -> Tensor:
            self.rows.append(len(x))
            return real(x, *args)

        monkeypatch.setattr(tiled_mlp, "after_attention_whole", run)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Tiles:
    """58 tokens are tiles of 15, 15, 15 and 13."""
    monkeypatch.setattr(tiled_mlp, "TILE", 16)
    return Tiles(monkeypatch)


@pytest.mark.parametrize("mode", ["full", "offload"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "granite", "olmo3", "phi3"])
def test_gradients_are_those_without_tiles(
    family: str, mode: Any, tiles: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused_model(family, mode=mode)
    inputs = {"input_ids": IDS, "labels": IDS}
    ours = results(model, **inputs)
    # each layer in forward and in backward, and not when it is recomputed
    assert tiles.rows == [15, 15, 15, 13] * (2 * LAYERS)
    tiles.rows.clear()
    monkeypatch.setattr(tiled_mlp, "TILE", 1 << 20)
    whole = results(model, **inputs)
    assert tiles.rows == [58] * (2 * LAYERS)
    assert torch.equal(ours["logits"], whole["logits"]) or relative_error(ours["logits"], whole["logits"]) < 1e-6
    assert_same(ours, whole)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_fp8_rows_are_quantized_alike(family: str, tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have their own scales, so tiles round as the whole does; adapters' gradients are summed in another order."""
    model = fused_model(family, fp8=True)
    ours = results(model, input_ids=IDS, labels=IDS)
    monkeypatch.setattr(tiled_mlp, "TILE", 1 << 20)
    assert_same(ours, results(model, input_ids=IDS, labels=IDS), 1e-3)


def test_a_wrong_tile_is_seen(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused_model()
    inputs = {"input_ids": IDS, "labels": IDS}
    whole = results(model, **inputs)
    real = tiled_mlp._tiles
    monkeypatch.setattr(tiled_mlp, "_tiles", lambda rows: [*real(rows)[:-1], slice(rows - 12, rows)])
    with pytest.raises(AssertionError):
        assert_same(results(model, **inputs), whole, 1e-3)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [("none", {}), ("selective", {}), ("full", {"intermediate_size": 32})],
    ids=["none", "selective", "narrow MLP"],
)
def test_where_tiles_gain_nothing_there_are_none(mode: Any, changes: dict[str, Any], tiles: Tiles) -> None:
    results(fused_model(mode=mode, **changes), input_ids=IDS, labels=IDS)
    assert set(tiles.rows) == {58}


def test_short_sequences_are_not_tiled(tiles: Tiles) -> None:
    results(fused_model(), input_ids=IDS[:1], labels=IDS[:1])
    assert set(tiles.rows) == {29}


def test_passes_without_gradients_are_tiled(tiles: Tiles) -> None:
    model = fused_model(mode="none").eval()
    with torch.no_grad():
        ours = model(input_ids=IDS, use_cache=False).logits
    assert tiles.rows == [15, 15, 15, 13] * LAYERS
    tiles.rows.clear()
    whole = model(input_ids=IDS, use_cache=False).logits
    assert set(tiles.rows) == {58}
    assert relative_error(ours, whole.detach()) < 1e-6
    assert logits(model).isfinite().all()


def peak_of_saved(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """Largest number of bytes that the part after attention saves for a backward at a time."""
    largest = 0
    real = tiled_mlp.after_attention_whole

    def run(*args: Any) -> Tensor:
        nonlocal largest
        storages: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        if not torch.is_grad_enabled():
            return real(*args)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            out = real(*args)
        largest = max(largest, sum(storages.values()))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(tiled_mlp, "after_attention_whole", run)
        results(model, input_ids=IDS, labels=IDS)
    return largest


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_one_tile_is_saved_at_a_time(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused_model(fp8=fp8)
    whole = peak_of_saved(model, monkeypatch)
    monkeypatch.setattr(tiled_mlp, "TILE", 16)
    tiled = peak_of_saved(model, monkeypatch)
    assert 0 < tiled <= whole * 16 / 58 * 1.1


def test_the_note_says_what_runs_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheraml.models.fast.long_sequences.TILE", 16)

    def note(model: Any, **options: Any) -> str | None:
        return long_sequence_note(model.get_base_model(), **{"rows": 2, "width": 29, "lean": True, **options})

    model = fused_model()
    tiled = "2 x 29 tokens: MLPs of 2 layers run in tiles of 16 tokens, one at a time in memory"
    assert note(model) == f"{tiled}; attention: transformers' sdpa"
    assert note(model, rows=1) is None
    assert "tiles need activation checkpointing" in str(note(model, lean=False))
    assert "smaller than attention" in str(note(fused_model(intermediate_size=32)))
    unfused = adapted(base_model("llama"))
    use_document_attention(unfused.get_base_model())
    text = "2 x 29 tokens: MLPs run whole: tiles need fused layers; attention: torch's, on the CPU"
    assert note(unfused) == text


def test_the_planner_knows_the_size_of_a_tile() -> None:
    assert fused_layers.TILE == tiled_mlp.TILE


def test_layers_use_it() -> None:
    assert fast_layers.after_attention is tiled_mlp.after_attention

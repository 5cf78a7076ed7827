"""Fused layers captured as CUDA graphs match eager ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml import FastLanguageModel
from pantheraml.models.fast import layer_cuda_graphs as subject
from tests import toy

ROWS, WIDTH = 4, 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captured") / "model"
    return toy.write_llama(path, hidden_size=256, intermediate_size=512, initializer_range=0.05)


def pair(folder: Path, **arguments: Any) -> tuple[Any, Any]:
    """Return the same model, with graphs and without."""
    if arguments.get("load_in_fp8") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")
    model, _ = FastLanguageModel.from_pretrained(str(folder), dtype=torch.bfloat16, **arguments)
    ours = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return ours, copy.deepcopy(ours)  # copies have no graphs


def batches(model: Any, count: int, width: int = WIDTH) -> list[torch.Tensor]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (ROWS, width), generator=generator).cuda() for _ in range(count)]


def train(model: Any, ids: list[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of all batches, and the gradients of the last."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    losses = []
    for batch in ids:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, attention_mask=torch.ones_like(batch)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, [parameter.grad for parameter in parameters]


def graphs(model: Any) -> subject.LayerGraphs:
    layer_graphs: subject.LayerGraphs = model.get_base_model().model.layers[0].fused_parts.graphs
    return layer_graphs


@pytest.mark.parametrize("arguments", [{}, {"load_in_fp8": True}, {"load_in_4bit": True}])
def test_replay_matches_eager(folder: Path, arguments: dict[str, Any]) -> None:
    ours, theirs = pair(folder, **arguments)
    ids = batches(ours, 12)
    actual, expected = train(ours, ids), train(theirs, ids)
    assert len(graphs(ours)._captured) == 1
    assert actual[0] == pytest.approx(expected[0], rel=2e-3)
    assert actual[0][0] - actual[0][-1] != 0
    for mine, other in zip(actual[1], expected[1], strict=True):
        assert (mine - other).norm() <= 0.05 * other.norm()


def test_other_shapes_and_evaluation_between(folder: Path) -> None:
    ours, theirs = pair(folder)
    ids, longer = batches(ours, 6), batches(ours, 1, WIDTH * 2)
    for model in (ours, theirs):
        train(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids[0]).logits, theirs(input_ids=ids[0]).logits, rtol=0, atol=0.05)
    actual, expected = train(ours, [*longer, *ids]), train(theirs, [*longer, *ids])
    assert actual[0] == pytest.approx(expected[0], rel=2e-3)


def test_two_passes_in_flight(folder: Path) -> None:
    ours, theirs = pair(folder)
    ids = batches(ours, 6)
    gradients = []
    for model in (ours, theirs):
        train(model, ids[:4])
        model.zero_grad()
        first, second = (model(input_ids=batch, labels=batch).loss for batch in ids[4:])
        (first + 2 * second).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for mine, other in zip(*gradients, strict=True):
        assert (mine - other).norm() <= 0.05 * other.norm()


@pytest.mark.parametrize("arguments", [{}, {"load_in_fp8": True}, {"load_in_4bit": True}])
def test_wrong_speculative_replay_is_dropped_on_gpu(
    folder: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors it reads have moved, and their memory could be returned to the driver."""
    tried: list[bool] = []
    replay_speculatively = subject.LayerGraphs.replay_speculatively

    def counted(graphs: subject.LayerGraphs, *args: Any) -> bool:
        tried.append(replay_speculatively(graphs, *args))
        return tried[-1]

    monkeypatch.setattr(subject.LayerGraphs, "replay_speculatively", counted)
    ours, theirs = pair(folder, **arguments)
    ids = batches(ours, 8)
    actual, expected = [], []
    for model, losses in ((ours, actual), (theirs, expected)):
        losses += train(model, ids)[0]
        model.zero_grad()
        layers = model.get_base_model().model.layers
        for tensor in [*layers.parameters(), *layers.buffers()]:
            tensor.data = tensor.data.clone()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        losses += train(model, ids)[0]
        torch.cuda.synchronize()
    assert actual == pytest.approx(expected, rel=2e-3)
    first = [False] * (subject.WARMUP_PASSES + 1)
    later = [True] * (len(ids) - len(first))
    # the second time, the first pass is tried and dropped, then captured again
    assert tried == [*first, *later, True, *first[1:], *later]

"""Token scores of padded batches, computed without the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.models.attention import use_document_attention
from pantheraml.models.causal_lm import make_fast
from pantheraml.models.unpadded import without_padding
from tests.unit.models.test_models_fast import EXACT, adapted, base_model, fused, relative_error

WIDTH = 13
IDS = torch.randint(4, 256, (4, WIDTH), generator=torch.Generator().manual_seed(0))
TOKENS = {"right": [(0, 9), (0, 13), (0, 1), (0, 5)], "left": [(4, 13), (0, 13), (12, 13), (7, 13)],
          "both": [(3, 10), (0, 4), (9, 13), (5, 5)]}  # fmt: skip


def batch(side: str) -> dict[str, Tensor]:
    mask = torch.zeros_like(IDS)
    for row, (first, end) in enumerate(TOKENS[side]):
        mask[row, first:end] = 1
    labels = IDS.masked_fill(mask == 0, -100)
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": IDS, "attention_mask": mask, "labels": labels}


def model(family: str = "llama", *, fuse: bool = True) -> Any:
    base: Any = make_fast(base_model(family))
    assert use_document_attention(base) is None
    plain = adapted(base)
    whole: Any = fused(plain) if fuse else plain
    whole.get_base_model().scores_no_padding = True
    return whole


def scores_and_gradients(whole: Any, inputs: dict[str, Tensor], *, unpadded: bool) -> dict[str, Tensor]:
    whole.zero_grad()
    whole.get_base_model().scores_no_padding = unpadded
    out = whole(**inputs, fused_lm_head=True)
    scores = out.log_probs
    (scores * torch.linspace(-1, 2, scores.numel(), device=scores.device).view_as(scores)).sum().backward()
    fields = ("loss", "log_probs", "entropy", "mean_logits", "is_top1", "label_mask")
    return {name: out[name].detach().float() for name in fields} | {
        name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None
    }


def seen_shapes(whole: Any) -> list[torch.Size]:
    seen: list[torch.Size] = []
    norm = whole.get_base_model().model.norm
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    return seen


@pytest.mark.parametrize("side", TOKENS)
@pytest.mark.parametrize(("family", "fuse"), [("llama", True), ("llama", False), ("qwen3", True), ("mistral", True)])
def test_scores_and_gradients_are_those_with_padding(family: str, fuse: bool, side: str) -> None:
    whole, inputs = model(family, fuse=fuse), batch(side)
    shapes = seen_shapes(whole)
    ours = scores_and_gradients(whole, inputs, unpadded=True)
    theirs = scores_and_gradients(whole, inputs, unpadded=False)
    assert [shape[:2].numel() for shape in shapes] == [int(inputs["attention_mask"].sum()), IDS.numel()]
    assert ours.keys() == theirs.keys()
    assert theirs["log_probs"].shape == (4, WIDTH - 1)
    for name, expected in theirs.items():
        if expected.any():
            assert relative_error(ours[name], expected) <= EXACT, name
        else:
            assert not ours[name].any(), name


def test_what_keeps_padding() -> None:
    whole = model().get_base_model()
    padded = batch("right")
    assert without_padding(whole, padded) is not None
    assert without_padding(whole, {**padded, "output_hidden_states": True}) is None
    assert without_padding(whole, {**padded, "position_ids": torch.arange(WIDTH)[None]}) is None
    assert without_padding(whole, {**padded, "attention_mask": torch.ones_like(IDS)}) is None
    assert without_padding(whole, {**padded, "attention_mask": torch.zeros_like(IDS)}) is None
    holed = padded["attention_mask"].clone()
    holed[1, 4] = 0
    assert without_padding(whole, {**padded, "attention_mask": holed}) is None
    whole.why_not_packed = "it would mix documents"
    assert without_padding(whole, padded) is None


def test_positions_are_kept() -> None:
    unpadded = without_padding(model().get_base_model(), batch("both"))
    assert unpadded is not None
    expected = [column for first, end in TOKENS["both"] for column in range(first, end)]
    assert unpadded.inputs["position_ids"].tolist() == [expected]
    assert unpadded.inputs["cu_seq_lens_q"].tolist() == [0, 7, 11, 15]
    assert unpadded.inputs["max_length_q"] == 7

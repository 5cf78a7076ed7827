"""Rows that begin alike, with the common beginning computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pantheraml.models.attention import shares_prefixes
from pantheraml.models.block_mask import block_mask
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.prefix_attention import _mask, prefix_attention
from pantheraml.models.shared_prefixes import LEAST_TOKENS, Sharing, find_shared_prefixes
from pantheraml.models.unpadded import without_padding
from tests.unit.models.test_models_fast import EXACT, relative_error
from tests.unit.models.test_models_unpadded import model, scores_and_gradients, seen_shapes

PROMPT, WIDTH = 12, 22
DRAW = torch.Generator().manual_seed(3)


def group(*, padding: str = "none", system: int = 0) -> dict[str, Tensor]:
    """Two prompts with three completions each, as GRPO's batches: prompts padded left, completions right.

    `system`: first tokens that both prompts have in common.
    """
    prompts = torch.randint(4, 256, (2, PROMPT), generator=DRAW)
    prompts[1, :system] = prompts[0, :system]
    ids = torch.cat([prompts.repeat_interleave(3, 0), torch.randint(4, 256, (6, WIDTH - PROMPT), generator=DRAW)], 1)
    ids[2, PROMPT : PROMPT + 4] = ids[1, PROMPT : PROMPT + 4]  # completions that begin alike
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[:3, :2] = 0
        for row, end in enumerate((10, 7, 10, 1, 4, 9)):
            mask[row, PROMPT + end :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("padding", ["none", "both"])
@pytest.mark.parametrize(
    ("family", "fuse"), [("llama", True), ("llama", False), ("qwen3", True), ("mistral", True), ("gemma3_text", True)]
)
def test_scores_and_gradients_are_those_of_whole_rows(family: str, fuse: bool, padding: str) -> None:
    whole, inputs = model(family, fuse=fuse), group(padding=padding)
    shapes = seen_shapes(whole)
    ours = scores_and_gradients(whole, inputs, unpadded=True)
    theirs = scores_and_gradients(whole, inputs, unpadded=False)
    kept = sum(map(len, sharing(inputs).kept))
    assert [shape[:2].numel() for shape in shapes] == [kept, inputs["input_ids"].numel()]
    assert kept < 0.7 * int(inputs["attention_mask"].sum())
    for name, expected in theirs.items():
        assert expected.any() or name == "is_top1", name
        assert relative_error(ours[name], expected) <= EXACT if expected.any() else not ours[name].any(), name


def sharing(inputs: dict[str, Tensor]) -> Sharing:
    is_token = inputs["attention_mask"].numpy() != 0
    rows = [ids[own] for ids, own in zip(inputs["input_ids"].numpy(), is_token, strict=True)]
    found = find_shared_prefixes(rows, is_token.argmax(axis=1).tolist())
    assert found is not None
    return found


@pytest.mark.parametrize("system", [0, 9])
@pytest.mark.parametrize("padding", ["none", "both"])
def test_whole_rows_are_made_of_computed_tokens(padding: str, system: int) -> None:
    inputs = group(padding=padding, system=system)
    found, is_token = sharing(inputs), inputs["attention_mask"] != 0
    tokens = inputs["input_ids"][is_token]
    rows = [row[own] for row, own in zip(inputs["input_ids"], is_token, strict=True)]
    computed = torch.cat([row[kept] for row, kept in zip(rows, found.kept, strict=True)])
    assert computed[found.prefixes.source].equal(tokens)
    lengths = [len(kept) for kept in found.kept]
    assert lengths[2] == lengths[2 - 1] - 4 + (len(rows[2]) - len(rows[1]))  # it shares four tokens of a completion
    if padding == "none":
        assert lengths == [WIDTH, WIDTH - PROMPT, WIDTH - PROMPT - 4, WIDTH - system, WIDTH - PROMPT, WIDTH - PROMPT]
    assert found.prefixes.boundaries.diff().tolist() == list(map(len, rows))


def test_the_gradient_is_summed_over_all_copies_in_float32() -> None:
    prefixes = sharing(group(system=9)).prefixes
    computed = int(prefixes.source.max()) + 1
    tokens = torch.randn(computed, 3, 5, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(len(prefixes.source), 3, 5).bfloat16()
    (prefixes.whole_rows(tokens) * weights).sum().backward()
    expected = torch.zeros(computed, 3, 5).index_add(0, prefixes.source, weights.float())
    assert tokens.grad is not None
    assert tokens.grad.equal(expected.bfloat16())


def test_who_shares_nothing() -> None:
    row = np.arange(20)
    assert find_shared_prefixes([row, row], [0, 1]) is None  # at other positions
    assert find_shared_prefixes([row[: LEAST_TOKENS - 1], row], [0, 0]) is None
    assert find_shared_prefixes([row, row + 1], [0, 0]) is None
    twice = find_shared_prefixes([row, row], [0, 0])
    assert twice is not None
    assert list(map(len, twice.kept)) == [20, 1]  # the last token is always computed
    within = find_shared_prefixes([row, row[:12]], [0, 0])
    assert within is not None
    assert list(map(len, within.kept)) == [20, 1]


def test_what_keeps_rows_whole() -> None:
    whole: Any = model().get_base_model()
    inputs = group()
    assert without_padding(whole, inputs) is not None
    assert without_padding(whole, {name: rows[::3] for name, rows in inputs.items()}) is None  # other prompts
    assert without_padding(whole, {name: rows[:1] for name, rows in inputs.items()}) is None
    short = {name: torch.cat([rows] * 30, 1)[:2] for name, rows in inputs.items()}
    short["input_ids"][1, PROMPT] += 1
    assert without_padding(whole, short) is None  # the rest of the row is not worth it
    whole.train()
    whole.model.layers[0].self_attn.attention_dropout = 0.1
    assert without_padding(whole, inputs) is None
    assert without_padding(whole.eval(), inputs) is not None
    whole.shares_prefixes = False
    assert without_padding(whole, inputs) is None


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_is_that_of_whole_rows(window: int | None) -> None:
    own, whole = torch.tensor([0, 2, 5]), torch.tensor([0, 6, 9])  # four tokens before the first document's own
    square = block_mask(whole, 1, 9, window)[0, 0]
    assert _mask(own, whole, 5, 9, window).equal(square[[4, 5, 6, 7, 8]])


def test_attention_that_ignores_prefixes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares_prefixes(model().get_base_model())

    def attend(query: Tensor, key: Tensor, value: Tensor, documents: DocumentLayout, **named: Any) -> Tensor:
        return prefix_attention(query, key * 1.1, value, documents, **named)

    monkeypatch.setattr("pantheraml.models.attention.prefix_attention", attend)
    assert not shares_prefixes(model().get_base_model())

"""Rows that begin alike, with the common beginning computed once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pantheraml.models import prefix_attention as prefix_attention_module
from pantheraml.models import shared_prefixes
from pantheraml.models.attention import shares_prefixes
from pantheraml.models.block_mask import block_mask
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.prefix_attention import _kernel_aligns_ends, _near, _one_by_one, prefix_attention
from pantheraml.models.shared_prefixes import Sharing, find_shared_prefixes
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
    # Of each beginning that occurs, the last token is computed once.
    columns = is_token.int().argmax(1).tolist()
    beginnings = {
        (column, *row[: end + 1].tolist()) for row, column in zip(rows, columns, strict=True) for end in range(len(row))
    }
    assert sum(lengths) == len(beginnings)
    if padding == "none":
        assert sum(lengths) == 6 * WIDTH - 4 * PROMPT - 4 - system
    assert found.prefixes.boundaries.diff().tolist() == list(map(len, rows))
    assert found.prefixes.sizes == tuple(zip(lengths, map(len, rows), strict=True))


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
    assert find_shared_prefixes([row, row + 1], [0, 0]) is None
    assert find_shared_prefixes([row[:1], row[:1]], [0, 0]) is None


@pytest.mark.parametrize("other", [20, 12])
def test_the_last_token_of_a_row_is_always_computed(other: int) -> None:
    row = np.arange(20)
    found = find_shared_prefixes([row, row[:other]], [0, 0])
    assert found is not None
    assert sorted(map(len, found.kept)) == ([1, 20] if other == 20 else [8, 12])


def test_rows_are_compared_with_one_other_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(shared_prefixes, "_common", lambda one, other: compared.append(len(one)) or 3)
    rows = [np.array([1, 2, 3, 4 + index, 5]) for index in range(100)]
    assert find_shared_prefixes(rows, [0] * 100) is not None
    assert len(compared) == 99


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
    square = block_mask(torch.tensor([0, 6]), 1, 6, window)[0, 0]
    assert _near(torch.arange(4, 6), torch.arange(6), window).equal(square[4:])


def test_attention_that_ignores_prefixes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares_prefixes(model().get_base_model())

    def attend(query: Tensor, key: Tensor, value: Tensor, documents: DocumentLayout, **named: Any) -> Tensor:
        return prefix_attention(query, key * 1.1, value, documents, **named)

    monkeypatch.setattr("pantheraml.models.attention.prefix_attention", attend)
    assert not shares_prefixes(model().get_base_model())


def test_rows_of_adapters_that_depend_on_the_row_keep_padding() -> None:
    whole = model("llama", fuse=False)
    whole.peft_config["default"].alora_invocation_tokens = [5, 6]
    inputs = group(padding="both")
    inputs["input_ids"][:, PROMPT - 2 : PROMPT] = torch.tensor([5, 6])
    shapes = seen_shapes(whole)
    whole(**inputs, fused_lm_head=True)  # PEFT counts from the end of each row where the adapter begins
    assert shapes[0][:2] == inputs["input_ids"].shape


def varlen(aligned: str) -> Any:
    """In place of the kernel, which needs a GPU: attention that aligns queries with the ends or beginnings of keys."""

    def attend(
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own: DocumentLayout,
        whole: DocumentLayout,
        *,
        window: int | None,
        scaling: float | None,
    ) -> Tensor:
        assert own.boundaries is not None
        assert whole.boundaries is not None
        sizes = [(int(a), int(b)) for a, b in zip(own.boundaries.diff(), whole.boundaries.diff(), strict=True)]
        if aligned == "begin":
            parts = zip(keys.split([b for _, b in sizes]), values.split([b for _, b in sizes]), sizes, strict=True)
            begins = [(key[:a], value[:a]) for key, value, (a, _) in parts]
            keys, values = (torch.cat(list(tensors)) for tensors in zip(*begins, strict=True))
            sizes = [(a, a) for a, _ in sizes]
        return _one_by_one(queries, keys, values, sizes, window=window, dropout=0.0, scaling=scaling)

    return attend


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _kernel_aligns_ends.cache_clear()
    monkeypatch.setattr(prefix_attention_module, "_varlen", varlen(request.param))
    monkeypatch.setattr(prefix_attention_module, "varlen_kernel_supports", lambda *_: True)
    yield
    _kernel_aligns_ends.cache_clear()


@pytest.mark.parametrize(("kernel", "right"), [("end", True), ("begin", False)], indirect=["kernel"])
@pytest.mark.usefixtures("kernel")
def test_a_kernel_that_aligns_otherwise_is_not_used(right: bool) -> None:
    with torch.inference_mode():
        assert _kernel_aligns_ends(torch.device("cpu")) == right


@pytest.mark.parametrize("kernel", ["end"], indirect=True)
@pytest.mark.usefixtures("kernel")
def test_the_kernel_is_first_checked_within_a_checkpoint() -> None:
    whole, inputs = model(fuse=False), group()
    whole.get_base_model().gradient_checkpointing_enable()
    _kernel_aligns_ends.cache_clear()  # models in float32 are loaded without it, and trained with autocast
    ours = scores_and_gradients(whole, inputs, unpadded=True)
    assert _kernel_aligns_ends.cache_info().misses == 1
    theirs = scores_and_gradients(whole, inputs, unpadded=False)
    for name, expected in theirs.items():
        assert relative_error(ours[name], expected) <= EXACT if expected.any() else not ours[name].any(), name

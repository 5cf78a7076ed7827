"""Document attention against the simplest reference: each document separately, through transformers' eager
attention."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pantheraml.models.async_scalars import remember_host_copy
from pantheraml.models.attention import (
    NAME,
    DocumentLayout,
    UnsupportedScoresError,
    document_attention,
    documents_from_padding,
    documents_from_positions,
    use_document_attention,
    uses_document_attention,
)

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "granite"]
ROWS = [(9, 3, 12), (1, 17, 6)]  # longer and shorter than the sliding window of 4
WIDTH = 24

TinyModel = Callable[..., Path]


def load(folder: Path, attention: str = "sdpa", **kwargs: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, **kwargs)
    return model.eval()


def with_document_attention(folder: Path) -> Any:
    model = load(folder)
    assert use_document_attention(model) is None
    return model


def packed(rows: Sequence[Sequence[int]] = ROWS) -> tuple[list[Tensor], Tensor, Tensor]:
    """Documents of these lengths, and their ids and positions row by row."""
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 250, (length,), generator=draw) for row in rows for length in row]
    ids = torch.cat(documents).view(len(rows), -1)
    positions = torch.cat([torch.arange(len(document)) for document in documents]).view(len(rows), -1)
    return documents, ids, positions


def layout(rows: Sequence[Sequence[int]] = ROWS, *, empty: int = 0) -> DocumentLayout:
    lengths = [length for row in rows for length in row] + [0] * empty
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return DocumentLayout(ends, max(lengths))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).detach().norm()) <= tolerance * float(expected.detach().norm())


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    actual, expected = gradients(model), gradients(reference)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(actual[name], gradient, 5e-6)  # sums over tokens in another order: float32 leaves 2e-6


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_match_separate_documents(tiny_model: TinyModel, family: str) -> None:
    """Logits and gradients, with explicit documents and with positions only."""
    documents, ids, positions = packed()
    reference = load(tiny_model(family), "eager")
    weight = torch.randn(len(ids.flatten()), 264, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([reference(input_ids=document[None], use_cache=False).logits[0] for document in documents])
    (alone * weight).sum().backward()
    for more in ({}, layout(empty=3).arguments()):
        model = with_document_attention(tiny_model(family))
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits.flatten(0, 1)
        assert_near(logits, alone)
        (logits * weight).sum().backward()
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_changing_a_document_changes_no_other(tiny_model: TinyModel, family: str) -> None:
    model = with_document_attention(tiny_model(family))
    _, ids, positions = packed()
    changed = ids.clone()
    changed[0, 9:12] = (changed[0, 9:12] + 1) % 250
    arguments = layout().arguments()
    with torch.no_grad():
        before, after = (model(input_ids=i, position_ids=positions, **arguments).logits for i in (ids, changed))
    same = torch.ones(2, WIDTH, dtype=torch.bool)
    same[0, 9:12] = False
    assert torch.equal(before[same], after[same])
    assert not torch.isclose(before[~same], after[~same]).all(dim=-1).any()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows(tiny_model: TinyModel, family: str, side: str) -> None:
    model, reference = with_document_attention(tiny_model(family)), load(tiny_model(family), "eager")
    documents = [packed([(length,)])[0][0] for length in (9, 20, 24)]
    mask = torch.zeros(3, WIDTH, dtype=torch.long)
    ids = torch.zeros(3, WIDTH, dtype=torch.long)
    positions = torch.zeros(3, WIDTH, dtype=torch.long)
    for row, document in enumerate(documents):
        place = slice(0, len(document)) if side == "right" else slice(WIDTH - len(document), WIDTH)
        ids[row, place], mask[row, place], positions[row, place] = document, 1, torch.arange(len(document))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = torch.cat([reference(input_ids=document[None]).logits[0] for document in documents])
    assert logits.isfinite().all()
    assert_near(logits[mask.bool()], alone)


def test_padding_between_tokens_stays_a_mask(tiny_model: TinyModel) -> None:
    mask = torch.ones(2, WIDTH, dtype=torch.long)
    mask[0, 7:9] = 0
    assert documents_from_padding(mask) is None
    _, ids, _ = packed()
    with torch.no_grad():
        actual, expected = (
            model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            for model in (with_document_attention(tiny_model("llama")), load(tiny_model("llama"), "eager"))
        )
    assert_near(actual, expected)


def test_whole_rows_need_no_boundaries(tiny_model: TinyModel) -> None:
    positions = torch.arange(8)[None]
    assert documents_from_positions(positions, rows=3) == DocumentLayout(None, 8)
    assert documents_from_padding(torch.ones(3, 8)) == DocumentLayout(None, 8)
    _, ids, _ = packed()
    model, reference = with_document_attention(tiny_model("mistral")), load(tiny_model("mistral"), "eager")
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits
        assert_near(model(input_ids=ids, use_cache=False).logits, expected)
        assert_near(model(input_ids=ids, use_cache=False, **DocumentLayout(None, WIDTH).arguments()).logits, expected)


def test_documents_are_found_from_known_host_copies() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    positions = torch.tensor([[0, 1, 0], [0, 1, 2]])
    there = [torch.zeros_like(each) for each in (mask, positions)]
    for here, sent in zip((mask, positions), there, strict=True):
        remember_host_copy(here, sent)
    for actual in (documents_from_padding(there[0]), documents_from_positions(there[1], rows=2)):
        assert actual is not None
        assert actual.boundaries is not None
        assert actual.boundaries.tolist() == [0, 2, 3, 6]


def test_boundaries_from_positions() -> None:
    actual = documents_from_positions(torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]), rows=2)
    assert actual.boundaries is not None
    assert (actual.boundaries.tolist(), actual.boundaries.dtype, actual.max_length) == ([0, 3, 4, 5, 8], torch.int32, 3)


class Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.seen.add(tuple(tensor.shape))
        return out


def test_no_mask_is_built(tiny_model: TinyModel) -> None:
    _, ids, positions = packed()
    squares = {}
    for name, model in {
        "masked": load(tiny_model("llama")),
        "packed": with_document_attention(tiny_model("llama")),
    }.items():
        with torch.no_grad(), Shapes() as shapes:
            model(input_ids=ids, position_ids=positions, use_cache=False)
        squares[name] = {shape for shape in shapes.seen if shape[-2:] == (WIDTH, WIDTH)}
    assert squares["masked"]
    assert not squares["packed"]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
def test_the_mask_fallback_matches(heads: tuple[int, int], window: int | None) -> None:
    """Compiled code may not read the boundaries, like a GPU without the kernel, so a mask is built from them."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, count, WIDTH, 8) for count in (heads[0], heads[1], heads[1]))
    arguments = {"scaling": 0.3, "sliding_window": window, **layout(empty=2).arguments()}
    module = nn.Module()
    plain, _ = document_attention(module, query, key, value, None, **arguments)
    masked, _ = torch.compile(document_attention, backend="eager")(module, query, key, value, None, **arguments)
    assert plain.shape == (2, WIDTH, heads[0], 8)
    assert_near(masked, plain)


# torch.compile triggers warnings inside torch, which would fail the test as errors
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_compile_once_for_all_batches() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes["num_key_value_heads"] = 1
    model: Any = MistralForCausalLM(MistralConfig(vocab_size=250, sliding_window=14, **sizes))
    assert use_document_attention(model) is None
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(dynamic=False, fullgraph=True, backend=counter)
    for rows in ([(3, 13), (8, 8)], [(16,), (1, 15)], [(5, 5, 6), (16,)]):
        _, ids, positions = packed(rows)
        arguments = layout(rows, empty=4 - sum(map(len, rows))).arguments()
        model.model(input_ids=ids, position_ids=positions, use_cache=False, **arguments)
    assert counter.frame_count == 1


def test_generation_is_unchanged(tiny_model: TinyModel) -> None:
    """Left-padded prompts and a key/value cache."""
    for family in ("llama", "mistral", "gpt2"):
        ids = torch.tensor([[3, 5, 8, 13, 21, 34, 55], [258, 258, 258, 2, 4, 8, 16]])
        mask = (ids != 258).long()
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 258, "eos_token_id": None}
        model, reference = with_document_attention(tiny_model(family)), load(tiny_model(family))
        outputs = {"return_dict_in_generate": True, "output_logits": True}
        actual, expected = (
            m.generate(input_ids=ids, attention_mask=mask, use_cache=True, **settings, **outputs)
            for m in (model, reference)
        )
        assert torch.equal(actual.sequences, expected.sequences)
        assert_near(torch.stack(actual.logits), torch.stack(expected.logits))


def test_with_adapters_and_checkpointing(tiny_model: TinyModel) -> None:
    documents, ids, positions = packed()

    def adapted(attention: str) -> Any:
        base = load(tiny_model("qwen3"), attention)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(3)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        return model.train()

    model, reference = adapted("sdpa"), adapted("eager")
    assert use_document_attention(model) is None
    assert uses_document_attention(model)
    model(input_ids=ids, position_ids=positions, use_cache=False).logits.square().sum().backward()
    for document in documents:
        reference(input_ids=document[None], use_cache=False).logits.square().sum().backward()
    assert_same_gradients(model, reference)


def test_enabling_twice_is_idempotent_and_not_saved(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = with_document_attention(tiny_model("llama"))
    assert use_document_attention(model) is None
    assert len(model.model._forward_pre_hooks) == 1
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


def test_unsupported_families_keep_their_attention(tiny_model: TinyModel) -> None:
    model = load(tiny_model("gemma2"), "eager")
    assert "modifies attention scores" in str(use_document_attention(model))
    assert model.config._attn_implementation == "eager"
    assert not model.model._forward_pre_hooks
    with pytest.raises(UnsupportedScoresError, match="softcap"):
        ones = torch.ones(1, 1, 2, 8)
        document_attention(nn.Module(), ones, ones, ones, None, softcap=30.0)


def test_a_model_that_drops_the_boundaries_is_detected(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaDecoderLayer.forward

    def drops_arguments(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        passed = ("attention_mask", "position_embeddings")
        return forward(self, hidden_states, **{name: kwargs[name] for name in passed})

    monkeypatch.setattr(LlamaDecoderLayer, "forward", drops_arguments)
    model = load(tiny_model("llama"))
    assert "different values" in str(use_document_attention(model))
    assert model.config._attn_implementation == "sdpa"
    assert not model.model._forward_pre_hooks

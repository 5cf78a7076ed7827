"""Packed documents against each document alone, for every causal family of the installed transformers.

The reference is the family's own code, as transformers builds it, with one document in a row and nothing else. What is
compared with it goes the way of training: prepared sequences, collated, through the loss of the engine.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.data.batch import collate
from pantheraml.data.documents import TokenSequence
from pantheraml.engine.loss import LossModel
from pantheraml.models import packing
from pantheraml.models.causal_lm import make_fast
from pantheraml.models.packing import (
    judge,
    keep_documents_apart,
    require_boundaries,
    require_right_packing,
)
from pantheraml.models.tiny import VOCABULARY, CannotShrinkError, tiny_config, tiny_model

ROOT = Path(__file__).parents[3]
LENGTHS = (17, 30, 5, 22)
"""The first two are longer than the windows and chunks of small models, and end in the middle of one."""

CARRY_ON = [
    *("qwen3_next", "qwen3_5_text", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1", "bamba", "jamba", "zamba2"),
    *("mamba", "mamba2", "rwkv", "xlstm", "recurrent_gemma", "minimax", "kimi_linear", "olmo_hybrid"),
    *("bloom", "mpt", "openai-gpt", "bart", "trocr"),
]
"""Families that carry something from a document into the next, or number tokens by themselves."""


def generator() -> Any:
    if "generate_families" in sys.modules:
        return sys.modules["generate_families"]
    spec = importlib.util.spec_from_file_location("generate_families", ROOT / "docs/generate_families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_families"] = module
    spec.loader.exec_module(module)
    return module


FAMILIES = dict(generator().families())
SEQ_LEN = generator().SEQ_LEN


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(lengths: Sequence[int] = LENGTHS, seed: int = 7) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in lengths]


def losses(logits: Tensor, document: Tensor) -> Tensor:
    return F.cross_entropy(logits[:-1].float(), document[1:], reduction="sum")


@torch.no_grad()
def alone(model: Any, documents: Sequence[Tensor]) -> Tensor:
    """The summed loss of documents, each in a call of its own."""
    found = [losses(model(input_ids=each[None], use_cache=False).logits[0], each) for each in documents]
    return torch.stack(found)


def sequence(documents: Sequence[Tensor]) -> TokenSequence:
    ids = torch.cat(list(documents)).numpy().astype(np.int32)
    labels = ids.copy()
    lengths = np.array([len(each) for each in documents])
    labels[np.cumsum(lengths)[:-1]] = -100  # nobody predicts the first token of a document
    return TokenSequence(ids, labels, lengths)


@torch.no_grad()
def trained_on(model: Any, rows: Sequence[Sequence[Tensor]]) -> float:
    """The summed loss of rows, as training finds it."""
    batch = collate([sequence(row) for row in rows], pad_id=0, width=None)
    return float(
        LossModel(model)(
            batch.input_ids,
            batch.position_ids,
            batch.targets,
            batch.boundaries,
            batch.max_length,
            batch.target_count,
        )
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_padded_and_alone_agree_or_nothing_is_packed(name: str) -> None:
    config = FAMILIES[name]
    if isinstance(config, Exception):
        return
    verdict = judge(config, longest=SEQ_LEN)
    if verdict.refused is not None:
        assert not verdict.ways
        return
    try:
        model: Any = tiny_model(config, longest=SEQ_LEN)
        expected = alone(model, documents := drawn())
    except Exception:  # noqa: BLE001 - what cannot be built or run small; the page says of each why
        assert not verdict.ways
        assert verdict.reason
        return
    assert keep_documents_apart(model, longest=SEQ_LEN).ways == verdict.ways
    first, second, third, fourth = documents
    assert trained_on(model, [[each] for each in documents]) == pytest.approx(float(expected.sum()), rel=1e-3)
    if verdict.ways:
        packed = trained_on(model, [[first, third, fourth], [second, fourth]])
        assert packed == pytest.approx(float(expected.sum() + expected[3]), rel=1e-3)


@pytest.mark.parametrize("name", CARRY_ON)
def test_what_cannot_be_kept_apart_is_not_packed(name: str) -> None:
    verdict = judge(FAMILIES[name], longest=SEQ_LEN)
    assert not verdict.ways
    assert "other values for packed documents than for each alone" in str(verdict.reason)


@pytest.mark.parametrize(
    "name", ["gpt_oss", "llama4_text", "opt", "biogpt", "xglm", "falcon", "llama", "mistral", "gemma2"]
)
def test_what_people_tune_is_packed(name: str) -> None:
    assert judge(FAMILIES[name], longest=SEQ_LEN).ways


def test_the_default_family_needs_no_mask() -> None:
    verdict = judge(LlamaConfig())
    assert verdict.ways[0] == "boundaries"
    assert verdict.masked is None


def test_llama_4_counts_tokens_of_a_row_from_8192_on() -> None:
    config = FAMILIES["llama4_text"]
    assert judge(config, longest=8191).ways == ("masks",)
    assert not judge(config, longest=8192).ways
    assert not judge(config).ways


def with_rope(kind: str, length: int) -> Any:
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 4.0}
        return AutoConfig.for_model("llama", rope_scaling=rope, max_position_embeddings=length)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    return AutoConfig.for_model("phi3", rope_scaling=rope, original_max_position_embeddings=length)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_documents_are_not_packed_beyond_the_length_at_which_rope_changes(kind: str) -> None:
    config = with_rope(kind, 64)
    assert judge(config, longest=64).ways
    beyond = judge(config, longest=65)
    assert not beyond.ways
    assert f"({kind}) changes" in str(beyond.reason)
    assert "more than 64 tokens" in str(beyond.reason)
    unknown = judge(config)
    assert (unknown.ways != (), unknown.within) == (True, 64)
    model: Any = tiny_model(with_rope(kind, 64))  # which has 128 of them
    long, short = drawn([200, 20])
    expected = alone(model, [short])
    assert float(expected.sum()) == pytest.approx(trained_on(model, [[short, short]]) / 2, rel=1e-4)
    packed = trained_on(model, [[long, short]])
    assert packed != pytest.approx(float(alone(model, [long, short]).sum()), rel=1e-4)


def test_longer_documents_alone_are_refused_in_a_row() -> None:
    fast: Any = make_fast(tiny_model(with_rope("longrope", 16)))
    fast.why_not_packed, fast.packed_within = "it changes", 16
    short, long = torch.arange(32)[None] % 16, torch.arange(40)[None] % 20
    fast(input_ids=short, position_ids=short)
    with pytest.raises(UnsupportedModelError, match="it changes"):
        fast(input_ids=long, position_ids=long)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["gemma2", "stablelm", "gptj"])
def test_restarting_positions_need_no_word_about_a_cache(name: str, training: bool) -> None:
    model: Any = tiny_model(FAMILIES[name])
    keep_documents_apart(model)
    fast: Any = make_fast(model)
    for module in fast.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    first, second = drawn([17, 22])
    expected = fast.eval()(input_ids=second[None]).logits[0]
    positions = torch.cat([torch.arange(17), torch.arange(22)])[None]
    fast.train(training)
    found = fast(input_ids=torch.cat([first, second])[None], position_ids=positions).logits[0, 17:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    whole = {"input_ids": second[None], "position_ids": torch.arange(22)[None]}
    assert fast.eval()(**whole).past_key_values is not None
    assert fast(**whole, use_cache=False).past_key_values is None


def test_blocks_of_keys_are_counted_from_the_row_s_beginning() -> None:
    assert not judge(FAMILIES["minimax_m3_vl_text"], longest=256).ways


def test_a_hybrid_without_recurrent_layers_is_packed() -> None:
    attention = AutoConfig.for_model("granitemoehybrid", num_hidden_layers=4, layer_types=["attention"] * 4)
    assert judge(attention).ways
    assert not judge(AutoConfig.for_model("granitemoehybrid", num_hidden_layers=4, layer_types=["mamba"] * 4)).ways


def test_an_encoder_is_refused() -> None:
    verdict = judge(AutoConfig.for_model("bert"))
    assert "not causal" in str(verdict.refused)
    assert judge(AutoConfig.for_model("bert", is_decoder=True)).refused is None


def test_what_cannot_be_tried_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_args: object, **_kwargs: object) -> None:
        raise CannotShrinkError("a size of its own")

    monkeypatch.setattr(packing, "tiny_model", cannot)
    verdict = judge(LlamaConfig(vocab_size=12345))
    assert not verdict.ways
    assert "a size of its own" in str(verdict.reason)


def test_windows_chunks_and_kinds_of_layers_stay() -> None:
    small = tiny_config(AutoConfig.for_model("gpt_oss"))
    assert set(small.layer_types) == {"full_attention", "sliding_attention"}
    assert small.sliding_window == 8
    whole = AutoConfig.for_model("llama4_text")
    assert set(tiny_config(whole).layer_types) == set(whole.layer_types)
    assert tiny_config(whole).attention_chunk_size == 8
    assert whole.hidden_size == 5120  # what was given is as it was


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "opt"])
def test_masks_of_ours_reach_models_with_adapters(name: str) -> None:
    model: Any = tiny_model(FAMILIES[name], longest=SEQ_LEN)
    documents = drawn()
    expected = alone(model, documents)
    assert keep_documents_apart(model, longest=SEQ_LEN).ways
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert trained_on(adapted.eval(), [documents]) == pytest.approx(float(expected.sum()), rel=1e-3)


def test_masks_of_ours_in_half_precision() -> None:
    model: Any = tiny_model(FAMILIES["gpt_oss"]).bfloat16()
    keep_documents_apart(model)
    documents = drawn()
    assert trained_on(model, [documents]) == pytest.approx(float(alone(model, documents).sum()), rel=2e-2)


def test_packed_data_is_refused_where_it_would_be_wrong() -> None:
    with pytest.raises(UnsupportedModelError, match="other values for packed documents") as caught:
        require_right_packing(tiny_model(FAMILIES["mamba2"]), longest=64)
    assert "data.packing=false" in str(caught.value)
    model = tiny_model(FAMILIES["llama"])
    keep_documents_apart(model)
    require_right_packing(model, longest=64)


def test_context_parallelism_needs_boundaries() -> None:
    model = tiny_model(FAMILIES["opt"])
    require_boundaries(model)  # nothing was decided yet
    keep_documents_apart(model)
    with pytest.raises(UnsupportedModelError, match="Context parallelism"):
        require_boundaries(model)


def test_rows_of_several_documents_are_refused() -> None:
    model: Any = tiny_model(FAMILIES["mamba2"])
    fast: Any = make_fast(model)
    fast.why_not_packed = "it would be wrong"
    inputs = {"input_ids": torch.arange(8)[None], "use_cache": False}
    one, several = torch.arange(8)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    fast(**inputs, position_ids=one)
    fast(**inputs)
    with pytest.raises(UnsupportedModelError, match="it would be wrong"):
        fast(**inputs, position_ids=several)
    with pytest.raises(UnsupportedModelError, match="it would be wrong"):
        get_peft_model(fast, LoraConfig(target_modules=["in_proj"]))(**inputs, position_ids=several)


def test_probing_leaves_random_numbers_and_threads_alone() -> None:
    torch.manual_seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    judge(LlamaConfig(hidden_size=96, vocab_size=99))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_the_page_is_current() -> None:
    module = generator()
    _, table, _ = module.parts(module.PAGE.read_text(encoding="utf-8"))
    if f"transformers {transformers.__version__}," not in table:
        pytest.skip("the page is of another transformers")
    assert table == module.render(), "run: python docs/generate_families.py"

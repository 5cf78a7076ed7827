"""Packed documents against separate documents, for every causal family of the installed transformers.

The reference is the family's own code, as transformers builds it, with one document per row. What is compared with it
goes through the training path: prepared sequences, collated, through the engine's loss.
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
from pantheraml.engine.step.loss import LossModel
from pantheraml.models import packing_check
from pantheraml.models.causal_lm import make_fast
from pantheraml.models.packing_check import (
    check_packing_support,
    isolate_documents,
    require_boundaries,
    require_packing_support,
)
from pantheraml.models.tiny_model import VOCABULARY, CannotShrinkError, tiny_config, tiny_model

ROOT = Path(__file__).parents[3]
LENGTHS = (17, 30, 5, 22)
"""The first two are longer than the windows and chunks of tiny models, and end in the middle of one."""

CARRY_ON = [
    *("qwen3_next", "qwen3_5_text", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1", "bamba", "jamba", "zamba2"),
    *("mamba", "mamba2", "rwkv", "xlstm", "recurrent_gemma", "minimax", "kimi_linear", "olmo_hybrid"),
    *("bloom", "mpt", "openai-gpt", "bart", "trocr"),
]
"""Families that carry state from one document into the next, or number tokens themselves."""


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


def random_documents(lengths: Sequence[int] = LENGTHS, seed: int = 7) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in lengths]


def losses(logits: Tensor, document: Tensor) -> Tensor:
    return F.cross_entropy(logits[:-1].float(), document[1:], reduction="sum")


@torch.no_grad()
def separate_losses(model: Any, documents: Sequence[Tensor]) -> Tensor:
    """The summed loss of each document, in a call of its own."""
    actual = [losses(model(input_ids=each[None], use_cache=False).logits[0], each) for each in documents]
    return torch.stack(actual)


def sequence(documents: Sequence[Tensor]) -> TokenSequence:
    ids = torch.cat(list(documents)).numpy().astype(np.int32)
    labels = ids.copy()
    lengths = np.array([len(each) for each in documents])
    labels[np.cumsum(lengths)[:-1]] = -100  # the first token of a document is no target
    return TokenSequence(ids, labels, lengths)


@torch.no_grad()
def training_loss(model: Any, rows: Sequence[Sequence[Tensor]]) -> float:
    """The summed loss of rows, as computed in training."""
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


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_padded_and_separate_match_or_packing_is_off(name: str) -> None:
    config = FAMILIES[name]
    if isinstance(config, Exception):
        return
    verdict = check_packing_support(config, longest=SEQ_LEN)
    if verdict.refused is not None:
        assert not verdict.modes
        return
    try:
        model: Any = tiny_model(config, longest=SEQ_LEN)
        expected = separate_losses(model, documents := random_documents())
    except Exception:  # noqa: BLE001 - cannot be built or run small; docs/families.md gives the reason
        assert not verdict.modes
        assert verdict.reason
        return
    assert isolate_documents(model, longest=SEQ_LEN).modes == verdict.modes
    first, second, third, fourth = documents
    assert training_loss(model, [[each] for each in documents]) == pytest.approx(float(expected.sum()), rel=1e-3)
    if verdict.modes:
        packed = training_loss(model, [[first, third, fourth], [second, fourth]])
        assert packed == pytest.approx(float(expected.sum() + expected[3]), rel=1e-3)


@pytest.mark.parametrize("name", CARRY_ON)
def test_families_without_isolation_are_not_packed(name: str) -> None:
    verdict = check_packing_support(FAMILIES[name], longest=SEQ_LEN)
    assert not verdict.modes
    assert "different values for packed documents than for separate ones" in str(verdict.reason)


@pytest.mark.parametrize(
    "name", ["gpt_oss", "llama4_text", "opt", "biogpt", "xglm", "falcon", "llama", "mistral", "gemma2"]
)
def test_popular_families_are_packed(name: str) -> None:
    assert check_packing_support(FAMILIES[name], longest=SEQ_LEN).modes


def test_the_default_family_needs_no_mask() -> None:
    verdict = check_packing_support(LlamaConfig())
    assert verdict.modes[0] == "boundaries"
    assert verdict.masked is None


def test_llama_4_depends_on_row_positions_from_8192_on() -> None:
    config = FAMILIES["llama4_text"]
    assert check_packing_support(config, longest=8191).modes == ("masks",)
    assert not check_packing_support(config, longest=8192).modes
    assert not check_packing_support(config).modes


def with_rope(kind: str, length: int) -> Any:
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 4.0}
        return AutoConfig.for_model("llama", rope_scaling=rope, max_position_embeddings=length)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    return AutoConfig.for_model("phi3", rope_scaling=rope, original_max_position_embeddings=length)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_documents_are_not_packed_beyond_the_length_at_which_rope_changes(kind: str) -> None:
    config = with_rope(kind, 64)
    assert check_packing_support(config, longest=64).modes
    beyond = check_packing_support(config, longest=65)
    assert not beyond.modes
    assert f"({kind}) changes" in str(beyond.reason)
    assert "more than 64 tokens" in str(beyond.reason)
    unknown = check_packing_support(config)
    assert (unknown.modes != (), unknown.within) == (True, 64)
    model: Any = tiny_model(with_rope(kind, 64))  # its RoPE changes beyond 128
    long, short = random_documents([200, 20])
    expected = separate_losses(model, [short])
    assert float(expected.sum()) == pytest.approx(training_loss(model, [[short, short]]) / 2, rel=1e-4)
    packed = training_loss(model, [[long, short]])
    assert packed != pytest.approx(float(separate_losses(model, [long, short]).sum()), rel=1e-4)


def test_packed_rows_are_refused_only_with_longer_documents() -> None:
    fast: Any = make_fast(tiny_model(with_rope("longrope", 16)))
    fast.why_not_packed, fast.packed_within = "it changes", 16
    short, long = torch.arange(32)[None] % 16, torch.arange(40)[None] % 20
    fast(input_ids=short, position_ids=short)
    with pytest.raises(UnsupportedModelError, match="it changes"):
        fast(input_ids=long, position_ids=long)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["gemma2", "stablelm", "gptj"])
def test_restarting_positions_need_no_use_cache_argument(name: str, training: bool) -> None:
    model: Any = tiny_model(FAMILIES[name])
    isolate_documents(model)
    fast: Any = make_fast(model)
    for module in fast.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    first, second = random_documents([17, 22])
    expected = fast.eval()(input_ids=second[None]).logits[0]
    positions = torch.cat([torch.arange(17), torch.arange(22)])[None]
    fast.train(training)
    actual = fast(input_ids=torch.cat([first, second])[None], position_ids=positions).logits[0, 17:]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    whole = {"input_ids": second[None], "position_ids": torch.arange(22)[None]}
    assert fast.eval()(**whole).past_key_values is not None
    assert fast(**whole, use_cache=False).past_key_values is None


def test_key_blocks_start_at_the_beginning_of_the_row() -> None:
    assert not check_packing_support(FAMILIES["minimax_m3_vl_text"], longest=256).modes


def test_a_hybrid_without_recurrent_layers_is_packed() -> None:
    attention = AutoConfig.for_model("granitemoehybrid", num_hidden_layers=4, layer_types=["attention"] * 4)
    assert check_packing_support(attention).modes
    assert not check_packing_support(
        AutoConfig.for_model("granitemoehybrid", num_hidden_layers=4, layer_types=["mamba"] * 4)
    ).modes


def test_an_encoder_is_rejected() -> None:
    verdict = check_packing_support(AutoConfig.for_model("bert"))
    assert "not causal" in str(verdict.refused)
    assert check_packing_support(AutoConfig.for_model("bert", is_decoder=True)).refused is None


def test_models_that_cannot_be_tested_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_args: object, **_kwargs: object) -> None:
        raise CannotShrinkError("a size of its own")

    monkeypatch.setattr(packing_check, "tiny_model", cannot)
    verdict = check_packing_support(LlamaConfig(vocab_size=12345))
    assert not verdict.modes
    assert "a size of its own" in str(verdict.reason)


def test_windows_chunks_and_layer_types_are_kept() -> None:
    small = tiny_config(AutoConfig.for_model("gpt_oss"))
    assert set(small.layer_types) == {"full_attention", "sliding_attention"}
    assert small.sliding_window == 8
    whole = AutoConfig.for_model("llama4_text")
    assert set(tiny_config(whole).layer_types) == set(whole.layer_types)
    assert tiny_config(whole).attention_chunk_size == 8
    assert whole.hidden_size == 5120  # the input is unchanged


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "opt"])
def test_document_masks_work_with_adapters(name: str) -> None:
    model: Any = tiny_model(FAMILIES[name], longest=SEQ_LEN)
    documents = random_documents()
    expected = separate_losses(model, documents)
    assert isolate_documents(model, longest=SEQ_LEN).modes
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert training_loss(adapted.eval(), [documents]) == pytest.approx(float(expected.sum()), rel=1e-3)


def test_document_masks_in_half_precision() -> None:
    model: Any = tiny_model(FAMILIES["gpt_oss"]).bfloat16()
    isolate_documents(model)
    documents = random_documents()
    assert training_loss(model, [documents]) == pytest.approx(float(separate_losses(model, documents).sum()), rel=2e-2)


def test_packed_data_is_rejected_for_unsupported_models() -> None:
    with pytest.raises(UnsupportedModelError, match="different values for packed documents") as caught:
        require_packing_support(tiny_model(FAMILIES["mamba2"]), longest=64)
    assert "data.packing=false" in str(caught.value)
    model = tiny_model(FAMILIES["llama"])
    isolate_documents(model)
    require_packing_support(model, longest=64)


def test_context_parallelism_needs_boundaries() -> None:
    model = tiny_model(FAMILIES["opt"])
    require_boundaries(model)  # no mode was chosen yet
    isolate_documents(model)
    with pytest.raises(UnsupportedModelError, match="Context parallelism"):
        require_boundaries(model)


def test_packed_rows_from_a_trainer_are_rejected() -> None:
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


def test_the_check_preserves_rng_and_thread_count() -> None:
    torch.manual_seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    check_packing_support(LlamaConfig(hidden_size=96, vocab_size=99))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_the_families_page_is_current() -> None:
    module = generator()
    _, table, _ = module.parts(module.PAGE.read_text(encoding="utf-8"))
    if f"transformers {transformers.__version__}," not in table:
        pytest.skip("the page is of another transformers")
    assert table == module.render(), "run: python docs/generate_families.py"

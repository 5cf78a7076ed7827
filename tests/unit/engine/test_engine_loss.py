"""The loss of a packed, padded batch is the sum of its documents' losses, and so is its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from pantheraml.data.batch import Batch, collate
from pantheraml.data.documents import TokenSequence, as_ints
from pantheraml.engine.step.loss import LossModel
from pantheraml.models.attention import use_document_attention

LENGTHS = [(7, 2, 9), (11,), (3, 3, 3, 8)]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "initializer_range": 0.2,
}


def documents() -> list[list[TokenSequence]]:
    draw = np.random.default_rng(0)

    def document(length: int) -> TokenSequence:
        tokens = draw.integers(1, 64, size=length).tolist()
        return TokenSequence(as_ints(tokens), as_ints([-100, *tokens[1:]]), as_ints([length]))

    return [[document(length) for length in row] for row in LENGTHS]


def pack(parts: list[TokenSequence]) -> TokenSequence:
    fields = ("input_ids", "labels", "document_lengths")
    return TokenSequence(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


def model(family: str, attention: str) -> Any:
    torch.manual_seed(0)
    if family == "gemma2":  # softcapping: the model keeps its own attention, and the loss needs full logits
        return Gemma2ForCausalLM._from_config(Gemma2Config(**SIZES), attn_implementation="eager")
    return MistralForCausalLM._from_config(MistralConfig(**SIZES), attn_implementation=attention)


def loss(loss_model: LossModel, batch: Batch) -> float:
    summed = loss_model(batch.input_ids, batch.position_ids, batch.targets, batch.boundaries, batch.max_length)
    summed.backward()
    return float(summed.detach())


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_packed_loss_is_the_sum_of_document_losses(family: str) -> None:
    rows = documents()
    packed, alone = LossModel(model(family, "sdpa")), LossModel(model(family, "eager"))
    assert (use_document_attention(packed.model) is None) == (family == "mistral")
    found = loss(packed, collate([pack(row) for row in rows], pad_id=0, width=24))
    expected = sum(loss(alone, collate([one], pad_id=0, width=len(one.input_ids))) for row in rows for one in row)
    assert found == pytest.approx(expected, rel=1e-6)
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert float((ours.grad - theirs.grad).norm()) <= 5e-6 * float(theirs.grad.norm()), name

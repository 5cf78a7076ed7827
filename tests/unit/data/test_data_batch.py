from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.data.batch import collate
from pantheraml.data.documents import TokenSequence, as_ints


def sequence(*documents: list[int]) -> TokenSequence:
    tokens = [token for document in documents for token in document]
    labels = [label for document in documents for label in [-100, *document[1:]]]
    return TokenSequence(as_ints(tokens), as_ints(labels), as_ints([len(document) for document in documents]))


def test_targets_are_labels_shifted_left_and_positions_restart() -> None:
    batch = collate([sequence([5, 6, 7], [8, 9]), sequence([3, 4])], pad_id=1, width=6)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 1], [3, 4, 1, 1, 1, 1]]
    assert batch.targets.tolist() == [[6, 7, -100, 9, -100, -100], [4, -100, -100, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 0]]
    assert batch.tokens == 7
    assert {tensor.dtype for tensor in (batch.input_ids, batch.targets, batch.position_ids)} == {torch.int64}


def test_boundaries_end_every_document_and_the_padding() -> None:
    batch = collate([sequence([5, 6, 7], [8, 9]), sequence([3, 4])], pad_id=1, width=6)
    assert batch.boundaries is not None
    assert batch.boundaries.dtype == torch.int32
    assert batch.boundaries.tolist() == [0, 3, 5, 6, 8, 11, 12, 12, 12]  # six documents, padded to eight
    assert batch.max_length == 3


def test_padding_has_no_position_beyond_the_longest_document() -> None:
    """A learned position embedding may end there, and some RoPE variants change for the whole batch."""
    batch = collate([sequence([5, 6, 7], [8, 9]), sequence([3, 4])], pad_id=1, width=32)
    assert int(batch.position_ids.max()) == 2
    assert batch.boundaries is not None
    assert torch.equal(batch.boundaries.unique()[:-1].long(), (batch.position_ids.flatten() == 0).nonzero().flatten())


def test_rows_of_a_single_document_have_no_boundaries() -> None:
    batch = collate([sequence([1, 2, 3, 4]), sequence([5, 6, 7, 8])], pad_id=0, width=4)
    assert batch.boundaries is None
    assert batch.max_length == 4
    assert collate([sequence([1, 2, 3, 4]), sequence([5, 6, 7])], pad_id=0, width=4).boundaries is not None


def test_width_is_the_longest_sequence_rounded_up_to_eight() -> None:
    assert collate([sequence([1] * 9), sequence([1] * 3)], pad_id=0, width=None).input_ids.shape == (2, 16)
    assert collate([sequence([1] * 8)], pad_id=0, width=None).input_ids.shape == (1, 8)


def test_a_full_sequence_has_no_padding() -> None:
    batch = collate([sequence([1, 2], [3, 4])], pad_id=0, width=4)
    assert batch.position_ids.tolist() == [[0, 1, 0, 1]]


def test_a_sequence_that_does_not_fit_is_rejected() -> None:
    with pytest.raises(ValueError, match="9 tokens"):
        collate([sequence([1] * 9)], pad_id=0, width=8)


def test_documents_do_not_attend_to_each_other_or_to_padding() -> None:
    """Logits of a packed, padded batch match those of each document alone."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = LlamaForCausalLM(shape).eval()
    documents = [np.random.default_rng(i).integers(2, 32, size=size).tolist() for i, size in enumerate((5, 3, 6))]
    batch = collate([sequence(*documents[:2]), sequence(documents[2])], pad_id=0, width=10)
    with torch.no_grad():
        packed = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
        alone = [model(input_ids=torch.tensor([document])).logits[0] for document in documents]
    torch.testing.assert_close(packed[0, :5], alone[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed[0, 5:8], alone[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed[1, :6], alone[2], rtol=1e-5, atol=1e-6)

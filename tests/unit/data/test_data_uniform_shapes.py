"""Micro-batches padded to one shape keep every row once, with its documents, targets and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pantheraml.data.batch import Batch, collate
from pantheraml.data.documents import NO_LOSS, TokenSequence
from pantheraml.data.uniform_shapes import UniformBatches, make_uniform


def sequence(*lengths: int, start: int = 10) -> TokenSequence:
    documents = np.array(lengths)
    tokens = np.arange(start, start + documents.sum())
    labels = tokens.copy()
    labels[np.cumsum(documents) - documents] = NO_LOSS
    return TokenSequence(tokens, labels, documents)


def batch(*sequences: TokenSequence, width: int | None = None) -> Batch:
    return collate(list(sequences), pad_id=0, width=width)


def documents(ids: torch.Tensor, targets: torch.Tensor, boundaries: torch.Tensor | None) -> list[tuple[list[int], ...]]:
    """Return the tokens and targets of every document that has targets."""
    rows, width = ids.shape
    ends = list(range(0, rows * width + 1, width)) if boundaries is None else boundaries.unique().tolist()
    flat = zip(ids.flatten().tensor_split(ends[1:-1]), targets.flatten().tensor_split(ends[1:-1]), strict=True)
    return [(tokens.tolist(), labels.tolist()) for tokens, labels in flat if (labels != NO_LOSS).any()]


def all_documents(made: UniformBatches) -> list[tuple[list[int], ...]]:
    parts = zip(made.input_ids, made.targets, made.boundaries, strict=True)
    return [document for part in parts for document in documents(*part)]


def check(batches: list[Batch], made: UniformBatches) -> None:
    expected = [document for b in batches for document in documents(b.input_ids, b.targets, b.boundaries)]
    assert [tokens[:2] for tokens, _ in all_documents(made)] == [tokens[:2] for tokens, _ in expected]
    targets = torch.cat([b.targets.flatten() for b in batches])
    assert made.targets[made.targets != NO_LOSS].tolist() == targets[targets != NO_LOSS].tolist()
    assert list(made.target_counts) == [int((part != NO_LOSS).sum()) for part in made.targets]
    for part in range(made.shape[0]):
        ends = made.boundaries[part]
        flat = made.position_ids[part].flatten()
        starts = torch.arange(0, flat.numel(), made.shape[2]) if ends is None else ends.unique()[:-1]
        assert torch.equal((flat == 0).nonzero().flatten(), starts.long())
        assert made.max_lengths[part] == int(flat.max()) + 1


def test_one_shape_for_packed_and_padded_rows() -> None:
    batches = [
        batch(sequence(3, 5), sequence(8), width=8),
        batch(sequence(11), sequence(2, 2), sequence(16), width=16),
    ]
    made = make_uniform(batches)
    assert made.shape == (2, 3, 16)
    check(batches, made)


def test_documents_are_not_split() -> None:
    batches = [batch(sequence(3, 5), sequence(4, 4, start=40), width=8)]
    made = make_uniform(batches, at_least=2)
    assert made.shape == (2, 1, 8)
    assert all_documents(made) == documents(batches[0].input_ids, batches[0].targets, batches[0].boundaries)
    check(batches, made)


def test_padding_has_no_position_beyond_the_longest_document() -> None:
    batches = [batch(sequence(3, 5), width=8), batch(sequence(4), width=32)]
    made = make_uniform(batches, at_least=3)
    check(batches, made)
    assert [int(part.max()) for part in made.position_ids] == [4, 3, 4]


def test_rows_that_are_one_document_have_no_boundaries() -> None:
    made = make_uniform([batch(sequence(8), sequence(8), width=8), batch(sequence(8), width=8)])
    assert made.shape == (2, 2, 8)
    assert made.boundaries == (None, None)


@pytest.mark.parametrize(
    ("rows", "at_least", "multiple_of", "shape"),
    [
        ((4,), 2, 1, (2, 2)),
        ((1,), 4, 1, (4, 1)),
        ((3,), 2, 1, (2, 2)),
        ((2, 2, 2), 2, 2, (4, 2)),
        ((2, 2, 2), 2, 1, (3, 2)),
        ((4, 4, 1), 1, 1, (3, 3)),
        ((1, 1), 1, 1, (2, 1)),
    ],
)
def test_the_number_of_micro_batches(
    rows: tuple[int, ...], at_least: int, multiple_of: int, shape: tuple[int, int]
) -> None:
    batches = [batch(*[sequence(5, start=10 * row + 1) for row in range(count)]) for count in rows]
    made = make_uniform(batches, at_least=at_least, multiple_of=multiple_of)
    assert made.shape[:2] == shape
    check(batches, made)


def test_padding_has_no_targets_and_its_own_boundaries() -> None:
    made = make_uniform([batch(sequence(5))], at_least=3)
    assert made.target_counts == (4, 0, 0)
    assert made.boundaries[0] is not None
    assert torch.equal(made.position_ids[1], torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]))
    assert [ends.tolist() for ends in made.boundaries[1:] if ends is not None] == [[0, 5, 8]] * 2

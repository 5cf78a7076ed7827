"""Batches without their padding: the tokens of all rows as one row of documents.

Preference pairs and sampled completions are of uneven lengths, and TRL's trainers pad them to the longest. Attention
skips padding here, but every matmul computes it. Token scores need hidden states of tokens alone, so the body runs on
those, and the scores go back to their places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pantheraml.kernels.token_scores import TokenScores
from pantheraml.models.async_scalars import host_values
from pantheraml.models.attention import DocumentLayout, uses_document_attention

_ALLOWED = {"input_ids", "attention_mask", "use_cache", "labels", "shift_labels", "num_items_in_batch", "return_dict"}
"""Arguments of a batch that can be unpadded; any other that is set may depend on the shape."""


class Unpadded(NamedTuple):
    inputs: dict[str, Any]
    """Arguments for the body: one row of documents, each token at the position it had."""
    places: Tensor
    """Index of each token among all positions of the batch."""

    def take(self, labels: Tensor) -> Tensor:
        """Return the labels of the tokens, as one row."""
        return labels.flatten().index_select(0, self.places.to(labels.device))[None]

    def put_back(self, scores: TokenScores, shape: torch.Size) -> TokenScores:
        """Return scores in the shape of the batch, 0 at padding."""
        places = self.places.to(scores.log_probs.device)
        return TokenScores(
            *(each.new_zeros(shape.numel()).index_copy(0, places, each.flatten()).view(shape) for each in scores)
        )


def without_padding(model: Any, inputs: dict[str, Any]) -> Unpadded | None:
    """Return the batch without padding; None if it has none, or the model may need it.

    Syncs once if the host has no copy of the mask.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.ndim == mask.ndim == 2):
        return None
    others = any(value is not None for name, value in inputs.items() if name not in _ALLOWED)
    if others or ids.shape != mask.shape or not _runs_documents(model):
        return None
    is_token = host_values(mask).numpy() != 0
    lengths = is_token.sum(axis=1)
    first = is_token.argmax(axis=1)
    gaps = (is_token.shape[1] - is_token[:, ::-1].argmax(axis=1) - first != lengths) & (lengths > 0)
    if is_token.all() or not lengths.any() or gaps.any():
        return None
    places = np.flatnonzero(is_token)
    ends = np.cumsum(lengths[lengths > 0])
    tables = (places, places % is_token.shape[1], np.append(0, ends).astype(np.int32))
    index, columns, boundaries = (torch.from_numpy(table).to(ids.device, non_blocking=True) for table in tables)
    documents = DocumentLayout(boundaries, int(lengths.max()))
    row = {"input_ids": ids.flatten().index_select(0, index)[None], "position_ids": columns[None]}
    return Unpadded({**row, **documents.arguments()}, index)


def _runs_documents(model: Any) -> bool:
    """Return whether the model takes documents with positions of their own, and is a text model."""
    return (
        model.why_not_packed is None
        and uses_document_attention(model)
        and model.config.get_text_config() is model.config
        and hasattr(model.base_model, "rotary_emb")
    )

"""Batches without padding and repeated prompts: the tokens of all rows as one row of documents.

Preference pairs and sampled completions are of uneven lengths, and TRL's trainers pad them to the longest. Attention
skips padding here, but every matmul computes it. Token scores need hidden states of tokens alone, so the body runs on
those, and the scores go back to their places. Prompts that several rows share are computed once (`shared_prefixes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from pantheraml.kernels.token_scores import TokenScores
from pantheraml.models.async_scalars import host_values
from pantheraml.models.attention import shares_prefixes, uses_document_attention
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.dropout import is_random
from pantheraml.models.module_walk_cache import every_module
from pantheraml.models.shared_prefixes import SharedPrefixes, Sharing, find_shared_prefixes

LEAST_SAVED = 0.15
"""Share of the tokens that shared prefixes must save: batches without padding give up CUDA graphs for it."""
_Array = np.ndarray[Any, Any]
_ALLOWED = {"input_ids", "attention_mask", "use_cache", "labels", "shift_labels", "num_items_in_batch", "return_dict"}
"""Arguments of a batch that can be unpadded; any other that is set may depend on the shape."""


class Unpadded(NamedTuple):
    inputs: dict[str, Any]
    """Arguments for the body: one row of documents, each token at the position it had."""
    places: Tensor
    """Index of each token of the rows among all positions of the batch."""
    prefixes: SharedPrefixes | None = None
    """How the rows are made of the tokens that are computed; None: they are the same."""

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens of the rows, as one row."""
        if self.prefixes is None:
            return hidden
        return self.prefixes.to_device(hidden.device).whole_rows(hidden[0])[None]

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
    """Return the batch without padding and repeated prompts; None if it has neither, or the model may need them.

    Syncs if the host has no copy of mask and tokens.
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
    if not lengths.any() or gaps.any():
        return None
    sharing = _sharing(model, ids, first, lengths)
    if (sharing is None and is_token.all()) or _adapters_depend_on_rows(model):
        return None
    return _one_row(ids, is_token, first, lengths, sharing)


def _one_row(ids: Tensor, is_token: _Array, first: _Array, lengths: _Array, sharing: Sharing | None) -> Unpadded:
    width = is_token.shape[1]
    whole = places = np.flatnonzero(is_token)
    filled = np.flatnonzero(lengths)
    computed = lengths[filled]
    if sharing is not None:
        starts = filled * width + first[filled]
        places = np.concatenate([start + kept for start, kept in zip(starts, sharing.kept, strict=True)])
        computed = np.array([len(kept) for kept in sharing.kept])
    tables = (places, places % width, np.append(0, np.cumsum(computed)).astype(np.int32), whole)
    on_host = map(torch.from_numpy, tables)
    index, columns, boundaries, of_rows = (table.to(ids.device, non_blocking=True) for table in on_host)
    prefixes = None if sharing is None else sharing.prefixes.to_device(ids.device)
    documents = DocumentLayout(boundaries, int(computed.max()), prefixes)
    row = {"input_ids": ids.flatten().index_select(0, index)[None], "position_ids": columns[None]}
    return Unpadded({**row, **documents.arguments()}, of_rows, prefixes)


def _sharing(model: Any, ids: Tensor, first: _Array, lengths: _Array) -> Sharing | None:
    """Return the prefixes that rows share; None if computing them once saves too little, or is not the same."""
    if len(lengths) < 2 or not shares_prefixes(model):
        return None
    tokens, filled = host_values(ids).numpy(), np.flatnonzero(lengths)
    rows = [tokens[row, first[row] : first[row] + lengths[row]] for row in filled]
    sharing = find_shared_prefixes(rows, first[filled].tolist())
    if sharing is None or sum(map(len, sharing.kept)) > (1 - LEAST_SAVED) * lengths.sum():
        return None
    return None if model.training and is_random(model) else sharing


def _adapters_depend_on_rows(model: Any) -> bool:
    """Return whether PEFT has given its layers arguments per row: adapter names, or where aLoRA begins."""
    layer = next((module for module in every_module(model) if isinstance(module, BaseTunerLayer)), None)
    return layer is not None and bool(layer._forward_pre_hooks_with_kwargs)


def _runs_documents(model: Any) -> bool:
    """Return whether the model takes documents with positions of their own, and is a text model."""
    return (
        model.why_not_packed is None
        and uses_document_attention(model)
        and model.config.get_text_config() is model.config
        and hasattr(model.base_model, "rotary_emb")
    )

"""Check whether a model computes the same for documents packed into a row as for each separately.

Not every family does. State-space layers and convolutions carry state from one document into the next, some families
number tokens themselves, others ignore documents. So a tiny model of the same architecture (see `tiny_model.py`) is run
as in training, with each way of isolating documents: packed after two different first documents that are longer than
its windows and chunks, padded, and separately. If packed and separate results differ in every mode, packing is
disabled. This needs no weights and no GPU, so it is known before data is prepared.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from peft import PeftModel
from torch import Tensor, nn

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.attention import documents_from_positions, use_document_attention
from pantheraml.models.attention import uses_document_attention as takes_boundaries
from pantheraml.models.document_masks import use_document_masks
from pantheraml.models.rope import varying_rope
from pantheraml.models.tiny_model import VOCABULARY, CannotShrinkError, tiny_model

logger = log.get(__name__)

IsolationMode = Literal["boundaries", "positions", "masks"]
"""How packed documents are isolated: boundaries passed to document attention; masks that transformers builds from
restarting positions; or our own masks."""

_SUPPORT = "packing_support"
"""Attribute of a model that `isolate_documents` has set up."""
_LENGTHS = (21, 26, 19, 6)
_PREFIX, _WIDTH = 11, 56
_TOLERANCE = 2e-3
"""Relative to the norm of a document's outputs, in float32. Over all families of transformers 5.22, a different
summation order leaves 1e-6 (Gemma 3n: 1e-4), and documents that are not isolated 3e-2 or more."""


@dataclass(frozen=True)
class PackingSupport:
    """Which isolation modes are correct for a model."""

    modes: tuple[IsolationMode, ...]
    """Modes in which packed documents match separate ones, fastest first; none: packing is not supported."""
    reason: str | None = None
    """Why packing is not supported."""
    masked: str | None = None
    """Why isolation needs an attention mask."""
    refused: str | None = None
    """Why the model cannot be trained at all, packed or not."""
    within: int | None = None
    """Length of the longest document that may be packed, if `reason` says why longer ones may not; None: any length."""


def check_packing_support(
    config: Any, kind: type | None = None, *, longest: int | None = None, trust_remote_code: bool = False
) -> PackingSupport:
    """Check packing for a model with this transformers config, in rows of at most `longest` tokens.

    `kind` is its class, if known.
    """
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    support = _check_cached(_HashableConfig(key, config), kind, longest, trust_remote_code)
    rope = varying_rope(config) if support.modes else None
    if rope is None or not rope.in_reach(longest):  # the documents of a tiny model do not reach it
        return support
    return replace(support, modes=() if longest else support.modes, reason=rope.reason(), within=rope.length)


class _HashableConfig:
    """Config that is hashed and compared by its content."""

    def __init__(self, key: str, config: Any) -> None:
        self.key, self.config = key, config

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashableConfig) and other.key == self.key


@functools.lru_cache(maxsize=1024)
def _check_cached(
    keyed: _HashableConfig, kind: type | None, longest: int | None, trust_remote_code: bool
) -> PackingSupport:
    try:
        model: Any = tiny_model(keyed.config, kind, longest=longest, trust_remote_code=trust_remote_code)
    except CannotShrinkError as err:
        return PackingSupport((), f"a tiny model of this architecture, to test it on, cannot be built ({err})")
    with torch.no_grad(), _one_thread():
        try:
            return _check_model(model)
        except Exception as err:  # noqa: BLE001 - a family's code may raise anything; the reason is reported
            return PackingSupport(
                (), f"a tiny model of this architecture fails ({type(err).__name__}: {_first_line(err)})"
            )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: for matrices this small, synchronizing threads takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_model(model: Any) -> PackingSupport:
    name, rows = type(model).__name__, _ProbeRows(model)
    if not all(bool(tensor.isfinite().all()) for each in rows.separate.values() for tensor in each):
        return PackingSupport((), "a tiny model of this architecture gives non-finite values")
    if not rows.are_causal(model):
        return PackingSupport((), refused=f"{name} is not causal: a token's output depends on later tokens")
    if not rows.match(model, rows.padded):
        return PackingSupport((), refused=f"{name} computes different values for a padded row with positions from 0")
    correct: list[IsolationMode] = []
    masked = None
    for mode in get_args(IsolationMode):
        if mode == "masks" and correct:  # slower than what works already
            break
        with _isolation_mode(model, mode) as obstacle:
            if obstacle is None and rows.match_all(model):
                correct.append(mode)
            elif mode == "boundaries":
                masked = obstacle or f"{name} computes different values with document boundaries"
    if correct:
        return PackingSupport(tuple(correct), masked=masked)
    return PackingSupport((), f"{name} computes different values for packed documents than for separate ones")


class _ProbeRows:
    """Probe documents, a model's outputs for each separately, and packed and padded rows of them.

    The two first documents differ, and are longer than the windows and chunks of tiny models.
    """

    def __init__(self, model: Any) -> None:
        draw = torch.Generator().manual_seed(0)
        documents = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in _LENGTHS]
        # without positions: the family's own numbering is the reference
        self.separate = {
            id(each): _outputs(model, {"input_ids": each[None]}, [(0, 0, len(each))]) for each in documents
        }
        first, other, self._second, third = documents
        self.packed = [[first, self._second, third], [other, self._second, third]]
        self.padded = [[other], [third]]

    def are_causal(self, model: Any) -> bool:
        prefix = _outputs(model, {"input_ids": self._second[None, :_PREFIX]}, [(0, 0, _PREFIX)])
        return all(
            _near(actual, whole[:_PREFIX])
            for actual, whole in zip(prefix, self.separate[id(self._second)], strict=True)
        )

    def match(self, model: Any, rows: list[list[Tensor]], *, masked: bool = False) -> bool:
        expected = [tensor for row in rows for document in row for tensor in self.separate[id(document)]]
        return all(map(_near, _outputs_in_rows(model, rows, masked=masked), expected))

    def match_all(self, model: Any) -> bool:
        """Check packed rows, padded rows, and rows padded as other trainers do: with a padding mask and no
        positions."""
        try:
            without_mask = self.match(model, self.packed) and self.match(model, self.padded)
            return without_mask and self.match(model, self.padded, masked=True)
        except Exception as err:  # noqa: BLE001 - a family's code may raise anything in a mode it does not support
            logger.debug("%s: %s", type(model).__name__, err)
            return False


def isolate_documents(model: nn.Module, *, longest: int | None = None) -> PackingSupport:
    """Set the model up, in place, with the fastest isolation mode that is correct for it in rows of up to `longest`
    tokens."""
    support = _check_own_config(model, longest)
    if "boundaries" in support.modes:
        masked = use_document_attention(model)
        if masked is not None:
            others = tuple(mode for mode in support.modes if mode != "boundaries")
            support = replace(support, modes=others, masked=masked) if others else PackingSupport((), masked)
    if support.modes[:1] == ("masks",):
        use_document_masks(decoder_of(model))
    vars(_whole(model))[_SUPPORT] = support
    return support


def require_packing_support(model: nn.Module, *, longest: int) -> None:
    """UnsupportedModelError if the model computes different values for packed documents than for separate ones."""
    support = vars(_whole(model)).get(_SUPPORT) or _check_own_config(model, longest)
    if not support.modes:
        raise UnsupportedModelError(
            f"The data is packed, but {support.reason or support.refused}.", fix="Set data.packing=false."
        )


def require_boundaries(model: nn.Module) -> None:
    """UnsupportedModelError if the model was set up to isolate documents with masks."""
    support: PackingSupport | None = vars(_whole(model)).get(_SUPPORT)
    if support is not None and "boundaries" not in support.modes:
        raise UnsupportedModelError(
            f"Context parallelism is not possible: {support.masked or support.reason or 'attention needs a mask'}.",
            fix="Use parallel.context=1, and another kind of parallelism: replicate, shard, tensor or pipeline.",
        )


def _check_own_config(model: nn.Module, longest: int | None) -> PackingSupport:
    whole = _whole(model)
    return check_packing_support(whole.config, type(whole), longest=longest)


def _whole(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def _isolation_mode(model: Any, mode: IsolationMode) -> Iterator[str | None]:
    """Set the model up in this mode while active; yields why that is impossible, or None."""
    before, body = model.config._attn_implementation, decoder_of(model)
    hooks = {module: set(module._forward_pre_hooks) for module in {body, body_of(model)}}
    obstacle = None
    if mode == "boundaries":
        obstacle = use_document_attention(model)
    elif mode == "masks":
        obstacle = None if use_document_masks(body) is not None else "it has layers that take no attention mask"
    try:
        yield obstacle
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        for module, known in hooks.items():
            for hook in set(module._forward_pre_hooks) - known:
                del module._forward_pre_hooks[hook]
                module._forward_pre_hooks_with_kwargs.pop(hook, None)


def _outputs_in_rows(model: Any, rows: Sequence[Sequence[Tensor]], *, masked: bool) -> list[Tensor]:
    """Return the outputs for each document, in rows as in training: positions restart with each document, and within
    padding before they exceed those of documents.

    `masked`: as other trainers do, with a padding mask and no positions.
    """
    ids = torch.zeros(len(rows), _WIDTH, dtype=torch.long)
    positions, mask = torch.empty_like(ids), torch.zeros_like(ids)
    spans = []
    longest = max(len(document) for row in rows for document in row)
    for index, row in enumerate(rows):
        end = 0
        for document in row:
            begin, end = end, end + len(document)
            ids[index, begin:end], positions[index, begin:end] = document, torch.arange(len(document))
            spans.append((index, begin, end))
        positions[index, end:] = torch.arange(_WIDTH - end) % longest
        mask[index, :end] = 1
    if masked:
        return _outputs(model, {"input_ids": ids, "attention_mask": mask}, spans)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if takes_boundaries(model):
        inputs |= documents_from_positions(positions, len(rows)).arguments()
    return _outputs(model, inputs, spans)


def _outputs(model: Any, inputs: dict[str, Any], spans: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Return logits, and hidden states if the model has a separate body, for each span: training uses one or the
    other."""
    tensors = [model(**inputs, use_cache=False).logits]
    if body_of(model) is not model:
        tensors.append(body_of(model)(**inputs, use_cache=False).last_hidden_state)
    return [tensor[row, begin:end] for row, begin, end in spans for tensor in tensors]


def _near(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).norm() <= _TOLERANCE * expected.norm())  # False for NaN


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [""])[0]


def body_of(model: Any) -> Any:
    """Return the module below the output head."""
    whole = _whole(model)
    return getattr(whole, whole.base_model_prefix, whole)


def decoder_of(model: Any) -> Any:
    """Return the module that runs the layers, which may be inside the body."""
    whole = _whole(model)
    decoder = whole.get_decoder()
    inner = getattr(whole, "model", None)
    return inner if decoder is whole and isinstance(inner, nn.Module) else decoder

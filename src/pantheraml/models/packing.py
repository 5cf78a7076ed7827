"""Whether a model computes for documents that are packed into a row what it computes for each alone.

Not every family does. State-space layers and convolutions carry on from one document into the next, some families
number tokens by themselves, others never look for documents. So a tiny model of the same make (see `tiny.py`) is run
as training runs it, in each way that documents can be kept apart: packed after two different first documents that are
longer than its windows and chunks, padded, and alone. Where packed and alone differ in every way, nothing is packed.
That needs no weights and no GPU, and so can be known before data is prepared.
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
from pantheraml.models.tiny import VOCABULARY, CannotShrinkError, tiny_model

logger = log.get(__name__)

Way = Literal["boundaries", "positions", "masks"]
"""How documents are kept apart: document attention is told where they end; transformers makes masks from positions that
restart; or we make the masks."""

_VERDICT = "packed_documents"
"""The attribute of a model that was put into a way."""
_LENGTHS = (21, 26, 19, 6)
_PREFIX, _WIDTH = 11, 56
_TOLERANCE = 2e-3
"""Of the norm of what is computed for a document, in float32. Over all families of transformers 5.22 the same sums in
another order leave 1e-6 (Gemma 3n: 1e-4), and documents that are not apart 3e-2 or more."""


@dataclass(frozen=True)
class Verdict:
    ways: tuple[Way, ...]
    """Those in which packed documents are computed as each alone, the fastest first; none: they may not be packed."""
    reason: str | None = None
    """Why they may not be packed."""
    masked: str | None = None
    """Why attention needs a mask to keep them apart."""
    refused: str | None = None
    """Why the model cannot be trained at all, packed or not."""
    within: int | None = None
    """Tokens of the longest document that may be packed, where `reason` says why longer ones may not; None: of any."""


def judge(
    config: Any, kind: type | None = None, *, longest: int | None = None, trust_remote_code: bool = False
) -> Verdict:
    """What a model with that config (`config.json` as transformers reads it) makes of packed documents, in rows of no
    more than `longest` tokens. `kind` is its class, if that is known."""
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    verdict = _judged(_Keyed(key, config), kind, longest, trust_remote_code)
    rope = varying_rope(config) if verdict.ways else None
    if rope is None or not rope.in_reach(longest):  # a small model's documents do not reach it
        return verdict
    return replace(verdict, ways=() if longest else verdict.ways, reason=rope.reason(), within=rope.length)


class _Keyed:
    """A config that counts as equal to others with the same content."""

    def __init__(self, key: str, config: Any) -> None:
        self.key, self.config = key, config

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and other.key == self.key


@functools.lru_cache(maxsize=1024)
def _judged(keyed: _Keyed, kind: type | None, longest: int | None, trust_remote_code: bool) -> Verdict:
    try:
        model: Any = tiny_model(keyed.config, kind, longest=longest, trust_remote_code=trust_remote_code)
    except CannotShrinkError as err:
        return Verdict((), f"a small model of the same make, to try it on, cannot be built ({err})")
    with torch.no_grad(), _one_thread():
        try:
            return _tried(model)
        except Exception as err:  # noqa: BLE001 - a family's code may raise anything; the reason is told
            return Verdict((), f"a small model of the same make fails ({type(err).__name__}: {_first_line(err)})")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads would take longer to meet than one takes for matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tried(model: Any) -> Verdict:
    name, rows = type(model).__name__, _Rows(model)
    if not all(bool(tensor.isfinite().all()) for each in rows.alone.values() for tensor in each):
        return Verdict((), "a small model of the same make gives no finite numbers")
    if not rows.are_causal(model):
        return Verdict((), refused=f"{name} is not causal: what it computes for a token depends on later ones")
    if not rows.agree(model, rows.padded):
        return Verdict((), refused=f"{name} computes other values for a row that is padded, and numbered from 0")
    right: list[Way] = []
    masked = None
    for way in get_args(Way):
        if way == "masks" and right:  # nobody would take it
            break
        with _set_up(model, way) as obstacle:
            if obstacle is None and rows.agree_throughout(model):
                right.append(way)
            elif way == "boundaries":
                masked = obstacle or f"{name} gives other results with documents' boundaries"
    if right:
        return Verdict(tuple(right), masked=masked)
    return Verdict((), f"{name} computes other values for packed documents than for each alone")


class _Rows:
    """Documents, what a model computes for each alone, and rows of them. Two first documents differ, and are longer
    than the windows and chunks of small models."""

    def __init__(self, model: Any) -> None:
        draw = torch.Generator().manual_seed(0)
        documents = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in _LENGTHS]
        # without positions: the family's own are the measure of ours
        self.alone = {id(each): _computed(model, {"input_ids": each[None]}, [(0, 0, len(each))]) for each in documents}
        first, other, self._second, third = documents
        self.packed = [[first, self._second, third], [other, self._second, third]]
        self.padded = [[other], [third]]

    def are_causal(self, model: Any) -> bool:
        prefix = _computed(model, {"input_ids": self._second[None, :_PREFIX]}, [(0, 0, _PREFIX)])
        return all(
            _near(found, whole[:_PREFIX]) for found, whole in zip(prefix, self.alone[id(self._second)], strict=True)
        )

    def agree(self, model: Any, rows: list[list[Tensor]], *, masked: bool = False) -> bool:
        expected = [tensor for row in rows for document in row for tensor in self.alone[id(document)]]
        return all(map(_near, _in_rows(model, rows, masked=masked), expected))

    def agree_throughout(self, model: Any) -> bool:
        """Packed, padded, and as trainers pad: with a mask of padding, and no positions."""
        try:
            ours = self.agree(model, self.packed) and self.agree(model, self.padded)
            return ours and self.agree(model, self.padded, masked=True)
        except Exception as err:  # noqa: BLE001 - a way that is none for this family's code, which may raise anything
            logger.debug("%s: %s", type(model).__name__, err)
            return False


def keep_documents_apart(model: nn.Module, *, longest: int | None = None) -> Verdict:
    """Put the model into the fastest way that is right for it, in place; what may be packed into its rows, of no more
    than `longest` tokens."""
    verdict = _own_verdict(model, longest)
    if "boundaries" in verdict.ways:
        masked = use_document_attention(model)
        if masked is not None:
            others = tuple(way for way in verdict.ways if way != "boundaries")
            verdict = replace(verdict, ways=others, masked=masked) if others else Verdict((), masked)
    if verdict.ways[:1] == ("masks",):
        use_document_masks(decoder_of(model))
    vars(_whole(model))[_VERDICT] = verdict
    return verdict


def require_right_packing(model: nn.Module, *, longest: int) -> None:
    """UnsupportedModelError if the model does not compute for packed documents what it computes for each alone."""
    verdict = vars(_whole(model)).get(_VERDICT) or _own_verdict(model, longest)
    if not verdict.ways:
        raise UnsupportedModelError(
            f"The data is packed, but {verdict.reason or verdict.refused}.", todo="Set data.packing=false."
        )


def require_boundaries(model: nn.Module) -> None:
    """UnsupportedModelError if the model was put into a way that keeps documents apart by masks."""
    verdict: Verdict | None = vars(_whole(model)).get(_VERDICT)
    if verdict is not None and "boundaries" not in verdict.ways:
        raise UnsupportedModelError(
            f"Context parallelism is not possible: {verdict.masked or verdict.reason or 'attention needs a mask'}.",
            todo="Use parallel.context=1, and another way to divide the work: replicate, shard, tensor or pipeline.",
        )


def _own_verdict(model: nn.Module, longest: int | None) -> Verdict:
    whole = _whole(model)
    return judge(whole.config, type(whole), longest=longest)


def _whole(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def _set_up(model: Any, way: Way) -> Iterator[str | None]:
    """Inside, the model is; else why it cannot be."""
    before, body = model.config._attn_implementation, decoder_of(model)
    hooks = {module: set(module._forward_pre_hooks) for module in {body, body_of(model)}}
    obstacle = None
    if way == "boundaries":
        obstacle = use_document_attention(model)
    elif way == "masks":
        obstacle = None if use_document_masks(body) is not None else "it has layers that take no mask"
    try:
        yield obstacle
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        for module, known in hooks.items():
            for number in set(module._forward_pre_hooks) - known:
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


def _in_rows(model: Any, rows: Sequence[Sequence[Tensor]], *, masked: bool) -> list[Tensor]:
    """What is computed for each document in rows as training lays them out: positions restart with each, and within
    padding before they go beyond those of documents. `masked`: as other trainers do, who tell padding by a mask."""
    ids = torch.zeros(len(rows), _WIDTH, dtype=torch.long)
    positions, kept = torch.empty_like(ids), torch.zeros_like(ids)
    places = []
    longest = max(len(document) for row in rows for document in row)
    for number, row in enumerate(rows):
        end = 0
        for document in row:
            begin, end = end, end + len(document)
            ids[number, begin:end], positions[number, begin:end] = document, torch.arange(len(document))
            places.append((number, begin, end))
        positions[number, end:] = torch.arange(_WIDTH - end) % longest
        kept[number, :end] = 1
    if masked:
        return _computed(model, {"input_ids": ids, "attention_mask": kept}, places)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if takes_boundaries(model):
        inputs |= documents_from_positions(positions, len(rows)).arguments()
    return _computed(model, inputs, places)


def _computed(model: Any, inputs: dict[str, Any], places: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Logits in each of the places, and hidden states if the model has a body apart from its head: training calls one
    or the other."""
    tensors = [model(**inputs, use_cache=False).logits]
    if body_of(model) is not model:
        tensors.append(body_of(model)(**inputs, use_cache=False).last_hidden_state)
    return [tensor[number, begin:end] for number, begin, end in places for tensor in tensors]


def _near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= _TOLERANCE * expected.norm())  # NaN is not


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [""])[0]


def body_of(model: Any) -> Any:
    """What the output head is on."""
    whole = _whole(model)
    return getattr(whole, whole.base_model_prefix, whole)


def decoder_of(model: Any) -> Any:
    """What runs the layers: inside the body, if that is only a frame around it."""
    whole = _whole(model)
    decoder = whole.get_decoder()
    inner = getattr(whole, "model", None)
    return inner if decoder is whole and isinstance(inner, nn.Module) else decoder

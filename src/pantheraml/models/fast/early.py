"""A recorded pass that begins before the model is called.

Between two steps a trainer reads the loss and the norm of the gradients, logs them, takes the next batch, sets the
model's mode, and only then calls the model; and before its first layer is called there is more to do. That takes a host
2 to 3 ms, and the GPU has half a millisecond of work meanwhile (8B LoRA under TRL on an H200). But what the layers will
be given is known as soon as the next batch is: it depends on nothing that is trained. So the pass before is replayed
with that at once. When the model is called with the same tokens, the embedding and the positions are found to be known,
and if adapters are what they were, the pass is under way already; else it begins anew.

Whoever changes adapters through `.data` between taking a batch and calling the model is not noticed. Optimizers, and
callbacks at the end of a step, do so before; where callbacks are called in between, no pass begins early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pantheraml.models.fast.recorded import LayerGraphs
from pantheraml.models.fast.together import Turns

MOST_MISSES = 2
"""In a row, of passes that were begun for nothing: then none is any more."""


class _Given(NamedTuple):
    ids: Tensor
    version: int
    hidden: Tensor
    turns: Turns


class EarlyStart:
    """For the passes of `body` (transformers' module that calls the layers) that `graphs` replays."""

    def __init__(self, body: Any, graphs: LayerGraphs) -> None:
        self._body, self._graphs = weakref.ref(body), graphs
        self._given: _Given | None = None
        self._expected = False
        """Whether the pass that has begun is the one that was."""
        self._misses = 0
        body.register_forward_pre_hook(_Hook(self._body_is_called), with_kwargs=True)
        body.embed_tokens.register_forward_hook(_Hook(self._embedded))
        body.rotary_emb.register_forward_hook(_Hook(self._turned), with_kwargs=True)

    @classmethod
    def of(cls, body: Any, graphs: LayerGraphs) -> EarlyStart | None:
        """None: there is nothing to begin with."""
        parts = (getattr(body, name, None) for name in ("embed_tokens", "rotary_emb"))
        return cls(body, graphs) if all(isinstance(part, torch.nn.Module) for part in parts) else None

    def begin(self, ids: Tensor) -> None:
        """The next pass will probably be over these tokens, [rows, width], each row a document from its first position
        on."""
        body = self._body()
        if self._given is not None:
            self._misses += 1
        elif self._misses < MOST_MISSES:
            self._misses = 0
        self._given, self._expected = None, False
        if body is None or self._misses >= MOST_MISSES or not self._graphs.may_start_early():
            return
        if any(map(_is_changed_by_others, (body.embed_tokens, body.rotary_emb))):
            return
        with torch.no_grad():
            hidden = body.embed_tokens(ids)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            turns = body.rotary_emb(hidden, position_ids=positions)
        if self._graphs.start_early(hidden, turns):
            self._given = _Given(ids, ids._version, hidden, turns)

    def _body_is_called(self, _body: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given, ids = self._given, args[0] if args else named.get("input_ids")
        self._expected = (
            given is not None
            and ids is given.ids
            and ids._version == given.version
            and len(args) <= 1
            and all(named.get(name) is None for name in ("position_ids", "past_key_values", "inputs_embeds"))
        )

    def _embedded(self, _embedding: Any, args: tuple[Any, ...], _found: Tensor) -> Tensor | None:
        given = self._given
        return given.hidden if self._expected and given is not None and args[0] is given.ids else None

    def _turned(self, _rotary: Any, args: tuple[Any, ...], _named: dict[str, Any], _found: Any) -> Turns | None:
        given = self._given
        if not self._expected or given is None or not args or args[0] is not given.hidden:
            return None
        self._expected, self._given = False, None
        return given.turns

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _is_changed_by_others(module: torch.nn.Module) -> bool:
    """Whether what it gives is trained, or somebody else's hooks make something else of it: noise, say."""
    hooked = bool(module._forward_pre_hooks) or any(type(hook) is not _Hook for hook in module._forward_hooks.values())
    return hooked or any(parameter.requires_grad for parameter in module.parameters())


class _Hook:
    """What a module calls. That of a copy does nothing."""

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> Any:
        return None if self._method is None else self._method(*args)

    def __deepcopy__(self, _memo: object) -> _Hook:
        return _Hook(None)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)

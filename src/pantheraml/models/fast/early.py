"""A recorded pass that begins before the model is called.

Between two steps a trainer reads the loss and the norm of the gradients, logs them, takes the next batch, sets the
model's mode, and only then calls the model; and before its first layer is called there is more to do, while the GPU has
little more than the optimizer's step (8B LoRA on an H200: steps under TRL took 2 to 3 ms longer than our own loop's).
But what the layers will be given is known as soon as the next batch is: it depends on nothing that is trained. So the
pass before is replayed with that at once, if need be while the optimizer's step is still to come on the GPU. When the
model is called with the same tokens, the embedding and the positions are found to be known, and if all weights are what
they were, the pass is under way already; else it begins anew.

Whoever changes weights through `.data` between then and the call of the model is not noticed. Optimizers, and callbacks
at the end of a step, do so before; where callbacks are called in between, no pass begins early.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pantheraml.base import log
from pantheraml.models.fast.recorded import LayerGraphs
from pantheraml.models.fast.together import Hook, Turns

logger = log.get(__name__)

MOST_MISSES = 2
"""In a row, of passes that were begun for nothing: then none is any more."""


class _Begun(NamedTuple):
    ids: Tensor
    versions: tuple[int, int]
    """Of the tokens and of the embedding."""


class EarlyStart:
    """For the passes of `body` (transformers' module that calls the layers) that `graphs` replays."""

    def __init__(self, body: Any, graphs: LayerGraphs) -> None:
        # weakly: the layers hold the recordings, and give them up when they get other adapters
        self._graphs, self._body = weakref.ref(graphs), weakref.ref(body)
        self._embedding, self._rotary = weakref.ref(body.embed_tokens), weakref.ref(body.rotary_emb)
        self._begun: _Begun | None = None
        self._expected = False
        """Whether the pass that the body is called for is the one that was begun."""
        self._misses = 0
        self._hook = Hook(self._body_is_called)
        body.register_forward_pre_hook(self._hook, with_kwargs=True)
        body.embed_tokens.register_forward_hook(Hook(self._embedded))
        body.rotary_emb.register_forward_hook(Hook(self._turned), with_kwargs=True)

    @classmethod
    def of(cls, body: Any, graphs: LayerGraphs) -> EarlyStart | None:
        """None: there is nothing to begin with."""
        parts = (getattr(body, name, None) for name in ("embed_tokens", "rotary_emb"))
        return cls(body, graphs) if all(isinstance(part, nn.Module) for part in parts) else None

    def begin(self, ids: Tensor) -> None:
        """The next pass will probably be over these tokens, [rows, width], each row a document from its first position
        on."""
        graphs, body = self._graphs(), self._body()
        if graphs is None or body is None:
            return
        if self._begun is not None and not graphs.early_was_used:
            self._misses += 1
        elif self._misses < MOST_MISSES:
            self._misses = 0
        self._begun, self._expected = None, False
        if self._misses >= MOST_MISSES or not graphs.may_start_early() or not self._is_as_known(body, ids):
            return
        try:
            with torch.no_grad():
                hidden = body.embed_tokens(ids)
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
                turns = body.rotary_emb(hidden, position_ids=positions)
            if graphs.start_early(hidden, turns):
                self._begun = _Begun(ids, self._versions(ids))
        except RuntimeError as err:  # out of memory, say: whoever calls the model will see whether that goes
            self._misses = MOST_MISSES
            logger.warning("passes do not begin before the model is called any more: %s", str(err).splitlines()[0])

    def _is_as_known(self, body: Any, ids: Tensor) -> bool:
        """Whether what the layers are given follows from the tokens alone, as far as can be seen."""
        known = self._embedding(), self._rotary()
        return (
            known == (body.embed_tokens, body.rotary_emb)
            and not any(_is_changed_by_others(part) for part in known if part is not None)
            and self._is_last_before(body)
            and ids.device == body.embed_tokens.weight.device
        )

    def _is_last_before(self, body: Any) -> bool:
        """Nobody can give the body other arguments than were seen here."""
        return "forward" not in vars(body) and next(reversed(body._forward_pre_hooks.values())) is self._hook

    def _versions(self, ids: Tensor) -> tuple[int, int]:
        embedding = self._embedding()
        return ids._version, -1 if embedding is None else embedding.weight._version

    def _body_is_called(self, body: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        begun, ids = self._begun, args[0] if args else named.get("input_ids")
        self._expected = (
            begun is not None
            and ids is begun.ids
            and self._versions(ids) == begun.versions
            and len(args) <= 1
            and all(named.get(name) is None for name in ("position_ids", "past_key_values", "inputs_embeds"))
            and self._is_as_known(body, ids)
        )

    def _early(self) -> tuple[Tensor, Turns] | None:
        """What the pass that the body is called for was begun with."""
        graphs = self._graphs()
        return None if graphs is None or not self._expected else graphs.early_given()

    def _embedded(self, _embedding: Any, args: tuple[Any, ...], found: Tensor) -> Tensor | None:
        early, begun = self._early(), self._begun
        if early is None or begun is None or args[0] is not begun.ids or found.requires_grad:
            return None
        return early[0]

    def _turned(self, _rotary: Any, args: tuple[Any, ...], _named: dict[str, Any], _found: Any) -> Turns | None:
        early = self._early()
        return early[1] if early is not None and args and args[0] is early[0] else None

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _is_changed_by_others(module: nn.Module) -> bool:
    """Whether what it gives is trained, or somebody else makes something else of it: noise, say."""
    hooked = bool(module._forward_pre_hooks) or any(type(hook) is not Hook for hook in module._forward_hooks.values())
    return hooked or "forward" in vars(module) or any(parameter.requires_grad for parameter in module.parameters())

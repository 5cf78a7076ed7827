"""Prelaunch: replay the captured layers for the next batch before the model is called.

Between two steps a trainer reads the loss and the gradient norm, logs them, fetches the next batch and sets the model's
mode, and more runs before the first layer is called, while the GPU has little more than the optimizer step to do (8B
LoRA on an H200: steps under TRL took 2 to 3 ms longer than in our own loop). But the inputs of the layers depend only
on the tokens. So the last captured pass is replayed as soon as the next batch is known, queued behind the optimizer
step if need be. When the model is called with the same tokens, the embedding and the RoPE table are reused, and if all
weights are unchanged the pass is already running; otherwise it starts over.

Hazard: a change of weights through `.data` between the prelaunch and the call of the model goes unnoticed. Optimizers
and end-of-step callbacks make theirs earlier; where callbacks run in between, nothing is prelaunched.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pantheraml.base import log
from pantheraml.models.fast.layer_chain import CopySafeHook, RopeTable
from pantheraml.models.fast.layer_cuda_graphs import LayerGraphs

logger = log.get(__name__)

MAX_MISSES = 2
"""Consecutive unused prelaunches after which prelaunching is disabled."""


class _Launched(NamedTuple):
    ids: Tensor
    versions: tuple[int, int]
    """Versions of the tokens and of the embedding weight."""


class Prelaunch:
    """Prelaunches passes of `body` (transformers' module that calls the layers) that `graphs` replays."""

    def __init__(self, body: Any, graphs: LayerGraphs) -> None:
        # weak: the layers own the graphs, and drop them when they get other adapters
        self._graphs, self._body = weakref.ref(graphs), weakref.ref(body)
        self._embedding, self._rotary = weakref.ref(body.embed_tokens), weakref.ref(body.rotary_emb)
        self._launched: _Launched | None = None
        self._matches = False
        """Whether the current pass of the body is the prelaunched one."""
        self._misses = 0
        self._hook = CopySafeHook(self._on_body_forward)
        body.register_forward_pre_hook(self._hook, with_kwargs=True)
        body.embed_tokens.register_forward_hook(CopySafeHook(self._on_embedding))
        body.rotary_emb.register_forward_hook(CopySafeHook(self._on_rotary), with_kwargs=True)

    @classmethod
    def of(cls, body: Any, graphs: LayerGraphs) -> Prelaunch | None:
        """Return None if `body` has no embedding, or no rotary module with one table for all layers."""
        parts: list[Any] = [getattr(body, name, None) for name in ("embed_tokens", "rotary_emb")]
        if not all(isinstance(part, nn.Module) for part in parts):
            return None
        several_tables = "layer_type" in inspect.signature(parts[1].forward).parameters
        return None if several_tables else cls(body, graphs)

    def begin(self, ids: Tensor) -> None:
        """Prelaunch the next pass, expected to be over these tokens [rows, width].

        Each row is one document, from its first position on.
        """
        graphs, body = self._graphs(), self._body()
        if graphs is None or body is None:
            return
        if self._launched is not None and not graphs.prelaunch_hit:
            self._misses += 1
        elif self._misses < MAX_MISSES:
            self._misses = 0
        self._launched, self._matches = None, False
        if self._misses >= MAX_MISSES or not graphs.can_prelaunch() or not self._depends_on_tokens_only(body, ids):
            return
        try:
            with torch.no_grad():
                hidden = body.embed_tokens(ids)
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
                rope = body.rotary_emb(hidden, position_ids=positions)
            if graphs.prelaunch_replay(hidden, rope):
                self._launched = _Launched(ids, self._versions(ids))
        except RuntimeError as err:  # out of memory, for example: the call of the model will raise if it persists
            self._misses = MAX_MISSES
            logger.warning("prelaunching the next forward is disabled: %s", str(err).splitlines()[0])

    def _depends_on_tokens_only(self, body: Any, ids: Tensor) -> bool:
        """Return whether the layers' inputs follow from the tokens alone, as far as can be seen."""
        parts = self._embedding(), self._rotary()
        return (
            parts == (body.embed_tokens, body.rotary_emb)
            and not any(_is_modified(part) for part in parts if part is not None)
            and self._is_last_pre_hook(body)
            and ids.device == body.embed_tokens.weight.device
        )

    def _is_last_pre_hook(self, body: Any) -> bool:
        """Return whether nothing after our hook can change the arguments of the body."""
        return "forward" not in vars(body) and next(reversed(body._forward_pre_hooks.values())) is self._hook

    def _versions(self, ids: Tensor) -> tuple[int, int]:
        embedding = self._embedding()
        return ids._version, -1 if embedding is None else embedding.weight._version

    def _on_body_forward(self, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        launched, ids = self._launched, args[0] if args else kwargs.get("input_ids")
        self._matches = (
            launched is not None
            and ids is launched.ids
            and self._versions(ids) == launched.versions
            and len(args) <= 1
            and all(kwargs.get(name) is None for name in ("position_ids", "past_key_values", "inputs_embeds"))
            and self._depends_on_tokens_only(body, ids)
        )

    def _inputs(self) -> tuple[Tensor, RopeTable] | None:
        """Return the inputs that the current pass was prelaunched with."""
        graphs = self._graphs()
        return None if graphs is None or not self._matches else graphs.prelaunched_inputs()

    def _on_embedding(self, _embedding: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        inputs, launched = self._inputs(), self._launched
        if inputs is None or launched is None or args[0] is not launched.ids or output.requires_grad:
            return None
        return inputs[0]

    def _on_rotary(
        self, _rotary: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], _output: Any
    ) -> RopeTable | None:
        inputs = self._inputs()
        return inputs[1] if inputs is not None and args and args[0] is inputs[0] else None

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _is_modified(module: nn.Module) -> bool:
    """Return whether the module is trainable, hooked by others (noise, for example) or has a patched forward."""
    hooked = bool(module._forward_pre_hooks) or any(
        type(hook) is not CopySafeHook for hook in module._forward_hooks.values()
    )
    return hooked or "forward" in vars(module) or any(parameter.requires_grad for parameter in module.parameters())

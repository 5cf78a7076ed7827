"""RoPE that changes with the longest document of a forward pass.

Up to a certain length its frequencies are fixed. One document beyond it (`longrope`: other factors; `dynamic`: another
base) changes the angles of all documents in the same forward, so it matters which ones share a row or a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VaryingRope:
    """Length-dependent RoPE of a model."""

    kind: str
    """`rope_type` in config.json."""
    length: int
    """Number of tokens up to which it is fixed."""

    def in_reach(self, longest: int | None) -> bool:
        """Return whether documents of up to `longest` tokens (None: any length) can change it."""
        return longest is None or longest > self.length

    def reason(self) -> str:
        return f"its RoPE ({self.kind}) changes for the whole row with a document of more than {self.length} tokens"


def varying_rope(config: Any) -> VaryingRope | None:
    """Return the length-dependent RoPE of a model with this transformers config; None if it has none."""
    text = config.get_text_config()
    varying = []
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        kind = str(rope.get("rope_type"))
        if kind == "longrope":
            length = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        elif "dynamic" in kind:
            length = text.max_position_embeddings
        else:
            continue
        varying.append(VaryingRope(kind, int(length)))
    return min(varying, key=lambda rope: rope.length, default=None)


def supported_positions(config: Any) -> int | None:
    """Return the longest sequence that a model with this config supports; None: no limit is known.

    Dynamic RoPE has none: it scales with the sequence, from `max_position_embeddings` on.
    """
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    kinds = [str(rope.get("rope_type")) for rope in _ropes(getattr(text, "rope_parameters", None))]
    return None if "dynamic" in kinds else positions


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters, and those of each layer type."""
    if isinstance(parameters, dict):
        yield parameters
        yield from (part for part in parameters.values() if isinstance(part, dict))

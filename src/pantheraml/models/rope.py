"""Rotary embeddings that change with the longest document of a forward pass.

Up to a length they are fixed. With one document beyond it (`longrope`: other factors; `dynamic`: another base), every
document of the same pass is computed with other angles, so it matters what shares a row or a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VaryingRope:
    kind: str
    """As config.json has it."""
    length: int
    """Tokens up to which it is fixed."""

    def in_reach(self, longest: int | None) -> bool:
        """Of documents of up to `longest` tokens; None: of any length."""
        return longest is None or longest > self.length

    def reason(self) -> str:
        return f"its RoPE ({self.kind}) changes for the whole row with a document of more than {self.length} tokens"


def varying_rope(config: Any) -> VaryingRope | None:
    """That of a model with this config; None: it does not change."""
    text = config.get_text_config()
    found = []
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        kind = str(rope.get("rope_type"))
        if kind == "longrope":
            length = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        elif "dynamic" in kind:
            length = text.max_position_embeddings
        else:
            continue
        found.append(VaryingRope(kind, int(length)))
    return min(found, key=lambda rope: rope.length, default=None)


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """The parameters, or those of each kind of layer."""
    if isinstance(parameters, dict):
        yield parameters
        yield from (part for part in parameters.values() if isinstance(part, dict))

"""How the tokens of a batch are divided into documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pantheraml.models.shared_prefixes import SharedPrefixes


@dataclass(frozen=True)
class DocumentLayout:
    """How the tokens of a batch, row by row, are divided into documents. No document crosses rows."""

    boundaries: Tensor | None
    """int32 [n + 1] on the model's device: 0, then the end of each document; repeated ends are empty documents. None:
    every row is one document."""
    max_length: int
    """Length of the longest document, or an upper bound."""
    prefixes: SharedPrefixes | None = None
    """How whole documents are made of these, which are ends of documents. None: they are whole."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for a model that uses document attention."""
        found: dict[str, Any] = {"max_length_q": self.max_length}
        if self.boundaries is not None:
            found["cu_seq_lens_q"] = self.boundaries
        if self.prefixes is not None:
            found["shared_prefixes"] = self.prefixes
        return found

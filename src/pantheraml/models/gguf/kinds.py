"""Kinds of GGUF files: number formats of the weights, by the names that llama.cpp uses."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence

from pantheraml.base.errors import ConfigError, MissingExtraError

GgufKinds = str | Sequence[str] | None
"""One kind, several, or None for the default."""

OWN_KINDS = ("f32", "f16", "bf16", "q8_0")
"""Kinds that this package writes."""
TOOL_KINDS = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "q5_0", "q5_1", "q5_k_s", "q5_k_m",
    "q6_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
"""Kinds that llama.cpp's `llama-quantize` makes from a bf16 file, without further data."""
TOOL = "llama-quantize"
DEFAULT_KIND = "q8_0"
SAVE_MERGED = "Save a merged model, and use llama.cpp's own converter."
"""What to do about a model that is not converted here."""
_ALIASES = {
    "fast_quantized": "q8_0", "quantized": "q4_k_m", "not_quantized": "bf16", "q4_k": "q4_k_m", "q5_k": "q5_k_m",
    "q3_k": "q3_k_m",
}  # fmt: skip


def parse_kinds(requested: GgufKinds) -> list[str]:
    """Return the kinds in order, each once; an error for one that is unknown or cannot be made here."""
    names = [requested or DEFAULT_KIND] if isinstance(requested, str | None) else list(requested)
    kinds = list(dict.fromkeys(_parse(name) for name in names))
    if not kinds:
        raise ConfigError("No GGUF kind is given.", fix=f"Use one of {', '.join((*OWN_KINDS, *TOOL_KINDS))}.")
    missing = [kind for kind in kinds if kind not in OWN_KINDS]
    if missing and shutil.which(TOOL) is None:
        raise MissingExtraError(
            f"The GGUF kind {missing[0]} needs the program {TOOL} of llama.cpp, which is not on the path.",
            fix=f"Install llama.cpp (https://github.com/ggml-org/llama.cpp), or use {DEFAULT_KIND}.",
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            "Writing GGUF needs the package gguf, which is not installed.", fix="pip install 'pantheraml[gguf]'"
        )
    return kinds


def _parse(name: str) -> str:
    kind = str(name).lower()
    kind = _ALIASES.get(kind, kind)
    if kind not in (*OWN_KINDS, *TOOL_KINDS):
        raise ConfigError(f"There is no GGUF kind {name!r}.", fix=f"Use one of {', '.join((*OWN_KINDS, *TOOL_KINDS))}.")
    return kind

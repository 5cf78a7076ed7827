"""Write the table of docs/families.md: packing support of each causal family in the installed transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from pantheraml.models.packing_check import PackingSupport, check_packing_support
from pantheraml.specs.train import DataConfig

PAGE = Path(__file__).with_name("families.md")
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
SEQ_LEN: int = DataConfig.model_fields["seq_len"].default

_HYBRID = ["conv", "conv", "full_attention", "conv"]
LIKE_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2": {"num_hidden_layers": 4, "layer_types": _HYBRID},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": _HYBRID},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    },
    "reformer": {"is_decoder": True},
}
"""Values that published checkpoints set in config.json and the family's defaults lack."""

HOW = {
    "boundaries": "packed",
    "positions": "packed, with a mask",
    "masks": "packed, with a mask of ours",
}


def families() -> Iterator[tuple[str, Any]]:
    """Yield every family's name with its default config, or the exception that building it raised."""
    for name in sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING}):
        changes = dict(LIKE_PUBLISHED.get(name, {}))
        try:
            config = AutoConfig.for_model(name, **changes)
            if getattr(config, "is_decoder", None) is False:  # encoders: check their decoder variant
                config = AutoConfig.for_model(name, **changes, is_decoder=True)
            yield name, config
        except Exception as err:  # noqa: BLE001 - defaults that the family itself rejects
            yield name, err


def verdict_of(config: Any) -> PackingSupport:
    if isinstance(config, Exception):
        line = (str(config).strip().splitlines() or [""])[-1].strip()
        return PackingSupport((), f"its default config cannot be used ({line})")
    return check_packing_support(config, longest=SEQ_LEN)


def row(name: str, verdict: PackingSupport) -> str:
    if verdict.refused is not None:
        result, reason = "refused", verdict.refused
    elif verdict.modes:
        result, reason = HOW[verdict.modes[0]], ""
    else:
        result, reason = "not packed", verdict.reason or ""
    reason = reason.replace("|", "\\|").replace("<", "&lt;")
    return f"| `{name}` | {result} | {reason if len(reason) <= 160 else reason[:157] + '...'} |"


def render() -> str:
    """Render the text between the markers."""
    lines = [
        f"transformers {transformers.__version__}, `data.seq_len={SEQ_LEN}`:",
        "",
        "| family (`model_type`) | documents are | reason |",
        "|---|---|---|",
        *(row(name, verdict_of(config)) for name, config in families()),
    ]
    return "\n".join(lines)


def parts(page: str) -> tuple[str, str, str]:
    """Split a page into the text before, between and after the markers."""
    before, _, rest = page.partition(BEGIN + "\n")
    table, _, after = rest.partition("\n" + END)
    return before, table, after


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{render()}\n{END}{after}", encoding="utf-8")

"""docs/security.md: every bound on the page is the one in the code."""

from __future__ import annotations

from pathlib import Path

from pantheraml.base import private
from pantheraml.data import bounds, render
from pantheraml.planner import processes
from pantheraml.specs import config_file, hf_config
from pantheraml.specs.train import DataConfig

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")


def row(beginning: str) -> str:
    return next(line for line in PAGE.splitlines() if line.startswith(f"| {beginning} |"))


def test_bounds_are_those_of_the_code() -> None:
    limits = {names[0]: f"{limit:,}" for limit, names in hf_config.BOUNDS.items()}
    (seq_len,) = [part.le for part in DataConfig.model_fields["seq_len"].metadata if hasattr(part, "le")]
    stated = {
        "a config file": [
            f"{config_file.MAX_BYTES >> 20} MiB",
            f"{config_file.MAX_NODES:,} values",
            f"{config_file.MAX_DEPTH} levels",
        ],
        "`config.json` of a model": [
            f"{hf_config.MAX_BYTES >> 20} MiB",
            f"{hf_config.MAX_DEPTH} levels",
            f"{limits['num_hidden_layers']} layers",
            f"{limits['num_attention_heads']} heads",
            f"{limits['num_experts']} experts",
            f"width of {limits['hidden_size']}",
            f"{limits['vocab_size']} tokens",
        ],
        "`data.seq_len`": [f"{seq_len:,} tokens"],
        "a row of data": [f"{bounds.ROW_BYTES >> 20} MiB", f"{bounds.NESTING} levels"],
        "decoding a batch of Arrow or Parquet, or rendering a conversation": [f"{bounds.DECODING_ROOM >> 30} GiB"],
        "a chat template": [
            f"{render.TEMPLATE_CHARACTERS:,} characters",
            f"{render.RENDER_SECONDS} s",
            f"{render.RENDERED_BASE:,} + {render.RENDERED_FACTOR} x",
            f"{2 * bounds.ROW_BYTES:,} at most",
        ],
        "processes on CPUs": [f"{processes.CROWD}"],
    }
    for beginning, values in stated.items():
        for value in values:
            assert value in row(beginning), (beginning, value)
    assert f"at\n  most {private.LOCK_SECONDS:.0f} s" in PAGE

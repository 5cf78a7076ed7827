"""docs/security.md: every bound on the page is the one in the code."""

from __future__ import annotations

from pathlib import Path

from pantheraml.base import memory_room, private
from pantheraml.data import bounds, cache, render
from pantheraml.models import adapter_file, stream
from pantheraml.planner import processes
from pantheraml.specs import config_file, hf_config
from pantheraml.specs.train import MAX_RANK, DataConfig

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")


def row(beginning: str) -> str:
    return next(line for line in PAGE.splitlines() if line.startswith(f"| {beginning} |"))


def test_bounds_match_the_code() -> None:
    limits = {what: f"{limit:,}" for what, (limit, _) in hf_config.BOUNDS.items()}
    (seq_len,) = [part.le for part in DataConfig.model_fields["seq_len"].metadata if hasattr(part, "le")]
    stated = {
        "a config file": [
            f"{config_file.MAX_BYTES >> 20} MiB",
            f"{config_file.MAX_NODES:,} values",
            f"{config_file.MAX_DEPTH} levels",
            f"{config_file.MAX_DIGITS} characters",
        ],
        "`config.json` of a model": [
            f"{hf_config.MAX_BYTES >> 20} MiB",
            f"{hf_config.MAX_DEPTH} levels",
            f"{limits['layers']} layers",
            f"{limits['heads']} heads",
            f"{limits['experts']} experts",
            f"width of {limits['width']}",
            f"{limits['tokens']} tokens",
            f"{limits['positions']} positions",
            f"other integer {hf_config.OTHERS:,}",
            f"in a list {hf_config.IN_LISTS:,}",
            f"{memory_room.MAX_GROWTH_BYTES >> 30} GiB of memory",
        ],
        "`adapter_config.json` of an adapter": [
            f"{adapter_file.MAX_CONFIG_BYTES >> 20} MiB",
            f"a rank of {adapter_file.SMALL_RANK} ",
        ],
        "buffers of a model besides its weights (masks, position tables)": [f"{stream.BUFFER_BYTES >> 30} GiB"],
        "an Arrow or Parquet file": [
            f"{bounds.ROWS_BASE:,} + {bounds.ROWS_PER_BYTE} x",
            f"{bounds.DECODED_BASE >> 30} GiB + {bounds.DECODED_FACTOR:,} x",
        ],
        "`data.seq_len`": [f"{seq_len:,} tokens"],
        "`method.rank`": [f"{MAX_RANK:,}"],
        "a row of data": [f"{bounds.MAX_ROW_BYTES >> 20} MiB", f"{bounds.MAX_NESTING} levels"],
        "decoding a batch of Arrow or Parquet, or rendering a conversation": [f"{bounds.MAX_DECODE_BYTES >> 30} GiB"],
        "a chat template": [
            f"{render.TEMPLATE_CHARACTERS:,} characters",
            f"{render.RENDER_SECONDS} s",
            f"{render.RENDERED_BASE:,} + {render.RENDERED_FACTOR} x",
            f"{2 * bounds.MAX_ROW_BYTES:,} at most",
        ],
        "processes on CPUs": [f"{processes.MAX_CPU_PROCESSES}"],
    }
    for beginning, values in stated.items():
        for value in values:
            assert value in row(beginning), (beginning, value)
    assert f"at most {private.LOCK_SECONDS:.0f} s" in " ".join(PAGE.split())
    assert f"at most {cache.LOCK_SECONDS / 3600:.0f} hours" in " ".join(PAGE.split())

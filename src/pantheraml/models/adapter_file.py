"""Read a LoRA adapter's folder, which may come from someone else: what its config asks for is checked against its
weights before layers are made for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from peft import LoraConfig
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pantheraml.base.errors import ModelError
from pantheraml.models.hub import check_links
from pantheraml.models.weight_files import short_error

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 16 << 20
SMALL_RANK = 256
"""A rank up to this is allowed even if no weight in the file has it: others may override it for every layer."""

_MANY = Field(max_length=20_000)
"""PEFT compares each with every module."""
_Names = Annotated[list[str], _MANY]

ADAPTER_ERRORS = (ValueError, TypeError, AttributeError, KeyError, re.error)
"""What PEFT raises while it makes layers for a config that does not fit, or makes no sense."""


class _Values(BaseModel):
    """Types of what PEFT uses without checking."""

    model_config = ConfigDict(extra="ignore", strict=True)

    peft_type: Literal["LORA"]
    r: PositiveInt = 8
    lora_alpha: FiniteFloat | int | None = 8
    lora_dropout: Annotated[float | int, Field(ge=0, le=1)] | None = 0
    target_modules: str | _Names | None = None
    target_parameters: _Names | None = None
    exclude_modules: str | _Names | None = None
    modules_to_save: _Names | None = None
    layers_pattern: str | _Names | None = None
    rank_pattern: Annotated[dict[str, PositiveInt], _MANY] | None = None
    alpha_pattern: Annotated[dict[str, FiniteFloat | int], _MANY] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    base_model_name_or_path: str | None = None
    revision: str | None = None
    layer_replication: None = None
    """It would make new layers of the base; not supported."""


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return config and weights; ModelError if they cannot be used."""
    if not (folder / WEIGHTS).is_file() or not (folder / CONFIG).is_file():
        raise ModelError(f"There is no adapter in {folder}.", fix="Give the folder of a finished run.")
    check_links(folder.resolve())
    values = _read_config(folder / CONFIG)
    try:
        weights = load_file(folder / WEIGHTS)
        _require_ranks(values, weights, folder)
        return LoraConfig.from_pretrained(str(folder)), weights
    except (ValueError, TypeError, KeyError, OSError, SafetensorError) as err:
        raise ModelError(
            f"The adapter in {folder} is corrupted: {short_error(err)}",
            fix="Copy or download the adapter again, or export it from its run again.",
        ) from err


def _read_config(path: Path) -> _Values:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(
            f"{CONFIG} is larger than {MAX_CONFIG_BYTES >> 20} MiB.",
            where=str(path),
            fix="Use the adapter_config.json that PEFT saved: it has a few kilobytes.",
        )
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        return _Values.model_validate(values)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        problem = "only LoRA adapters are supported" if name == "peft_type" else first["msg"]
        raise ModelError(
            f"{CONFIG} of the adapter cannot be used: {f'{name}: ' if name else ''}{problem}.",
            where=str(path),
            fix="Use a LoRA adapter as PEFT saves it.",
        ) from err
    except (OSError, ValueError, RecursionError) as err:
        raise ModelError(
            f"The adapter in {path.parent} is corrupted: its {CONFIG} is not valid JSON.",
            where=str(path),
            fix="Copy or download the adapter again, or export it from its run again.",
        ) from err


def _require_ranks(values: _Values, weights: dict[str, Tensor], folder: Path) -> None:
    """A rank of a few digits in the config can describe terabytes of weights."""
    largest = max(
        (w.shape[0] for name, w in weights.items() if "lora_" in name and "_A" in name and w.dim()), default=0
    )
    rank = max([values.r, *(values.rank_pattern or {}).values()])
    if rank > max(largest, SMALL_RANK):
        raise ModelError(
            f"{CONFIG} of the adapter has rank {rank}, but its largest weight has rank {largest}.",
            where=str(folder),
            fix="Check the source of the adapter.",
        )

"""RoPE scaling: sequences longer than the positions that a model was made for.

Frequencies are changed in the config before the model is built, so that the model's own code computes them. A saved
model has the changed config; an adapter's folder gets a file of its own (`rope.json`), since plain adapters have no
config of their base.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, ModelError, UnsupportedModelError
from pantheraml.base.folders import write_text
from pantheraml.models.rope import supported_positions

logger = log.get(__name__)

FILE = "rope.json"
_BY_FACTOR = ("linear", "llama3", "yarn")
"""Kinds of RoPE whose factor is how much longer sequences may be than in pretraining."""


@dataclass(frozen=True)
class RopeChange:
    """Values of the text config that replace those of config.json."""

    rope_parameters: dict[str, Any]
    max_position_embeddings: int

    def apply(self, config: Any) -> None:
        text = config.get_text_config()
        text.rope_parameters = copy.deepcopy(self.rope_parameters)
        text.max_position_embeddings = self.max_position_embeddings

    def apply_to_built(self, model: nn.Module) -> int:
        """Change a model that was built with the RoPE of its config.json; return how many RoPE modules it has."""
        kind = type(model.config.get_text_config())  # type: ignore[union-attr, operator]
        modules = [m for m in model.modules() if isinstance(getattr(m, "config", None), kind)]
        for config in {id(module.config): module.config for module in modules}.values():
            self.apply(config)
        ropes = [module for module in modules if type(module).__name__.endswith("RotaryEmbedding")]
        for rope in ropes:
            device = next(rope.buffers()).device
            rope.__init__(rope.config)  # type: ignore[misc]
            rope.to(device)
        return len(ropes)

    def write(self, adapter: Path) -> None:
        write_text(adapter / FILE, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, adapter: Path) -> RopeChange | None:
        """Read what was saved next to an adapter; None: its base has the RoPE of its config.json."""
        path = adapter / FILE
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            change = cls(dict(values["rope_parameters"]), int(values["max_position_embeddings"]))
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise ModelError(
                f"{FILE}, the RoPE of the adapter's base, is corrupted.",
                where=str(path),
                fix="Copy the adapter folder again.",
            ) from err
        return change


def plan_rope(
    config: Any,
    max_seq_length: int | None,
    rope_scaling: Mapping[str, Any] | None = None,
    *,
    stored: RopeChange | None = None,
) -> RopeChange | None:
    """Return the change that `max_seq_length` or `rope_scaling` needs, starting from `stored`; None: no change.

    UnsupportedModelError if the model's positions cannot be scaled.
    """
    if max_seq_length is not None and (not isinstance(max_seq_length, int) or max_seq_length < 1):
        raise ConfigError(
            f"max_seq_length={max_seq_length!r} is not a positive integer.",
            fix="Pass the number of tokens of the longest sequence, such as 2048.",
        )
    if stored is not None:
        config = copy.deepcopy(config)
        stored.apply(config)
    text = config.get_text_config()
    positions = supported_positions(config)
    ropes: dict[str, Any] | None = getattr(text, "rope_parameters", None)
    if rope_scaling:
        return _requested(text, ropes, positions, max_seq_length, rope_scaling)
    if max_seq_length is None or positions is None or max_seq_length <= positions:
        return stored
    if not ropes:
        raise UnsupportedModelError(
            f"max_seq_length={max_seq_length} is more than the {positions} positions that the model supports, and it "
            "has no RoPE that could be scaled.",
            fix=f"Use max_seq_length={positions} or less.",
        )
    return RopeChange(_extended(ropes, max_seq_length, positions), max_seq_length)


def _requested(
    text: Any,
    ropes: dict[str, Any] | None,
    positions: int | None,
    max_seq_length: int | None,
    rope_scaling: Mapping[str, Any],
) -> RopeChange:
    if not ropes or positions is None or _nested(ropes):
        raise UnsupportedModelError(
            f"rope_scaling does not apply to a {text.model_type} model: "
            + ("it has a RoPE for each type of layer." if ropes else "it has no RoPE."),
            fix="Remove it.",
        )
    kind = rope_scaling.get("rope_type", rope_scaling.get("type"))
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"rope_scaling={dict(rope_scaling)!r} has no known rope_type.",
            fix=f"Choose from {', '.join(sorted(ROPE_INIT_FUNCTIONS))}.",
        )
    kept = {name: value for name, value in ropes.items() if name in ("rope_theta", "partial_rotary_factor")}
    given = {name: value for name, value in rope_scaling.items() if name != "type"}
    parameters: dict[str, Any] = {**kept, **given, "rope_type": kind}
    changed = copy.deepcopy(text)
    changed.rope_parameters = parameters
    try:
        changed.standardize_rope_params()
        changed.validate_rope()
    except (KeyError, ValueError, TypeError, AttributeError) as err:
        raise ConfigError(
            f"rope_scaling={dict(rope_scaling)!r} is not valid: {err}.",
            fix="Use the keys that transformers documents for this rope_type.",
        ) from err
    length = max(positions, max_seq_length or 0)
    if kind == "dynamic":
        length = positions  # its frequencies depend on how much longer a sequence is
    logger.warning("RoPE is %s as requested by rope_scaling; the model has %d positions", kind, length)
    return RopeChange(dict(changed.rope_parameters), length)


def _nested(ropes: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in ropes.values())


def _extended(ropes: dict[str, Any], length: int, positions: int) -> dict[str, Any]:
    """Return the RoPE parameters for `length` tokens; windowed layers see no distant tokens and keep theirs."""
    if not _nested(ropes):
        return _extended_one(ropes, length, positions)
    full = [name for name, rope in ropes.items() if isinstance(rope, Mapping) and "sliding" not in name]
    return {
        name: _extended_one(rope, length, positions) if name in full else copy.deepcopy(rope)
        for name, rope in ropes.items()
    }


def _extended_one(rope: Mapping[str, Any], length: int, positions: int) -> dict[str, Any]:
    ratio, kind = length / positions, str(rope.get("rope_type", "default"))
    if kind == "default":
        logger.warning(
            "max_seq_length=%d is more than the model's %d positions: RoPE is scaled linearly by a factor of %.4g",
            length, positions, ratio,
        )  # fmt: skip
        return {**rope, "rope_type": "linear", "factor": ratio}
    if kind not in _BY_FACTOR or rope.get("factor") is None:
        raise UnsupportedModelError(
            f"max_seq_length={length} is more than the {positions} positions that the model supports, and its RoPE "
            f"({kind}) cannot be scaled further.",
            fix=f"Use max_seq_length={positions} or less.",
        )
    factor = rope["factor"] * ratio
    logger.warning(
        "max_seq_length=%d is more than the model's %d positions: the factor of its RoPE (%s) is raised from %.4g "
        "to %.4g", length, positions, kind, rope["factor"], factor,
    )  # fmt: skip
    return {**rope, "factor": factor}

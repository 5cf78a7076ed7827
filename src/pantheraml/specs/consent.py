"""Code that comes with a model, and who has said that it may run.

`model.trust_remote_code` runs Python files of a model folder, and `model.allow_pickle` loads weights that can run code.
Who writes a configuration says so there. The `config.yaml` of a run folder may be somebody else's: a command that reads
one asks again, with a flag. The operator of a machine can refuse both, whatever a configuration or a flag says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pantheraml.base import env
from pantheraml.base.errors import ConfigError
from pantheraml.specs.train import ModelConfig

FLAGS = {"trust_remote_code": "--trust-remote-code", "allow_pickle": "--allow-pickle"}
_WHAT = {
    "trust_remote_code": "Python code that comes with the model is run",
    "allow_pickle": "pickled weights are loaded, which can run code",
}


class Consent(BaseModel):
    """What the person at the command line has agreed to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trust_remote_code: bool = False
    allow_pickle: bool = False

    def check(self, model: ModelConfig, *, where: str, flags: Mapping[str, str] = FLAGS) -> None:
        """ConfigError if `model`, as written in a run folder, asks for more. `flags`: how to agree to it."""
        for field, flag in flags.items():
            if getattr(model, field) and not getattr(self, field):
                raise ConfigError(
                    f"The run folder's own model.{field}=true asks that {_WHAT[field]}.",
                    where=where,
                    todo=f"If you know the model {model.path} and trust where the folder comes from, add {flag}.",
                )


def check_config_file(path: Path, model: ModelConfig, overrides: Mapping[tuple[str, ...], Any]) -> None:
    """A configuration that people name is theirs, unless it is the one of a run folder: then as for any of these, with
    `overrides`, which are the command line's, as consent."""
    if not (path.parent / "run.lock").exists():
        return
    given = {field: overrides.get(("model", field)) is True for field in FLAGS}
    Consent(**given).check(model, where=str(path), flags={field: f"--set model.{field}=true" for field in FLAGS})


def refuse_foreign_code(model: ModelConfig) -> None:
    """ConfigError if `model` asks for what the operator of this machine refuses."""
    if not env.foreign_code_refused():
        return
    for field in FLAGS:
        if getattr(model, field):
            raise ConfigError(
                f"model.{field}=true asks that {_WHAT[field]}, which is refused on this machine"
                f" ({env.NO_FOREIGN_CODE}).",
                todo="Use a model that transformers knows, with weights in safetensors.",
            )

"""Consent to run code that comes with a model.

`model.trust_remote_code` runs Python files from a model folder, and `model.allow_pickle` loads weights that can run
code. A user's own configuration is consent. The `config.yaml` of a run folder may come from someone else, so commands
that read one need a flag as well. The operator of a machine can forbid both, whatever a configuration or flag says.
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
    "trust_remote_code": "runs Python code from the model repository",
    "allow_pickle": "loads pickled weights, which can run code",
}


class Consent(BaseModel):
    """Consent given on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trust_remote_code: bool = False
    allow_pickle: bool = False

    def check(self, model: ModelConfig, *, where: str, flags: Mapping[str, str] = FLAGS) -> None:
        """ConfigError if `model`, read from a run folder, needs more consent. `flags`: how the user gives it."""
        for field, flag in flags.items():
            if getattr(model, field) and not getattr(self, field):
                raise ConfigError(
                    f"The run folder sets model.{field}=true, which {_WHAT[field]}.",
                    where=where,
                    fix=f"If you trust the model {model.path} and the source of the folder, add {flag}.",
                )


def check_config_file(path: Path, model: ModelConfig, overrides: Mapping[tuple[str, ...], Any]) -> None:
    """Check consent for a configuration file named on the command line. It is the user's own, unless it lies in a run
    folder: then `overrides` from the command line must give the consent."""
    if not (path.parent / "run.lock").exists():
        return
    given = {field: overrides.get(("model", field)) is True for field in FLAGS}
    Consent(**given).check(model, where=str(path), flags={field: f"--set model.{field}=true" for field in FLAGS})


def refuse_foreign_code(model: ModelConfig) -> None:
    """ConfigError if `model` needs what the operator of this machine forbids."""
    if not env.foreign_code_refused():
        return
    for field in FLAGS:
        if getattr(model, field):
            raise ConfigError(
                f"model.{field}=true {_WHAT[field]}. This is not allowed on this machine ({env.NO_FOREIGN_CODE}).",
                fix="Use a model supported by transformers, with safetensors weights.",
            )

"""Record which base an adapter was trained on, and check it before the adapter is applied again.

An adapter fits any base of the same shapes, but gives worse results, or nonsense, on any other than its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from pantheraml.base.errors import ModelError
from pantheraml.base.folders import write_text
from pantheraml.models.loader import model_folder, weights_fingerprint
from pantheraml.specs.paths import is_hub_name
from pantheraml.specs.train import ModelConfig

FILE = "trained_on.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class BaseIdentity:
    """Identity of a base model, without reading all of its weights."""

    fingerprint: str
    """Of config.json and samples of the weights, as in checkpoints."""
    config: str
    """Hash of config.json alone."""
    commit: str | None
    """Commit of the hub repository; None: the base came from a local folder."""

    @classmethod
    def of(cls, model: ModelConfig) -> BaseIdentity:
        folder = model_folder(model)
        config = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16).hexdigest()
        from_snapshot = _from_hub(model) and folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
        commit = folder.name if from_snapshot else None
        return cls(weights_fingerprint(model), config, commit)

    def write(self, adapter: Path) -> None:
        write_text(adapter / FILE, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, adapter: Path) -> BaseIdentity | None:
        """Read the identity saved next to the adapter; None if there is none (adapters of earlier versions)."""
        path = adapter / FILE
        if not path.is_file():
            return None
        try:
            identity = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as err:
            raise ModelError(
                f"{FILE}, which identifies the adapter's base model, is corrupted.",
                where=str(path),
                fix="Copy the adapter folder again; without this file it is used unchecked, with a notice.",
            ) from err
        texts = all(isinstance(value, str) for value in (identity.fingerprint, identity.config, identity.commit or ""))
        if not texts or not (identity.commit is None or _COMMIT.fullmatch(identity.commit)):
            raise ModelError(
                f"{FILE}, which identifies the adapter's base model, is corrupted.",
                where=str(path),
                fix="Copy the adapter folder again; without this file it is used unchecked, with a notice.",
            )
        return identity


def verified_base(model: ModelConfig, adapter: Path) -> tuple[ModelConfig, str | None]:
    """Return the base that the adapter was trained on, and a notice if it cannot be verified.

    A hub model is pinned to the commit used in training. ModelError if `model` is a different base. Adapters of earlier
    versions have no record, so their base is not checked.
    """
    known = BaseIdentity.read(adapter)
    if known is None:
        return model, f"the adapter does not record its base model (it has no {FILE}), so the base is not checked"
    if known.commit is not None and _from_hub(model):
        model = model.model_copy(update={"revision": known.commit})
    actual = BaseIdentity.of(model)
    if actual.fingerprint == known.fingerprint:
        return model, None
    differs = "its weights differ" if actual.config == known.config else "its config.json differs"
    commit = "" if known.commit is None else f" at commit {known.commit}"
    raise ModelError(
        f"The base model is not the one the adapter was trained on: {differs}.",
        where=str(model_folder(model)),
        fix=f"Restore the model that was {model.path}{commit}.",
    )


def _from_hub(model: ModelConfig) -> bool:
    return is_hub_name(model.path) and not Path(model.path).is_dir()

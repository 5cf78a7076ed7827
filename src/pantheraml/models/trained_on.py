"""What an adapter was trained on: written beside it, and checked before it is put onto a base again.

An adapter fits any base of the same shapes, and gives nonsense, or something a little worse, on all but its own.
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
class TrainedOn:
    """A base model, as far as it can be told from others without being read whole."""

    fingerprint: str
    """Of config.json and samples of the weights, as checkpoints have it."""
    config: str
    """Of config.json alone."""
    commit: str | None
    """Of the hub's repository; None: the base came from a folder."""

    @classmethod
    def of(cls, model: ModelConfig) -> TrainedOn:
        folder = model_folder(model)
        config = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16).hexdigest()
        of_hub = _from_hub(model) and folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
        commit = folder.name if of_hub else None
        return cls(weights_fingerprint(model), config, commit)

    def write(self, adapter: Path) -> None:
        write_text(adapter / FILE, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, adapter: Path) -> TrainedOn | None:
        """What lies beside the adapter; None: nothing, it is of an earlier version."""
        path = adapter / FILE
        if not path.is_file():
            return None
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as err:
            raise ModelError(
                f"{FILE}, which says what the adapter was trained on, is damaged.", where=str(path)
            ) from err
        texts = all(isinstance(value, str) for value in (found.fingerprint, found.config, found.commit or ""))
        if not texts or not (found.commit is None or _COMMIT.fullmatch(found.commit)):
            raise ModelError(f"{FILE}, which says what the adapter was trained on, is damaged.", where=str(path))
        return found


def own_base(model: ModelConfig, adapter: Path) -> tuple[ModelConfig, str | None]:
    """The base that the adapter was trained on; ModelError if `model` is another one.

    Of a hub model it is the commit of then, where no other was asked for. Also what people should know: that an adapter
    of an earlier version cannot be checked.
    """
    known = TrainedOn.read(adapter)
    if known is None:
        return model, f"what the adapter was trained on is not known (it has no {FILE}), so its base is not checked"
    if known.commit is not None and _from_hub(model):
        model = model.model_copy(update={"revision": known.commit})
    here = TrainedOn.of(model)
    if here.fingerprint == known.fingerprint:
        return model, None
    differs = "its weights differ" if here.config == known.config else "its config.json differs"
    then = "" if known.commit is None else f", commit {known.commit} of then"
    raise ModelError(
        f"The base model is not the one that the adapter was trained on: {differs}.",
        where=str(model_folder(model)),
        todo=f"Put the model back that was {model.path}{then}.",
    )


def _from_hub(model: ModelConfig) -> bool:
    return is_hub_name(model.path) and not Path(model.path).is_dir()

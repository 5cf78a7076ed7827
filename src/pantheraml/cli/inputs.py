"""Check that model and data of a configuration exist, before anything is planned."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from pantheraml.base.errors import DataError, ModelError
from pantheraml.models.hub import config_folder
from pantheraml.specs.hf_config import read_hf_config
from pantheraml.specs.train import ModelConfig, TrainConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


def check_inputs(config: TrainConfig) -> None:
    """Raise ModelError or DataError if something is missing. The data itself is read by the run."""
    check_model(config)
    check_data(config)


def check_model(config: TrainConfig) -> Path:
    """Return the folder of the model's config.json, downloaded if necessary."""
    folder = config_folder(config.model.path, revision=config.model.revision)
    _check_architecture(config.model, read_hf_config(folder), folder)
    if config.model.tokenizer is not None:
        _check_tokenizer(config.model.tokenizer)
    return folder


def check_data(config: TrainConfig) -> None:
    for key, name in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if name is not None and not Path(name).exists():
            raise DataError(f"There is no data at {name}.", where=key, fix="Check the path.")


def _check_tokenizer(name: str) -> None:
    try:
        folder = config_folder(name)
    except ModelError as err:
        raise ModelError(err.what, where="model.tokenizer", fix=err.fix) from err
    is_local = Path(name).expanduser().is_dir()  # from the hub, only config.json is downloaded at this point
    if is_local and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(
            f"There is no tokenizer in {folder}.",
            where="model.tokenizer",
            fix="Use a folder with a tokenizer.json.",
        )


def _check_architecture(model: ModelConfig, values: dict[str, Any], folder: Path) -> None:
    kind = values.get("model_type")
    if not isinstance(kind, str) or (model.trust_remote_code and "auto_map" in values) or _is_known(kind):
        return
    raise ModelError(
        f"transformers {importlib.metadata.version('transformers')} does not know the model_type {kind!r}.",
        where=str(folder / "config.json"),
        fix="If the model is newer, install a newer transformers; if it comes with its own Python code, review that"
        " code and set model.trust_remote_code=true.",
    )


def _is_known(kind: str) -> bool:
    """Return whether transformers knows that model type. Its tables are read as text, since importing it takes
    seconds."""
    found = importlib.util.find_spec("transformers")
    tables = [Path(place) / "models" / "auto" for place in (found and found.submodule_search_locations) or ()]
    files = [folder / name for folder in tables for name in ("auto_mappings.py", "configuration_auto.py")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return not texts or any(f'"{kind}"' in text for text in texts)

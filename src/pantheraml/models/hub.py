"""From what the user calls a model to a local folder: a path as it is, a hub name as a downloaded snapshot.

Everything behind this point reads local folders only, so there is one place that can meet a network. A snapshot asks
the hub once and without retries (loading file by file would retry for half a minute a file), and takes an earlier
download where the hub cannot be reached.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from pantheraml.base.errors import ModelError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]


def local_folder(name: str, *, revision: str | None = None, more_files: tuple[str, ...] = ()) -> Path:
    """The folder `name` itself, or the snapshot of the hub model of that name (downloaded if it must be).

    `more_files` are patterns to fetch besides safetensors, configs and tokenizers (code, pickled weights).
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelError(f"{name} is a file, not a model folder.", todo="Give the folder that holds config.json.")
    if not is_hub_name(name):
        raise ModelError(f"There is no model folder {name}.", todo="Check the path.")
    return _snapshot(name, revision, [*_FILES, *more_files])


def is_hub_name(name: str) -> bool:
    """`model` or `owner/model`, as the hub spells them."""
    return _HUB_NAME.fullmatch(name) is not None


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as err:
        raise ModelError(
            f"There is no folder {name}, and the hub cannot be reached to look for a model of that name.",
            todo="Check the path, or download the model where there is a network and give its folder.",
        ) from err
    except (RepositoryNotFoundError, GatedRepoError) as err:
        raise ModelError(
            f"There is no folder {name}, and the hub gives out no model of that name.",
            todo="Check the spelling; a private or gated model needs `hf auth login`.",
        ) from err
    # what is left comes from the hub client's HTTP library, which is another one from version to version
    except Exception as err:
        reason = str(err).strip().partition("\n")[0]
        raise ModelError(f"The model {name} cannot be fetched from the hub: {reason}", todo="Try again.") from err

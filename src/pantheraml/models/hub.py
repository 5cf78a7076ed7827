"""From what the user calls a model to a local folder: a path as it is, a hub name as a downloaded snapshot.

Everything behind this point reads local folders only, so there is one place that can meet a network. A snapshot asks
the hub once and without retries (loading file by file would retry for half a minute a file), and takes an earlier
download where the hub cannot be reached.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from pantheraml.base.errors import ModelError, PantheraError
from pantheraml.base.roots import require_allowed
from pantheraml.specs.paths import is_hub_name

_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]


def local_folder(name: str, *, revision: str | None = None, more_files: tuple[str, ...] = ()) -> Path:
    """The folder `name` itself, or the snapshot of the hub model of that name (downloaded if it must be).

    `more_files` are patterns to fetch besides safetensors, configs and tokenizers (code, pickled weights).
    """
    return _given_folder(name) or _snapshot(name, revision, [*_FILES, *more_files])


def config_folder(name: str, *, revision: str | None = None) -> Path:
    """The same folder, of which only `config.json` is sure to be there."""
    return _given_folder(name) or _snapshot(name, revision, ["config.json"])


def _given_folder(name: str) -> Path | None:
    """`name` as a folder on this machine; None if it can only be a hub name."""
    path = Path(name).expanduser()
    if path.is_dir():
        require_allowed(path, key="model.path")
        folder = path.resolve()
        check_links(folder)
        return folder
    if path.exists():
        raise ModelError(f"{name} is a file, not a model folder.", todo="Give the folder that holds config.json.")
    if not is_hub_name(name):
        raise ModelError(f"There is no model folder {name}.", todo="Check the path.")
    return None


def leads_outside(folder: Path, name: str) -> bool:
    """Whether `name` in a model folder is, or links to, something elsewhere. In the hub's cache files are links into
    `blobs`, beside the snapshots; that is inside."""
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    try:
        target = (folder / name).resolve()
    except (OSError, RuntimeError):  # a link to itself
        return True
    return not (target.is_relative_to(folder) or target.is_relative_to(blobs))


def check_links(folder: Path) -> None:
    """A folder that somebody else made may have us read, and train on, what its links lead to."""
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() and leads_outside(folder, name):
            raise ModelError(
                f"In the model folder, {name} is a link that leads out of it.",
                where=str(folder),
                todo="Put the file itself there, or give the folder that it lies in.",
            )


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return _in_cache(name, Path(snapshot_download(name, revision=revision, allow_patterns=patterns)))
    except PantheraError:
        raise
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


def _in_cache(name: str, snapshot: Path) -> Path:
    """`snapshot`, if it is one of the model's in the hub's cache: the name of a revision could lead elsewhere."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if snapshot.resolve().parent != (repository / "snapshots").resolve():
        raise ModelError(
            f"That revision of {name} leads out of the hub's cache.", where=str(snapshot), todo="Check model.revision."
        )
    return snapshot

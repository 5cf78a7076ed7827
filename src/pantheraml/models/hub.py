"""Resolve a model name to a local folder: a path as is, a hub name as a downloaded snapshot.

Everything else reads local folders only, so this is the only module that touches the network. A snapshot contacts the
hub once and without retries (loading file by file would retry for half a minute per file), and falls back to an earlier
download if the hub is unreachable.
"""

from __future__ import annotations

from pathlib import Path

from pantheraml.base.errors import ModelError, PantheraError
from pantheraml.base.roots import require_allowed
from pantheraml.specs.paths import is_hub_name

_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]


def local_folder(name: str, *, revision: str | None = None, more_files: tuple[str, ...] = ()) -> Path:
    """Return the folder `name`, or the snapshot of that hub model, downloaded if necessary.

    `more_files`: patterns to fetch besides safetensors, configs and tokenizers (code, pickled weights).
    """
    return _given_folder(name) or _snapshot(name, revision, [*_FILES, *more_files])


def config_folder(name: str, *, revision: str | None = None) -> Path:
    """Return the same folder, guaranteed to contain only `config.json`."""
    return _given_folder(name) or _snapshot(name, revision, ["config.json"])


def _given_folder(name: str) -> Path | None:
    """Return `name` as a local folder; None if it can only be a hub name."""
    path = Path(name).expanduser()
    if path.is_dir():
        require_allowed(path, key="model.path")
        folder = path.resolve()
        check_links(folder)
        return folder
    if path.exists():
        raise ModelError(f"{name} is a file, not a model folder.", fix="Give the folder that contains config.json.")
    if not is_hub_name(name):
        raise ModelError(f"There is no model folder {name}.", fix="Check the path.")
    return None


def links_outside(folder: Path, name: str) -> bool:
    """Return whether `name` in a model folder resolves to something outside it.

    In the hub cache, files are symlinks into `blobs`, next to the snapshots; that counts as inside.
    """
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    try:
        target = (folder / name).resolve()
    except (OSError, RuntimeError):  # a symlink loop
        return True
    return not (target.is_relative_to(folder) or target.is_relative_to(blobs))


def check_links(folder: Path) -> None:
    """Reject symlinks out of the folder: an untrusted folder could make us read, and train on, other files."""
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() and links_outside(folder, name):
            raise ModelError(
                f"In the model folder, {name} is a symlink that points outside it.",
                where=str(folder),
                fix="Replace the symlink with the file, or give the folder that contains the file.",
            )


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    # only here: its import takes longer than planning a run whose model is in a folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return _in_cache(name, Path(snapshot_download(name, revision=revision, allow_patterns=patterns)))
    except PantheraError:
        raise
    except LocalEntryNotFoundError as err:
        raise ModelError(
            f"There is no folder {name}, and the hub cannot be reached to look up a model of that name.",
            fix="Check the path, or download the model on a host with network access and give its folder.",
        ) from err
    except (RepositoryNotFoundError, GatedRepoError) as err:
        raise ModelError(
            f"There is no folder {name}, and the hub has no accessible model of that name.",
            fix="Check the spelling; a private or gated model needs `hf auth login`.",
        ) from err
    # the rest comes from the hub client's HTTP library, which differs between versions
    except Exception as err:
        reason = str(err).strip().partition("\n")[0]
        raise ModelError(f"The model {name} cannot be downloaded from the hub: {reason}", fix="Try again.") from err


def _in_cache(name: str, snapshot: Path) -> Path:
    """Return `snapshot` if it is one of the model's in the hub cache: the name of a revision could escape it."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if snapshot.resolve().parent != (repository / "snapshots").resolve():
        raise ModelError(
            f"The revision of {name} resolves to a folder outside the hub cache.",
            where=str(snapshot),
            fix="Check model.revision.",
        )
    return snapshot

"""The secret by which the ranks of a run know each other: `PANTHERAML_RUN_TOKEN`, else a file beside the run folder.

All nodes share the folder that the run folder is in. Whoever comes first writes a file there that only the user can
read; it is removed when nobody needs it any more. Where that folder cannot be written, the file is in the user's cache.
The token is never on a command line, which other users can see.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import LaunchError
from pantheraml.base.private import is_own, private_folder

SHORTEST = 16
"""Characters of a token that somebody has chosen."""
_BYTES = 32
WRITTEN_SECONDS = 30.0
"""How long a file that another node has just made may take to appear here with its content."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def token_file(run: Path) -> Path:
    run = run.resolve()
    return run.with_name(f".{run.name}.token")


def _file_in_cache(run: Path) -> Path:
    place = hashlib.blake2b(os.fsencode(run.resolve()), digest_size=16).hexdigest()
    return env.cache_root() / "tokens" / f"{place}.token"


@contextlib.contextmanager
def shared_token(run: Path, *, remove: bool) -> Iterator[str]:
    """`env.run_token` is the same for all ranks of `run`, in this process and those that it starts."""
    own = env.run_token()
    if own is not None:
        if len(own) < SHORTEST:
            raise LaunchError(
                f"PANTHERAML_RUN_TOKEN has {len(own)} characters, which can be guessed.",
                todo=f"Use at least {SHORTEST}, for example those of `openssl rand -hex 32`.",
            )
        yield own
        return
    path = token_file(run)
    try:
        try:
            token = _made(path) or _read(path)
        except OSError as err:
            if err.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            path = _file_in_cache(run)
            private_folder(path.parent)
            token = _made(path) or _read(path)
    except OSError as err:
        raise LaunchError(
            f"The run token cannot be kept beside the run folder: {err.strerror or err}.",
            where=str(path),
            todo="Set PANTHERAML_RUN_TOKEN to the same secret on all nodes.",
        ) from err
    try:
        with env.changed({"PANTHERAML_RUN_TOKEN": token}):
            yield token
    finally:
        if remove:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _made(path: Path) -> str | None:
    """A new token; None: there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(_BYTES)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return None
    try:
        os.write(file, token.encode())
        os.fsync(file)
    finally:
        os.close(file)
    return token


def _read(path: Path) -> str:
    deadline = time.monotonic() + WRITTEN_SECONDS
    while True:
        with contextlib.suppress(FileNotFoundError), open(path, opener=_not_following) as file:
            _require_private(path, os.fstat(file.fileno()))
            token = file.read(2 * _BYTES + 1)
            if len(token) == 2 * _BYTES:
                return token
        if time.monotonic() > deadline:
            raise LaunchError("The file of the run token holds none.", where=str(path), todo="Remove it.")
        time.sleep(0.1)


def _not_following(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _require_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_mode & _OTHERS or not is_own(path.parent, found.st_uid):
        raise LaunchError(
            "The file of the run token is not this user's alone.",
            where=str(path),
            todo="Remove it, and see who may write into that folder; or set PANTHERAML_RUN_TOKEN on all nodes.",
        )

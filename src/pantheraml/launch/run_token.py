"""Run token: the secret shared by the ranks of a run, from `PANTHERAML_RUN_TOKEN` or a file next to the run folder.

All nodes share the parent of the run folder. The first process creates a file there, readable only by the user, which
is removed once every rank has it. If that folder is not writable, the file goes into the user's cache. The token is
never passed on a command line, which other users can see.
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

MIN_LENGTH = 16
"""Fewest characters of a token set by the user."""
_BYTES = 32
WRITTEN_SECONDS = 30.0
"""Time for a file just created by another node to appear here with its content."""
_OTHERS_MODE = stat.S_IRWXG | stat.S_IRWXO


def token_file(run: Path) -> Path:
    run = run.resolve()
    return run.with_name(f".{run.name}.token")


def _file_in_cache(run: Path) -> Path:
    digest = hashlib.blake2b(os.fsencode(run.resolve()), digest_size=16).hexdigest()
    return env.cache_root() / "tokens" / f"{digest}.token"


@contextlib.contextmanager
def shared_token(run: Path, *, remove: bool) -> Iterator[str]:
    """Set `env.run_token` to the token of `run`, in this process and those it starts."""
    given = env.run_token()
    if given is not None:
        if len(given) < MIN_LENGTH:
            raise LaunchError(
                f"PANTHERAML_RUN_TOKEN has only {len(given)} characters and could be guessed.",
                fix=f"Use at least {MIN_LENGTH} characters, such as from `openssl rand -hex 32`.",
            )
        yield given
        return
    path = token_file(run)
    try:
        try:
            token = _create(path) or _read(path)
        except OSError as err:
            if err.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            path = _file_in_cache(run)
            private_folder(path.parent)
            token = _create(path) or _read(path)
    except OSError as err:
        raise LaunchError(
            f"The run token cannot be written next to the run folder: {err.strerror or err}.",
            where=str(path),
            fix="Set PANTHERAML_RUN_TOKEN to the same secret on all nodes.",
        ) from err
    try:
        with env.changed({"PANTHERAML_RUN_TOKEN": token}):
            yield token
    finally:
        if remove:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _create(path: Path) -> str | None:
    """Create the file with a new token; None: it exists."""
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
        with contextlib.suppress(FileNotFoundError), open(path, opener=_open_nofollow) as file:
            _require_private(path, os.fstat(file.fileno()))
            token = file.read(2 * _BYTES + 1)
            if len(token) == 2 * _BYTES:
                return token
        if time.monotonic() > deadline:
            raise LaunchError("The run token file holds no token.", where=str(path), fix="Remove the file.")
        time.sleep(0.1)


def _open_nofollow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _require_private(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode) or info.st_mode & _OTHERS_MODE or not is_own(path.parent, info.st_uid):
        raise LaunchError(
            "The run token file is not private to this user.",
            where=str(path),
            fix="Remove it and check who can write to that folder, or set PANTHERAML_RUN_TOKEN on all nodes.",
        )

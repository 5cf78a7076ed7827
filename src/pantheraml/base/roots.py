"""Folders that an operator confines paths to: `PANTHERAML_ALLOWED_ROOTS`, for a service that runs other people's jobs.

Links are followed before a path is judged: one that lies in a root and leads out of it is outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import ConfigError


def require_allowed(path: str | Path, *, key: str, roots: Sequence[Path] | None = None) -> None:
    """ConfigError unless `path`, the value of `key`, is inside one of the roots (None: the operator's; if there are
    none, every path is)."""
    roots = env.allowed_roots() if roots is None else roots
    if not roots:
        return
    try:
        place = Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as err:  # a link to itself, a home that is not there, a zero byte
        raise ConfigError(f"{key}={str(path)!r} is no path that can be followed.") from err
    if not any(place.is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(
            f"{key}={str(path)!r} is outside the folders that may be used on this machine.",
            todo=f"Use a path inside {', '.join(map(str, roots))} ({env.ALLOWED_ROOTS}).",
        )

"""Path allow-list: `PANTHERAML_ALLOWED_ROOTS`, for a service that runs other users' jobs.

Symlinks are resolved first, so a link inside a root that points outside it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import ConfigError


def require_allowed(path: str | Path, *, key: str, roots: Sequence[Path] | None = None) -> None:
    """ConfigError unless `path`, the value of `key`, is inside one of `roots` (None: those of the environment
    variable). Without roots every path is allowed."""
    roots = env.allowed_roots() if roots is None else roots
    if not roots:
        return
    try:
        resolved = Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as err:  # a symlink loop, an unknown home folder, a null byte
        raise ConfigError(
            f"{key}={str(path)!r} cannot be resolved to a path.",
            fix="Correct the path: it may contain a loop of links or name an unknown user.",
        ) from err
    if not any(resolved.is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(
            f"{key}={str(path)!r} is outside the folders allowed on this machine.",
            fix=f"Use a path inside {', '.join(map(str, roots))} ({env.ALLOWED_ROOTS}).",
        )

"""A patch of one name in another library's module or class: applied once, revertible, for known versions only.

Models are changed by replacing their parts. Only what no part of a model can reach (a function that a trainer calls by
name) is patched here, and only in versions whose code was read.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, MissingExtraError

logger = log.get(__name__)


@dataclass(eq=False)
class LibraryPatch:
    library: str
    versions: str
    """The versions whose code was read, such as ">=1.15,<1.17"."""
    module: str
    name: str
    make: Callable[[Any], Any]
    """Builds the replacement from the original."""
    fallback: str
    """Behavior without the patch, for the log; empty: other versions do not need it, and nothing is logged."""
    required: bool = True
    """Raise if another library has already patched the name; otherwise log it."""
    class_name: str | None = None
    """Class that `name` is a method of; None if `name` belongs to the module."""
    _original: Any = field(default=None, init=False)
    _patched: Any = field(default=None, init=False)

    def apply(self) -> bool:
        """Return whether the patch is in place; not if the library is missing or of another version. Idempotent."""
        if not self.is_supported():
            return False
        target = self._target()
        current = getattr(target, self.name)
        if self._is_reached_from(current):
            return True
        patched_by = self._patched_by(current)
        if patched_by is not None and self.required:
            raise ConfigError(
                f"{self.full_name} was already patched by {patched_by}.",
                fix="Do not import the library that patches it in the same process.",
            )
        if patched_by is not None:
            logger.info("%s was already patched by %s: %s", self.full_name, patched_by, self.fallback)
            return False
        self._original, self._patched = current, self.make(current)
        setattr(target, self.name, self._patched)
        return True

    def is_supported(self) -> bool:
        """Return whether the library is installed, in a version whose code was read; log that it is in another."""
        if importlib.util.find_spec(self.library) is None:
            return False
        version = importlib.metadata.version(self.library)
        if not self._knows(version):
            if self.fallback:
                logger.info("%s %s is not in %s: %s", self.library, version, self.versions, self.fallback)
            return False
        return True

    def require_version(self) -> None:
        """Raise ConfigError unless the installed version is one whose code was read; nothing is imported."""
        if importlib.util.find_spec(self.library) is None:
            raise MissingExtraError(
                f"{self.library} is not installed.", fix=f"pip install '{self.library}{self.versions}'"
            )
        version = importlib.metadata.version(self.library)
        if not self._knows(version):
            raise ConfigError(
                f"{self.library} {version} is not supported here: {self.full_name} is known in {self.versions} only.",
                fix=f"pip install '{self.library}{self.versions}'. Without it, {self.fallback}.",
            )

    def _knows(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)

    def is_in_place(self) -> bool:
        """Return whether the name is this replacement, with nothing around it."""
        return self._patched is not None and getattr(self._target(), self.name) is self._patched

    def revert(self) -> None:
        """Restore the original; no-op if it is in place, or if another library has wrapped the replacement since."""
        if self._patched is None:
            return
        target = self._target()
        current = getattr(target, self.name)
        if current is self._patched:
            setattr(target, self.name, self._original)
        elif self._is_reached_from(current):
            logger.info("the patch of %s stays below what another library has wrapped around it", self.full_name)
            return
        self._original = self._patched = None

    def _is_reached_from(self, current: Any) -> bool:
        """Return whether `current` is the replacement, or wraps it by `functools.wraps`."""
        while current is not None and current is not self._patched:
            current = getattr(current, "__wrapped__", None)
        return current is not None

    def _target(self) -> Any:
        module = importlib.import_module(self.module)
        return module if self.class_name is None else getattr(module, self.class_name)

    @property
    def full_name(self) -> str:
        return ".".join(filter(None, (self.module, self.class_name, self.name)))

    def _patched_by(self, current: Any) -> str | None:
        """Return the module that has replaced the name, or None."""
        owner: str = getattr(current, "__module__", self.module)
        replaced_since = self._patched is not None and current is not self._original
        return owner if replaced_since or owner.partition(".")[0] != self.library else None

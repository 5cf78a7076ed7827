"""The patches of other libraries that are in place, in the order in which they were applied.

Two patches may replace the same name, one around the other. Here either can be reverted first: those around it are
taken off and put back. A patch of a module that is not imported yet waits for its import, so that the order of imports
in a script does not matter, and no library is imported early. Nothing here imports torch.
"""

from __future__ import annotations

import sys

from pantheraml.base import log
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.hooks.on_import import AfterImport

logger = log.get(__name__)


class PatchRegistry:
    def __init__(self) -> None:
        self._applied: list[LibraryPatch] = []
        self._waiting: dict[str, AfterImport] = {}

    @property
    def applied(self) -> tuple[LibraryPatch, ...]:
        return tuple(self._applied)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Full names that are patched as soon as their module is imported."""
        return tuple(self._waiting)

    def apply(self, patch: LibraryPatch) -> bool:
        """Apply `patch` if its library is installed in a known version; return whether it is in place. Idempotent."""
        if patch in self._applied and self._outermost(patch.full_name).is_in_place():
            return True
        in_place = patch.apply()
        if in_place and patch not in self._applied:
            self._applied.append(patch)
        return in_place

    def apply_on_import(self, patch: LibraryPatch) -> None:
        """Apply `patch` now if its module is imported, else as soon as it is. ConfigError if the version is unknown."""
        patch.require_version()
        if patch.module in sys.modules:
            self.apply(patch)
        elif patch.full_name not in self._waiting:
            self._waiting[patch.full_name] = AfterImport(patch.module, lambda: self._arrived(patch))

    def revert(self, patch: LibraryPatch) -> None:
        """Revert `patch`, also from below others of the registry; no-op if it is not in place."""
        waiting = self._waiting.pop(patch.full_name, None)
        if waiting is not None:
            waiting.cancel()
        if patch not in self._applied:
            return
        position = self._applied.index(patch)
        above = [other for other in self._applied[position + 1 :] if other.full_name == patch.full_name]
        for other in reversed(above):
            other.revert()
        patch.revert()
        self._applied.remove(patch)
        for other in above:
            other.apply()

    def _outermost(self, full_name: str) -> LibraryPatch:
        """Return the patch around all others of the same name."""
        return [other for other in self._applied if other.full_name == full_name][-1]

    def _arrived(self, patch: LibraryPatch) -> None:
        self._waiting.pop(patch.full_name, None)
        self.apply(patch)


REGISTRY = PatchRegistry()

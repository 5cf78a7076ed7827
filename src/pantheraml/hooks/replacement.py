"""A replacement of one name in another library's module or class: applied once, revertible, for known versions alone.

Models are changed by replacing parts of the model. Only what no part of a model can reach (a function that a trainer
calls by name) is replaced here, and only in versions whose code was read.
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
from pantheraml.base.errors import ConfigError

logger = log.get(__name__)


@dataclass
class Replacement:
    library: str
    versions: str
    """The versions whose code was read, such as ">=1.15,<1.17"."""
    module: str
    name: str
    make: Callable[[Any], Any]
    """From the original to what stands in its place."""
    otherwise: str
    """What happens without it, for the log."""
    needed: bool = True
    """Whether it is an error that somebody else has replaced the name; if not, the log says so."""
    of_class: str | None = None
    """The class of the module that `name` is a method of; None: `name` is the module's."""
    _original: Any = field(default=None, init=False)
    _ours: Any = field(default=None, init=False)

    def apply(self) -> bool:
        """Whether it stands afterwards; not if the library is missing or of another version. Twice is once."""
        if importlib.util.find_spec(self.library) is None:
            return False
        version = importlib.metadata.version(self.library)
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            logger.info("%s %s is not one of %s: %s", self.library, version, self.versions, self.otherwise)
            return False
        place = self._place()
        present = getattr(place, self.name)
        if self._ours is not None and present is self._ours:
            return True
        taken = self._taken_by(present)
        if taken is not None and self.needed:
            raise ConfigError(
                f"{self._full_name()} was already replaced, by {taken}.",
                todo="Do not load the library that replaces it in the same process.",
            )
        if taken is not None:
            logger.info("%s was already replaced, by %s: %s", self._full_name(), taken, self.otherwise)
            return False
        self._original, self._ours = present, self.make(present)
        setattr(place, self.name, self._ours)
        return True

    def revert(self) -> None:
        """Put the original back; nothing if it stands there already."""
        if self._ours is None:
            return
        place = self._place()
        if getattr(place, self.name) is self._ours:
            setattr(place, self.name, self._original)
        self._original = self._ours = None

    def _place(self) -> Any:
        module = importlib.import_module(self.module)
        return module if self.of_class is None else getattr(module, self.of_class)

    def _full_name(self) -> str:
        return ".".join(filter(None, (self.module, self.of_class, self.name)))

    def _taken_by(self, present: Any) -> str | None:
        """Who has replaced the name; None: nobody."""
        owner: str = getattr(present, "__module__", self.module)
        replaced_since = self._ours is not None and present is not self._original
        return owner if replaced_since or owner.partition(".")[0] != self.library else None

"""Call a function right after a module is imported for the first time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Waits on `sys.meta_path` for one module; removes itself when the module arrives, or by `cancel`."""

    def __init__(self, module: str, then: Callable[[], object]) -> None:
        self._module, self._then = module, then
        self._searching = False
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module or self._searching:
            return None
        self._searching = True  # the search below comes back here
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self)
        return spec

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def arrived(self) -> None:
        self.cancel()
        self._then()


class _CallingLoader(Loader):
    def __init__(self, original: Loader, waiting: AfterImport) -> None:
        self._original, self._waiting = original, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # the module must look as if imported normally: `inspect` asks its loader for the source
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        self._original.exec_module(module)
        self._waiting.arrived()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

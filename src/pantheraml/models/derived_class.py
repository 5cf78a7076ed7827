"""Picklable instances of classes that are created at run time, one per library class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RuntimeSubclass:
    """Mixin for such a class: pickle cannot find it by name, but can call the function that makes it."""

    made_by: tuple[Callable[..., type], tuple[Any, ...]]
    """The factory and its arguments, which return the same class each time."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced = super().__reduce_ex__(max(2, protocol))
        assert isinstance(reduced, tuple)
        return _new, self.made_by, *reduced[2:]


def _new(factory: Callable[..., type], arguments: tuple[Any, ...]) -> Any:
    kind: Any = factory(*arguments)
    return kind.__new__(kind)

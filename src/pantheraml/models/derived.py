"""Classes that are made at run time, one for each class of a library, and whose instances can still be pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Derived:
    """To be mixed in by a function that makes such a class; pickle cannot find it by its name, but can call that."""

    made_by: tuple[Callable[..., type], tuple[Any, ...]]
    """The function and its arguments, which give the same class each time."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        usual = super().__reduce_ex__(max(2, protocol))
        assert isinstance(usual, tuple)
        return _new, self.made_by, *usual[2:]


def _new(maker: Callable[..., type], arguments: tuple[Any, ...]) -> Any:
    kind: Any = maker(*arguments)
    return kind.__new__(kind)

"""The ranks that write one checkpoint together: each does its part, and all learn whether everybody's was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pantheraml.base.errors import StorageError

T = TypeVar("T")


def _nobody_else(mine: Any) -> list[Any]:
    return [mine]


@dataclass(frozen=True)
class Peers:
    rank: int = 0
    exchange: Callable[[Any], list[Any]] = _nobody_else
    """Every rank's object, by rank. It is called in a thread."""
    alone: bool = True
    """This rank writes all there is."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_do(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result of its `action`; if one of them failed for its disk, the same StorageError on all."""
        result: T | None = None
        problem: tuple[str, str | None, str | None] | None = None
        try:
            result = action()
        except StorageError as err:
            problem = (err.what, err.where, err.todo)
        outcomes = self.exchange((result, problem))
        for _, problem in outcomes:
            if problem is not None:
                what, where, todo = problem
                raise StorageError(what, where=where, todo=todo)
        return [result for result, _ in outcomes]


ALONE = Peers()

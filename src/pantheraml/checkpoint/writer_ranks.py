"""The ranks that write one checkpoint together: each writes its shards, and a storage error on one is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pantheraml.base.errors import StorageError

T = TypeVar("T")


def _only_rank(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class WriterRanks:
    rank: int = 0
    exchange: Callable[[Any], list[Any]] = _only_rank
    """All-gather of an object, by rank. Called from the writer thread."""
    single: bool = True
    """Whether this rank writes the whole checkpoint."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def run_all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results; a StorageError on any rank is raised on all of them."""
        result: T | None = None
        problem: tuple[str, str | None, str | None] | None = None
        try:
            result = action()
        except StorageError as err:
            problem = (err.what, err.where, err.fix)
        outcomes = self.exchange((result, problem))
        for _, problem in outcomes:
            if problem is not None:
                what, where, fix = problem
                raise StorageError(what, where=where, fix=fix)
        return [result for result, _ in outcomes]


SINGLE_RANK = WriterRanks()

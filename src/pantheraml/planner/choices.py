"""The planner's decisions and their reasons, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheraml.specs.plan import Choice


class Choices:
    def __init__(self, decided: Mapping[str, str] | None = None) -> None:
        """`decided`: reasons of choices that were made by comparing plans, by their names."""
        self.made: list[Choice] = []
        self._decided = decided or {}

    def configured(self, name: str, value: Any) -> None:
        reason = self._decided.get(name)
        automatic = reason is not None
        self.made.append(Choice(name=name, value=value, reason=reason or "as configured", automatic=automatic))

    def automatic(self, name: str, value: Any, reason: str) -> None:
        self.made.append(Choice(name=name, value=value, reason=self._decided.get(name, reason), automatic=True))

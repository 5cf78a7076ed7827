"""The planner's decisions and their reasons, in order."""

from __future__ import annotations

from typing import Any

from pantheraml.specs.plan import Choice


class Choices:
    def __init__(self) -> None:
        self.made: list[Choice] = []

    def configured(self, name: str, value: Any) -> None:
        self.made.append(Choice(name=name, value=value, reason="as configured", automatic=False))

    def automatic(self, name: str, value: Any, reason: str) -> None:
        self.made.append(Choice(name=name, value=value, reason=reason, automatic=True))

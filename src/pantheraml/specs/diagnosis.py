"""The result of `pantheraml doctor`: one line per check, with a fix wherever something is wrong."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, computed_field

from pantheraml.base.errors import PantheraError, error_classes
from pantheraml.specs.frozen_model import FrozenModel

Status = Literal["ok", "warning", "failed", "skipped"]


class Check(FrozenModel):
    """Result of one check."""

    name: str
    status: Status
    found: str
    fix: str | None = None
    """How to fix it; None if there is nothing to fix."""
    error: str | None = None
    """Class of `base.errors`, for a failed check."""
    values: dict[str, Any] = Field(default_factory=dict)
    """The same for programs: versions, bytes, seconds."""


class Diagnosis(FrozenModel):
    """All checks, in the order in which they ran."""

    version: str
    """Version of PantheraML."""
    checks: tuple[Check, ...]

    def count(self, status: Status) -> int:
        return sum(check.status == status for check in self.checks)

    @computed_field  # type: ignore[prop-decorator]  # pydantic's documented use
    @property
    def exit_code(self) -> int:
        """0, or the code of the first failed check's error class; warnings do not count."""
        failed = next((check.error for check in self.checks if check.status == "failed"), None)
        return 0 if failed is None else error_classes()[failed].exit_code


def ok(name: str, found: str, **values: Any) -> Check:
    return Check(name=name, status="ok", found=found, values=values)


def warning(name: str, found: str, fix: str, **values: Any) -> Check:
    return Check(name=name, status="warning", found=found, fix=fix, values=values)


def skipped(name: str, found: str, fix: str | None = None) -> Check:
    return Check(name=name, status="skipped", found=found, fix=fix)


def failed(name: str, err: PantheraError, **values: Any) -> Check:
    found = err.what if err.where is None else f"{err.what} ({err.where})"
    fix = err.fix or "See the message; `pantheraml doctor --debug` has more."
    return Check(name=name, status="failed", found=found, fix=fix, error=type(err).__name__, values=values)

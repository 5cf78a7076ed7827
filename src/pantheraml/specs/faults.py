"""Failures that a test asks for: which rank meets what kind of misfortune at which step.

A fault is written `RANK:STEP:KIND` in the configuration (`faults: ["1:5:kill"]`) and happens once in the life of a run
folder, so that a run that was started again because of it goes on. None of this works unless `PANTHERAML_FAULTS=1`.

    kill, raise, hang    the process is killed, meets an error nobody foresaw, or gets no further
    slow                 the step takes a second longer
    oom                  a layer's forward pass runs out of memory
    nan                  a layer gives a value that is not a number
    bit_flip             a bit flips in a gradient, as in memory that fails
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast, get_args

from pydantic import Field

from pantheraml.base import env
from pantheraml.base.errors import ConfigError

FaultKind = Literal["kill", "raise", "hang", "slow", "oom", "nan", "bit_flip"]
_PATTERN = rf"^\d+:[1-9]\d*:({'|'.join(get_args(FaultKind))})$"

FaultText = Annotated[str, Field(pattern=_PATTERN)]


@dataclass(frozen=True)
class Fault:
    rank: int
    step: int
    """As events count: the first one is 1."""
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.rank}:{self.step}:{self.kind}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        assert re.match(_PATTERN, text), "the configuration was validated"
        rank, step, kind = text.split(":")
        return cls(int(rank), int(step), cast(FaultKind, kind))


def fail_at(rank: int, step: int, kind: FaultKind) -> str:
    """A fault, as the configuration has it."""
    return str(Fault(rank, step, kind))


def check_allowed(faults: Sequence[str]) -> None:
    """ConfigError if the configuration asks for failures and nobody said that this is a test."""
    if faults and not env.faults_allowed():
        raise ConfigError(
            "The configuration asks for failures (`faults`), which is for tests of PantheraML itself.",
            todo="Remove `faults`; if this is such a test, set the environment variable PANTHERAML_FAULTS=1.",
        )

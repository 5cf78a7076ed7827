"""Fault injection for tests: a failure at a given rank and step.

A fault is written `RANK:STEP:KIND` in the configuration (`faults: ["1:5:kill"]`). It fires once per run folder, so the
restarted run gets past it. Requires `PANTHERAML_FAULTS=1`.

    kill, raise, hang    kill the process, raise an unexpected exception, or block forever
    slow                 add a second to the step
    oom                  run out of memory in a layer's forward
    nan                  write NaN into a layer's output
    bit_flip             flip a bit of a gradient, as faulty memory would
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
    """Step number as in events; the first is 1."""
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.rank}:{self.step}:{self.kind}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        assert re.match(_PATTERN, text), "the configuration was validated"
        rank, step, kind = text.split(":")
        return cls(int(rank), int(step), cast(FaultKind, kind))


def fail_at(rank: int, step: int, kind: FaultKind) -> str:
    """Return a fault in the format of the configuration."""
    return str(Fault(rank, step, kind))


def check_allowed(faults: Sequence[str]) -> None:
    """ConfigError if the configuration has faults but fault injection is not enabled."""
    if faults and not env.faults_allowed():
        raise ConfigError(
            "The configuration injects failures (`faults`), which is for tests of PantheraML itself.",
            fix="Remove `faults`, or set the environment variable PANTHERAML_FAULTS=1 if this is such a test.",
        )

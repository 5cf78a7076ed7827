"""Fault injection for tests: a failure at a given rank and step.

Faults are written `RANK:STEP:KIND` in the environment variable PANTHERAML_FAULTS, separated by commas. They are no part
of a configuration. Each fires once per run folder, so the restarted run gets past it.

    kill, raise, hang    kill the process, raise an unexpected exception, or block forever
    slow                 add a second to the step
    oom                  run out of memory in a layer's forward
    nan                  write NaN into a layer's output
    bit_flip             flip a bit of a gradient, as faulty memory would
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from pantheraml.base import env
from pantheraml.base.errors import ConfigError

FaultKind = Literal["kill", "raise", "hang", "slow", "oom", "nan", "bit_flip"]
_PATTERN = re.compile(rf"\d+:[1-9]\d*:({'|'.join(get_args(FaultKind))})", re.ASCII)


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
        if _PATTERN.fullmatch(text) is None:
            raise ConfigError(
                f"{env.FAULTS} has {text!r}, which is no fault.",
                fix=f"Unset {env.FAULTS}, which is for tests, or write RANK:STEP:KIND, such as 1:5:kill.",
            )
        rank, step, kind = text.split(":")
        return cls(int(rank), int(step), cast(FaultKind, kind))


def fail_at(rank: int, step: int, kind: FaultKind) -> str:
    """Return a fault in the format of the environment variable."""
    return str(Fault(rank, step, kind))


def planned_faults() -> list[Fault]:
    """Return the faults in the environment. ConfigError if one is invalid."""
    return [Fault.parse(text) for text in env.faults()]

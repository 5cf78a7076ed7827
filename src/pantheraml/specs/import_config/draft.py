"""Draft: a config in the making, with the fate of every key of the source.

Each key ends in one of three lists: translated, not needed, not supported. A source key that no converter claims is
reported as unknown by `finish`, so nothing is dropped silently.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pantheraml.base.errors import ConfigError

_SHOWN_CHARACTERS = 60
"""Length at which a value of the source is truncated in comments."""


@dataclass(frozen=True)
class Entry:
    """What became of one key of the source."""

    key: str
    reason: str
    targets: tuple[str, ...] = ()
    """Our keys that it set."""


@dataclass(frozen=True)
class ConvertedSetting:
    """One line of the new config."""

    value: Any
    comment: str
    sources: tuple[str, ...]


@dataclass
class Draft:
    tool: str
    """Name of the other trainer, as its users write it."""
    path: Path
    values: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]
    settings: dict[str, ConvertedSetting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    output_dir: str | None = None
    _known: set[str] = field(default_factory=set)
    _translated: dict[str, Entry] = field(default_factory=dict)
    _unneeded: dict[str, Entry] = field(default_factory=dict)
    _unsupported: dict[str, Entry] = field(default_factory=dict)

    # Reading the source. A key without a value counts as absent.

    def get(self, key: str) -> Any:
        self._known.add(key)
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def first(self, *keys: str) -> str:
        """Return the first of several names of one setting that has a value, or the first name."""
        return next((key for key in [k for k in keys if self.has(k)]), keys[0])

    def number(self, key: str) -> float | None:
        """Read a number; PyYAML reads `2e-5`, without a dot, as a string."""
        value = self.get(key)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.refuse(key, f"takes a number, not {show(value)}")
        return number

    def integer(self, key: str) -> int | None:
        number = self.number(key)
        if number is not None and not number.is_integer():
            self.refuse(key, f"takes a whole number, not {show(self.get(key))}")
        return None if number is None else int(number)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).lower()
        if word not in ("true", "false"):
            self.refuse(key, f"takes true or false, not {show(value)}")
        return word == "true"

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, f"takes text, not {show(value)}")
        return value

    def where(self, key: str) -> str:
        line = self.lines.get(tuple(key.split(".")))
        return f"{self.path}, line {line}" if line else str(self.path)

    def refuse(self, key: str, why: str, fix: str | None = None) -> NoReturn:
        raise ConfigError(f"`{key}` {why}.", where=self.where(key), fix=fix or f"Correct it as {self.tool} expects it.")

    # Deciding the fate of a key. Keys that the source does not have are ignored; the first decision stands.

    def _is_open(self, key: str) -> bool:
        self._known.add(key)
        decided = key in self._translated or key in self._unneeded or key in self._unsupported
        return key in self.values and not decided

    def put(self, target: str, value: Any, *sources: str, comment: str = "", reason: str = "") -> None:
        """Set our key; `comment` replaces `source: value`, `reason` is added to it."""
        present = [key for key in sources if self.has(key)]
        from_source = ", ".join(f"{key}: {show(self.get(key))}" for key in present)
        said = comment or from_source or f"default of {self.tool}"
        self.settings[target] = ConvertedSetting(value, f"{said} ({reason})" if reason else said, tuple(present))
        for key in present:
            before = self._translated.get(key)
            targets = (*(before.targets if before else ()), target)
            self._translated[key] = Entry(key, reason or (before.reason if before else ""), targets)

    def as_flag(self, key: str, option: str) -> None:
        """Record a key that becomes an option of the command line."""
        if self.has(key):
            self._translated[key] = Entry(key, "", (option,))

    def part_of(self, key: str, target: str, reason: str = "") -> None:
        """Record a key that is contained in what another one has set."""
        if self.has(key):
            self._translated.setdefault(key, Entry(key, reason, (target,)))

    def unneeded(self, key: str, reason: str) -> None:
        if self._is_open(key):
            self._unneeded[key] = Entry(key, "no value" if self.values[key] is None else reason)

    def unsupported(self, key: str, reason: str) -> None:
        """Report a key that is not translated; one without a value is not needed."""
        if not self._is_open(key):
            return
        if self.values[key] is None:
            self.unneeded(key, "no value")
        else:
            self._unsupported[key] = Entry(key, reason)

    def unsupported_if_on(self, key: str, reason: str) -> None:
        """Report a feature that is not translated, unless the source turns it off."""
        if self.get(key) in (None, False, 0, "", "none", "None", [], {}):
            self.unneeded(key, "off")
        else:
            self.unsupported(key, reason)

    def unsupported_part(self, name: str, reason: str) -> None:
        """Report a part of a key, such as `datasets.0.split`."""
        self._unsupported[name] = Entry(name, reason)

    def unneeded_part(self, name: str, reason: str) -> None:
        self._unneeded[name] = Entry(name, reason)

    def table(self, keys: Mapping[str, str], report: Callable[[str, str], None]) -> None:
        """Report each word of the dict's values with the reason that is its key."""
        for reason, names in keys.items():
            for key in names.split():
                report(key, reason)

    def finish(self) -> None:
        for key in self.values:
            known = key in self._known
            if known and self.values[key] is None:
                self.unneeded(key, "no value")
            elif self._is_open(key):
                combined = "has no counterpart together with the other settings"
                self._unsupported[key] = Entry(key, combined if known else self._unknown(key))

    def _unknown(self, key: str) -> str:
        near = difflib.get_close_matches(key, sorted(self._known - {key}), n=2, cutoff=0.75)
        hint = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        return f"unknown to import-config as a key of {self.tool}{hint}"

    # The three lists, in the order of the source.

    @property
    def translated(self) -> list[Entry]:
        return self._in_order(self._translated.values())

    @property
    def not_needed(self) -> list[Entry]:
        return self._in_order(self._unneeded.values())

    @property
    def not_supported(self) -> list[Entry]:
        return self._in_order(self._unsupported.values())

    def _in_order(self, entries: Iterable[Entry]) -> list[Entry]:
        position = {key: index for index, key in enumerate(self.values)}
        return sorted(entries, key=lambda entry: position.get(entry.key.partition(".")[0], len(position)))


def show(value: Any) -> str:
    """Return a value of the source on one line, shortened."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True)
    text = " ".join(text.removesuffix("...\n").split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def as_number(value: float) -> int | float:
    """Return 3.0 as 3."""
    return int(value) if float(value).is_integer() else value

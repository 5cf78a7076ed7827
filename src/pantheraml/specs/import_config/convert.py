"""A config file of another trainer in, a Conversion out."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pantheraml.base.errors import ConfigError
from pantheraml.base.text import printable
from pantheraml.specs.config_file import field_names, read_yaml, validate
from pantheraml.specs.import_config import axolotl, llama_factory
from pantheraml.specs.import_config.detect import SOURCES, detect
from pantheraml.specs.import_config.draft import Draft, Entry
from pantheraml.specs.train import TrainConfig

_TRANSLATE = {"axolotl": axolotl.translate, "llama-factory": llama_factory.translate}


@dataclass(frozen=True)
class Conversion:
    source: str
    text: str
    """The config file, with a comment on the origin of every line."""
    config: TrainConfig
    output_dir: str | None
    translated: list[Entry]
    not_needed: list[Entry]
    not_supported: list[Entry]
    notes: list[str]

    def command(self, config_file: str) -> str:
        output = f" --output {shlex.quote(self.output_dir)}" if self.output_dir else ""
        return f"pantheraml train {shlex.quote(config_file)}{output}"

    def to_dict(self) -> dict[str, Any]:
        lists = {name: [asdict(entry) for entry in getattr(self, name)]
                 for name in ("translated", "not_needed", "not_supported")}  # fmt: skip
        return {
            "source": self.source,
            "config": yaml.safe_load(self.text),
            "output_dir": self.output_dir,
            **lists,
            "notes": self.notes,
        }


def convert_file(path: Path, source: str = "auto") -> Conversion:
    """Convert `path`; `source` is a key of SOURCES or auto."""
    try:
        values, lines = read_yaml(path)
    except ValueError as err:  # a date that no calendar has
        raise ConfigError(
            f"The config file is not valid YAML: {err}.", where=str(path), fix="Correct the date, or put it in quotes."
        ) from err
    values = {str(key): value for key, value in values.items()}
    source = detect(values, path) if source == "auto" else source
    if source not in SOURCES:
        raise ConfigError(f"{source!r} is not a known source.", fix=f"Choose from {', '.join(SOURCES)}, auto.")
    draft = Draft(SOURCES[source], path, values, lines)
    _TRANSLATE[source](draft)
    draft.finish()
    text = write(draft)
    places = {
        tuple(key.split(".")): f"from {', '.join(setting.sources)}; {draft.where(setting.sources[0])}"
        for key, setting in draft.settings.items()
        if setting.sources
    }
    config = validate(yaml.safe_load(text), places, whole=str(path))
    return Conversion(
        source=source,
        text=text,
        config=config,
        output_dir=draft.output_dir,
        translated=draft.translated,
        not_needed=draft.not_needed,
        not_supported=draft.not_supported,
        notes=draft.notes,
    )


def write(draft: Draft) -> str:
    """Return the config as YAML, in the order of our own keys, each line with its origin."""
    lines = [f"# Made by `pantheraml import-config` from {_comment(draft.path.name)} ({draft.tool})."]
    for section, owner in (field_names(TrainConfig) or {}).items():
        keys = [f"{section}.{name}" for name in field_names(owner) or {}]
        present = [key for key in keys if key in draft.settings]
        if present:
            lines += ["", f"{section}:"]
        for key in present:
            setting = draft.settings[key]
            lines.append(f"  {key.partition('.')[2]}: {_scalar(setting.value)}  # {_comment(setting.comment)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> str:
    return " ".join(printable(text).split())

"""Writes docs/configuration.md from the configuration's own types and descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pantheraml.specs.config_file import json_schema
from pantheraml.specs.legacy_aliases import KEYS

PAGE = Path(__file__).with_name("configuration.md")
INTRODUCTION = """# Configuration

Made by `python docs/generate_configuration.py`; do not edit. The same names serve YAML, Python
(`TrainConfig.model_validate`), and the command line (`--set section.key=value`).
"""


MOST_USED = (
    "model.path",
    "data.path",
    "data.seq_len",
    "method.kind",
    "method.rank",
    "train.max_steps",
    "train.global_batch_size",
    "train.learning_rate",
    "train.activation_checkpointing",
    "checkpoint.every_steps",
)
"""Keys that people set in most runs; the defaults of the others rarely need a change."""


def kind(field: dict[str, Any]) -> str:
    """A field's type in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(kind(option) for option in field["anyOf"]))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {kind(field['items'])}"
    return {"null": "none", "boolean": "`true`, `false`"}.get(field["type"], field["type"])


def resolved(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in field:
        return field
    return {**schema["$defs"][field["$ref"].rpartition("/")[2]], **{k: v for k, v in field.items() if k != "$ref"}}


def default(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    value = field.get("default")
    return "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def rows(schema: dict[str, Any], fields: dict[str, Any], required: list[str]) -> list[str]:
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        field = resolved(schema, field)
        cells = [f"`{name}`", kind(field), default(field, name in required), field["description"].replace("\n", " ")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def most_used(schema: dict[str, Any]) -> str:
    """A table of the keys that most runs set, with links to their sections."""
    lines = ["## The ten keys that most runs set", "", "| key | default | meaning |", "|---|---|---|"]
    for key in MOST_USED:
        section, name = key.split(".")
        owner = resolved(schema, schema["properties"][section])
        field = resolved(schema, owner["properties"][name])
        first = field["description"].replace("\n", " ").partition(". ")[0].rstrip(".")
        lines.append(f"| [`{key}`](#{section}) | {default(field, name in owner.get('required', []))} | {first}. |")
    return "\n".join([*lines, ""])


def deprecated() -> str:
    """A table of the deprecated names."""
    lines = ["## Deprecated names", "", "These still work, with a warning.", "", "| name | use |", "|---|---|"]
    lines += [f"| `{name}` | {use if ' ' in use else f'`{use}`'} |" for name, use in KEYS.items()]
    return "\n".join([*lines, ""])


def render() -> str:
    schema = json_schema()
    parts = [INTRODUCTION, most_used(schema), "## All keys\n"]
    plain = {}
    for section, field in schema["properties"].items():
        full = resolved(schema, field)
        if "properties" in full:
            parts.append(
                "\n".join([f"## {section}", "", *rows(schema, full["properties"], full.get("required", []))]) + "\n"
            )
        else:
            plain[section] = field
    parts.insert(3, "\n".join(rows(schema, plain, [])) + "\n")
    return "\n".join([*parts, deprecated()])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

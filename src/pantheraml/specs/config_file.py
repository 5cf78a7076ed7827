"""Load a TrainConfig from YAML and `section.field=value` overrides; errors name the key, value and line."""

from __future__ import annotations

import copy
import difflib
import itertools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pantheraml.base.errors import ConfigError
from pantheraml.specs.consent import refuse_foreign_code
from pantheraml.specs.legacy_aliases import FIELD_ALIASES, KEYS
from pantheraml.specs.paths import check_roots
from pantheraml.specs.train import TrainConfig

Key = tuple[str, ...]

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
"""Limit on the values of a file with aliases expanded: a few lines of nested aliases can expand to gigabytes."""
MAX_DEPTH = 32
MAX_DIGITS = 100
"""Limit on the characters of a number: YAML reads 1:1:1 as base 60, in quadratic time."""
_VALUE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Raised by PyYAML for invalid values, such as the date 2001-99-99."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SHOWN_CHARACTERS = 80
"""Length at which an invalid value is truncated in error messages."""


def load_config(path: Path | None, overrides: Mapping[Key, Any] | None = None) -> TrainConfig:
    """Load and validate the YAML file (if any) with `overrides` applied on top."""
    values, lines = ({}, {}) if path is None else read_yaml(path)
    sources: dict[Key, str] = {key: f"{path}, line {line}" for key, line in lines.items()}
    for key, value in (overrides or {}).items():
        put_value(values, key, value)
        sources[key] = "command line"
    return validate(values, sources, whole=str(path) if path else "command line")


def with_overrides(values: dict[str, Any], overrides: Mapping[Key, Any], *, whole: str) -> TrainConfig:
    """Validate the values of a stored configuration with `overrides` applied on top."""
    changed = copy.deepcopy(values)
    for key, value in overrides.items():
        put_value(changed, key, value)
    return validate(changed, dict.fromkeys(overrides, "command line"), whole=whole)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    """Return the file's values, and the line number of each key."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _over_limit(f"is larger than {MAX_BYTES >> 20} MiB", str(path))
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as err:
        raise ConfigError(f"There is no config file {path}.", fix="Check the path.") from err
    except (UnicodeDecodeError, OSError) as err:
        raise ConfigError(f"The config file {path} cannot be read: {err}.", fix="Save it as UTF-8 text.") from err
    try:
        node = _compose(text, str(path))
        values = yaml.safe_load(text)
    except _VALUE_ERRORS as err:
        raise ConfigError(
            f"The config file contains an invalid value: {err}.", where=str(path), fix="Put it in quotes."
        ) from err
    except yaml.YAMLError as err:
        if not isinstance(err, yaml.MarkedYAMLError):
            raise ConfigError(
                f"The config file is not valid YAML: {err}.",
                where=str(path),
                fix="Correct it, or start from the example in docs/quickstart.md.",
            ) from err
        line = err.problem_mark.line + 1 if err.problem_mark else None
        raise ConfigError(
            f"The config file is not valid YAML: {err.problem}.",
            where=f"{path}, line {line}",
            fix="Correct that line.",
        ) from err
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"The config file {path} contains no settings.", fix="See `pantheraml schema`.")
    lines: dict[Key, int] = {}
    _collect_lines(node, (), lines, path)
    return values, lines


def _compose(text: str, where: str) -> yaml.Node | None:
    """Parse YAML into nodes and check the limits on size and depth."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as err:
        raise _over_limit(f"is nested more than {MAX_DEPTH} levels deep", where) from err
    if node is not None and _size(node, {}, 0, where) > MAX_NODES:
        raise _over_limit(f"contains more than {MAX_NODES:,} values", where)
    return node


def _size(node: yaml.Node, known: dict[int, int], depth: int, where: str) -> int:
    """Count the values in a node; those behind aliases count each time."""
    if depth > MAX_DEPTH:  # also ends the recursion of an alias to an enclosing node
        raise _over_limit(f"is nested more than {MAX_DEPTH} levels deep", where)
    if id(node) not in known:
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            raise _over_limit(f"contains a number of more than {MAX_DIGITS} characters", where)
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_size(part, known, depth + 1, where) for part in inner)
    return known[id(node)]


def _over_limit(what: str, where: str) -> ConfigError:
    return ConfigError(f"The configuration {what}.", where=where, fix="Keep only the settings that the run needs.")


def _collect_lines(node: yaml.MappingNode, prefix: Key, lines: dict[Key, int], path: Path) -> None:
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(
                f"The key `{'.'.join(key)}` is set twice (also on line {lines[key]}).", where=f"{path}, line {line}",
                fix="Remove one of them.",
            )  # fmt: skip
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode):
            _collect_lines(value_node, key, lines, path)


def parse_overrides(settings: Iterable[str]) -> dict[Key, Any]:
    """Parse `train.max_steps=10` to {("train", "max_steps"): 10}; values are YAML scalars or lists."""
    overrides: dict[Key, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"--set takes section.field=value, not {setting!r}.", fix="For example: --set train.max_steps=100"
            )
        try:
            _compose(text, f"--set {name}")
            value = yaml.safe_load(text)
        except (yaml.YAMLError, *_VALUE_ERRORS):
            value = text
        overrides[tuple(name.strip().split("."))] = value
    return overrides


def put_value(values: dict[str, Any], key: Key, value: Any) -> None:
    """Set a value of nested sections, which are made where they are missing."""
    for part in key[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            values[part] = inner = {}
        values = inner
    values[key[-1]] = value


_SHOULD = "Input should be "
_UNABLE = ", unable to parse"
"""How pydantic begins and ends what a value of the wrong type or size should be."""


def validate(values: dict[str, Any], sources: Mapping[Key, str] | None = None, *, whole: str = "config") -> TrainConfig:
    """Build a TrainConfig from plain values; `sources` maps each key to where it was set, for error messages."""
    sections = field_names(TrainConfig) or {}
    # `train:` with nothing below it is an empty section, not an invalid value.
    values = {
        key: {} if value is None and field_names(sections.get(key)) is not None else value
        for key, value in values.items()
    }
    values = {key: _without_switches(value, sections.get(key)) for key, value in values.items()}
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as err:
        problems = [_explain(detail, sources or {}, whole) for detail in _merged(err.errors())]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"The configuration has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems),
            fix="See `pantheraml schema` for every key, its type and meaning.",
        ) from err
    refuse_foreign_code(config.model)
    check_roots(config)
    return config


def _without_switches(values: Any, section: Any) -> Any:
    """Return a section in which true and false, where a number is expected, are text: Python takes them for 1 and 0."""
    fields = field_names(section)
    if fields is None or not isinstance(values, dict):
        return values
    return {
        name: str(value).lower() if isinstance(value, bool) and _is_number(fields.get(name)) else value
        for name, value in values.items()
    }


def _is_number(kind: Any) -> bool:
    kinds = set(_alternatives(kind))
    return bool not in kinds and bool(kinds & {int, float})


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the types in an annotation."""
    if typing.get_origin(kind) is not typing.Literal:
        parts = typing.get_args(kind)
        yield from itertools.chain.from_iterable(map(_alternatives, parts)) if parts else [kind]


def _merged(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return one error for each field: pydantic reports one per alternative of a union."""
    merged: dict[Key, ErrorDetails] = {}
    for detail in details:
        first = merged.setdefault(_field_key(detail), detail.copy())
        first["msg"] = first["msg"].partition(_UNABLE)[0]
        other = detail["msg"].removeprefix(_SHOULD).partition(_UNABLE)[0]
        if detail["msg"].startswith(_SHOULD) and first["msg"].startswith(_SHOULD) and other not in first["msg"]:
            first["msg"] += f", or {other}"
    return list(merged.values())


def _field_key(detail: ErrorDetails) -> Key:
    """Return the key that the user wrote: pydantic's location without union branches and list indices."""
    key: list[str] = []
    owner: Any = TrainConfig
    for part in detail["loc"]:
        fields = field_names(owner)
        if fields is None:
            break
        key.append(str(part))
        owner = fields.get(str(part))
    return tuple(key)


def field_names(owner: Any) -> dict[str, Any] | None:
    """Map field name -> type for a section of the config; None for anything without fields."""
    if isinstance(owner, type) and issubclass(owner, BaseModel):
        return {name: info.annotation for name, info in owner.model_fields.items()}
    if hasattr(owner, "__pydantic_fields__"):
        hints = typing.get_type_hints(owner)
        return {name: hints[name] for name in owner.__pydantic_fields__}
    return None


def _explain(detail: ErrorDetails, sources: Mapping[Key, str], whole: str) -> str:
    key = _field_key(detail)
    name = ".".join(key)
    where = sources.get(key) or sources.get(key[:-1]) or whole
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = nearest_key(key)
        hint = f" Did you mean `{near}`?" if near else ""
        return f"`{name}` is not a known key ({where}).{hint}"
    if detail["type"] in ("missing", "missing_argument"):
        return f"`{name}` is required ({whole})."
    message = detail["msg"].removeprefix("Value error, ")
    if not key:
        mentioned = re.search(r"\b[a-z]+\.[a-z_]+\b", message)
        source = sources.get(tuple(mentioned.group().split("."))) if mentioned else None
        return f"{message} ({source or whole})."
    if detail["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"`{name}` is a section, not a value ({where}). Write its keys below it, such as `{_example(key)}`."
    shown = repr(detail["input"])
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."
    return f"`{name}` = {shown}: {message[0].lower()}{message[1:]} ({where})."


def _example(section: Key) -> str:
    first = next(iter(field_names(TrainConfig.model_fields[section[0]].annotation) or {"key": None}))
    return f"{section[0]}: {{{first}: ...}}"


_OTHER_TRAINERS_KEYS = {
    "lr": "train.learning_rate",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_checkpointing": "train.activation_checkpointing",
    "lr_scheduler_type": "train.schedule",
    "optim": "train.optimizer",
    "logging_steps": "train.log_every_steps",
    "save_steps": "checkpoint.every_steps",
    "r": "method.rank",
    "lora_r": "method.rank",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "max_seq_length": "data.seq_len",
    "max_length": "data.seq_len",
    "dataset": "data.path",
    "model_name": "model.path",
}
"""Key of another trainer -> our key."""


def nearest_key(key: Key) -> str | None:
    """Return the known key closest to a mistyped one, or to another trainer's name: first in its section, then
    anywhere."""
    everywhere = {".".join(k): k for k in all_keys() if k != key[: len(k)]}
    if key[-1] in _OTHER_TRAINERS_KEYS:
        return _OTHER_TRAINERS_KEYS[key[-1]]
    section = [k[-1] for k in everywhere.values() if k[:-1] == key[:-1]]
    close = difflib.get_close_matches(key[-1], section, n=1, cutoff=0.6)
    if close:
        return ".".join((*key[:-1], close[0]))
    by_name = {k[-1]: name for name, k in everywhere.items()}
    if key[-1] in by_name:
        return by_name[key[-1]]
    close = difflib.get_close_matches(".".join(key), list(everywhere), n=1, cutoff=0.7)
    return close[0] if close else None


def all_keys() -> list[Key]:
    """Return every settable key, sections included; no deprecated ones (`legacy_aliases.KEYS`)."""
    keys: list[Key] = []
    pending: list[tuple[Key, Any]] = [((), TrainConfig)]
    while pending:
        prefix, owner = pending.pop()
        for name, kind in (field_names(owner) or {}).items():
            if ".".join((*prefix, name)) in KEYS:
                continue
            keys.append((*prefix, name))
            pending.append(((*prefix, name), kind))
    return keys


def dump_yaml(config: TrainConfig) -> str:
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def json_schema() -> dict[str, Any]:
    """Return the schema of all keys, without the deprecated ones."""
    schema = TypeAdapter(TrainConfig).json_schema()
    fields = schema["$defs"]["MultiGPUConfig"]["properties"]
    for name in FIELD_ALIASES:
        del fields[name]
    return schema

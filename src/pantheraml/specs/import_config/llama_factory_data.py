"""The data sets of a LLaMA-Factory config: names, looked up in `dataset_info.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ConfigError
from pantheraml.base.roots import require_allowed
from pantheraml.specs.config_file import MAX_BYTES
from pantheraml.specs.import_config.datasets import DatasetSource, put_data
from pantheraml.specs.import_config.draft import Draft
from pantheraml.specs.import_config.hf_training import hold_out

INFO = "dataset_info.json"
_MEDIA = ("images", "videos", "audios")
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
_OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def translate_data(draft: Draft) -> None:
    folder, info = _dataset_info(draft)
    names = _names(draft, "dataset")
    if not names:
        draft.refuse("dataset", "names no training data", fix="Name the data that the run trains on.")
    sources = [_source(draft, name, f"dataset.{name}", folder, info) for name in names]
    format = put_data(draft, "dataset", sources)
    if format is not None:
        draft.put("data.format", format, "dataset", comment=f"formatting of {', '.join(names)} in {INFO}")
    held_out = _names(draft, "eval_dataset")
    if held_out:
        evaluation = [_source(draft, name, f"eval_dataset.{name}", folder, info) for name in held_out]
        put_data(draft, "eval_dataset", evaluation, target="data.eval_path")
        draft.unsupported_if_on("val_size", "eval_dataset is given as well; LLaMA-Factory takes one of the two")
    else:
        hold_out(draft, "val_size")
    _template(draft, {source.format for source in sources})


def _names(draft: Draft, key: str) -> list[str]:
    given = draft.get(key)
    parts = given.split(",") if isinstance(given, str) else given or []
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        draft.refuse(key, "takes names, separated by commas")
    return [part.strip() for part in parts if part.strip()]


def _dataset_info(draft: Draft) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder that holds dataset_info.json, and its content; (None, {}) if it is not on this machine."""
    given = draft.get("dataset_dir")
    if isinstance(given, dict):
        draft.part_of("dataset_dir", "data.path")
        return Path("data"), given
    name = draft.text("dataset_dir") or "data"
    if name == "ONLINE" or name.startswith("REMOTE:"):
        draft.unsupported("dataset_dir", "data on the hub is not downloaded: save it as a file")
        return None, {}
    for folder in (Path(name), draft.path.parent / name):
        file = folder / INFO
        require_allowed(file, key="dataset_dir")
        if file.is_file():
            draft.part_of("dataset_dir", "data.path")
            return folder, _read_info(file)
    draft.unsupported("dataset_dir", f"there is no {Path(name) / INFO} here: run import-config where it is")
    return None, {}


def _read_info(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_BYTES >> 20} MiB.", fix="Keep only the data sets in use.")
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise ConfigError(f"{file} cannot be read: {err}.", fix="It is a JSON object of data sets.") from err
    if not isinstance(info, dict):
        raise ConfigError(f"{file} holds no data sets.", fix="It is a JSON object of data sets.")
    return info


def _source(draft: Draft, name: str, place: str, folder: Path | None, info: dict[str, Any]) -> DatasetSource:
    if folder is None:  # nothing is known but the name
        draft.unsupported_part(place, f"what it is says {INFO}, which is not here: set data.path and data.format")
        return DatasetSource(f"data/{name}.json", None, is_local=True)
    entry = info.get(name)
    if not isinstance(entry, dict):
        known = ", ".join(sorted(map(str, info))[:20]) or "none"
        raise ConfigError(
            f"The data set {name} is not in {folder / INFO}.", where=draft.where("dataset"), fix=f"It has: {known}."
        )
    format = _format(draft, entry, place)
    for key in ("split", "num_samples", "subset", "folder"):
        if entry.get(key) not in (None, "train") and not ("hf_hub_url" in entry and key in ("split", "subset")):
            draft.unsupported_part(f"{place}.{key}", "data.path is read as a whole: save the rows to use as a file")
    if (hub := entry.get("hf_hub_url")) is not None:
        subset = entry.get("subset")
        split = str(entry.get("split") or "train")
        return DatasetSource(
            str(hub), format, is_local=False, subset=None if subset is None else str(subset), split=split
        )
    file = entry.get("file_name")
    if not isinstance(file, str):
        kind = next((key for key in ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name") if key in entry), "")
        draft.unsupported_part(place, f"it is not a file ({kind}): save it as one, and set data.path")
        return DatasetSource(f"data/{name}.json", format, is_local=True)
    path = folder / file
    if not path.exists():
        draft.unsupported_part(place, f"there is no file {path} here: set data.path")
    return DatasetSource(str(path), format, is_local=True)


def _format(draft: Draft, entry: dict[str, Any], place: str) -> str | None:
    columns = entry.get("columns")
    columns = {k: v for k, v in columns.items() if v is not None} if isinstance(columns, dict) else None
    media = [name for name in _MEDIA if columns and name in columns]
    if media or entry.get("ranking"):
        what = f"has {', '.join(media)}, and a run here trains on text" if media else "holds preferences, not answers"
        draft.unsupported_part(f"{place}.columns", f"the data {what}")
        return None
    if entry.get("formatting", "alpaca") == "alpaca":
        renamed = {k: v for k, v in (columns or {}).items() if v != _ALPACA.get(k)}
        if not renamed:
            return "instruction"
        if columns == {"prompt": "prompt", "response": "completion"}:
            return "prompt"
        if columns == {"prompt": "text"}:
            return "text"
        wanted = ", ".join(f"`{v}` to `{_ALPACA.get(k, k)}`" for k, v in renamed.items())
        draft.unsupported_part(f"{place}.columns", f"rename the column(s) {wanted} in the file")
        return "instruction"
    tags = entry.get("tags")
    tags = tags if isinstance(tags, dict) else {}
    named = entry.get("formatting") == "openai" or all(tags.get(k) == v for k, v in _OPENAI_TAGS.items())
    if not named or (columns or {}).get("messages", "conversations") != "messages":
        draft.unsupported_part(
            f"{place}.formatting",
            "ShareGPT rows (from, value) are not read: write a column `messages` with role (system, user, assistant,"
            " tool) and content",
        )
    return "messages"


def _template(draft: Draft, formats: set[str | None]) -> None:
    name = draft.get("template")
    if name is None:
        return
    if formats == {"text"}:
        draft.unneeded("template", "plain text has no template")
    elif formats == {"messages"}:
        draft.unsupported(
            "template",
            f"the tokenizer's own chat template is used, not {name}: if they differ, set model.tokenizer to a folder"
            " with that template",
        )
    else:
        draft.unsupported(
            "template",
            f"LLaMA-Factory lays instructions out as a chat ({name}); here they become `### Instruction:` ... `###"
            " Response:`. For the model's chat template, write the rows as `messages`",
        )

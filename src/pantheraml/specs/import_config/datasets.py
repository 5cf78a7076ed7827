"""Where training data is, and what to do about data that is not a local file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pantheraml.specs.import_config.draft import Draft
from pantheraml.specs.paths import is_hub_name

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
COMBINED = "data/combined"


@dataclass(frozen=True)
class DatasetSource:
    """One data set of the source config."""

    name: str
    """Path or hub name."""
    format: str | None
    """Our data.format; None = not one of ours."""
    is_local: bool
    subset: str | None = None
    split: str = "train"
    files: str | None = None
    """Files within a hub data set."""


def looks_local(name: str) -> bool:
    """Return True for a path: one that exists, ends like a data file, or cannot be a hub name."""
    return name.endswith(SUFFIXES) or name.startswith((".", "/", "~")) or not is_hub_name(name) or Path(name).exists()


def folder_for(source: DatasetSource) -> str:
    """Return the local folder that a hub data set is to be saved in."""
    return "data/" + re.sub(r"[^\w.-]", "_", source.name.rstrip("/").rpartition("/")[2] or "train").lstrip(".")


def how_to_save(source: DatasetSource) -> str:
    arguments = [repr(source.name)]
    arguments += [repr(source.subset)] if source.subset else []
    arguments += [f"data_files={source.files!r}"] if source.files else []
    load = f"datasets.load_dataset({', '.join(arguments)}, split={source.split!r})"
    return f'save it once with Python: {load}.save_to_disk("{folder_for(source)}")'


def put_data(draft: Draft, key: str, sources: list[DatasetSource], *, target: str = "data.path") -> str | None:
    """Set `target`; what is missing is reported under `key`. Return the format, if all data sets have the same one."""
    formats = {source.format for source in sources}
    one_format = formats.pop() if len(formats) == 1 else None
    if len(sources) == 1 and sources[0].is_local:
        draft.put(target, sources[0].name, key)
        return one_format
    names = ", ".join(source.name for source in sources)
    if len(sources) == 1:
        place = folder_for(sources[0])
        draft.put(target, place, key, comment=f"to be made from {key}: {names}")
        draft.unsupported_part(key, f"{names} is a name on the Hugging Face hub: {how_to_save(sources[0])}")
        return one_format
    if target != "data.path":
        draft.unsupported_part(key, f"several data sets ({names}): put their rows into one file and set {target}")
        return None
    draft.put(target, COMBINED, key, comment=f"to be made from {key}: {names}")
    mixed = "" if one_format else ", after you have brought them to the same columns"
    remote = [how_to_save(source) for source in sources if not source.is_local]
    then = f" ({'; '.join(remote)}, and export it with to_json)" if remote else ""
    draft.unsupported_part(key, f"several data sets ({names}): put all files into the folder {COMBINED}{mixed}{then}")
    return one_format

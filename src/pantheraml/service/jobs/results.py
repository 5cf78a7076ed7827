"""Result files of a job: the figures of every step, and the trained adapter."""

from __future__ import annotations

import csv
import hashlib
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pantheraml.base.private import open_private
from pantheraml.service.ids import new_id
from pantheraml.service.store.tables import Event, File

COLUMNS = ("step", "train_loss", "valid_loss", "learning_rate", "grad_norm", "epoch", "tokens", "tokens_per_second")
ADAPTER_FILE = "adapter.tar"
_BLOCK = 1 << 20


def write_results(folder: Path, owner: str, events: Sequence[Event], trained: Path) -> list[File]:
    """Write `step_metrics.csv` and, of an adapter, `adapter.tar` into `folder`; return their rows for the database.

    A full model is not copied: its files are artifacts of the job.
    """
    files = [_written(folder, owner, "step_metrics.csv", lambda path: _write_metrics(path, events))]
    if trained.name == "adapter":
        files.append(_written(folder, owner, ADAPTER_FILE, lambda path: _write_tar(path, trained)))
    return files


def _written(folder: Path, owner: str, name: str, write: Any) -> File:
    file = File(
        id=new_id("file"),
        owner=owner,
        purpose="fine-tune-results",
        filename=name,
        created_at=time.time(),
        rows=None,
        format=None,
        expires_at=None,
    )
    path = folder / file.id
    os.close(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    write(path)
    digest = hashlib.sha256()
    with open(path, "rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    file.bytes, file.sha256 = path.stat().st_size, digest.hexdigest()
    return file


def _write_metrics(path: Path, events: Sequence[Event]) -> None:
    """A step that was repeated after a restart counts once, with the figures that led to the final weights."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.step is not None:
            rows[event.step] = {**rows.get(event.step, {}), **event.data}
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows[step] for step in sorted(rows))


def _write_tar(path: Path, folder: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.is_symlink():
                archive.add(file, f"{folder.name}/{file.name}", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member

"""Preview of training data: the tokens of the first rows of a file, made by a worker process.

Chat templates are code of the model's author, and tokenizers need transformers, so neither runs in the service. Answers
are cached, since the form for a new job asks for the same file again and again.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from pantheraml.runs.supervised import Limits
from pantheraml.service.jobs.worker_task import run_task
from pantheraml.specs.tasks import PreviewRequest

SECONDS = 60.0
_KEPT = 100


class Previewer:
    """One worker at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._working = asyncio.Lock()
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def preview(self, model: Path, data: Path, format: str, seq_len: int, rows: int) -> dict[str, Any]:
        """Raises PantheraError if the model's tokenizer or template cannot be used."""
        key = f"{model} {_changed(model)} {data.name} {format} {seq_len} {rows}"
        async with self._working:
            if key not in self._known:
                with tempfile.TemporaryDirectory(dir=self._limits.cache, prefix="preview-") as name:
                    folder = Path(name)
                    request = PreviewRequest(
                        run_dir=folder, model=model, data=data, format=format, seq_len=seq_len, rows=rows
                    )
                    request.write(folder)
                    self._known[key] = await self._run(folder)
            self._known.move_to_end(key)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return self._known[key]

    async def _run(self, folder: Path) -> dict[str, Any]:
        await run_task("preview", folder, self._limits, seconds=SECONDS)
        found: dict[str, Any] = json.loads((folder / "preview.json").read_text())
        return found


def _changed(model: Path) -> float:
    """Return the newest modification time of the files that determine tokens."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return max((path.stat().st_mtime for name in names if (path := model / name).is_file()), default=0.0)

"""Task `export`: the run's adapter merged into its base, as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from pantheraml.base.events import EventWriter
from pantheraml.models.trained import export_merged
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ExportRequest
from pantheraml.worker.train import DTYPES


def export_task(folder: Path, emit: EventWriter) -> None:
    request = ExportRequest.read(folder)
    run = RunDir(request.run_dir)
    config = run.config()
    export_merged(
        config.model,
        config.method,
        run.trained(),
        dtype=DTYPES[request.precision],
        device=torch.device("cpu"),
        output=request.output,
    )
    emit("model.saved", path=str(request.output), form="merged")

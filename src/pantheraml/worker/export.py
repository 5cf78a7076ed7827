"""Task `export`: merge the run's adapter into its base model, as a plain Hugging Face folder or a GGUF file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import ModelSaved, Notice
from pantheraml.models.adapters import base_quantization
from pantheraml.models.load_finetuned import export_gguf, export_merged
from pantheraml.models.loader import read_config
from pantheraml.models.quantize.checkpoint_formats import detect_checkpoint_format
from pantheraml.specs.tasks import ExportRequest
from pantheraml.worker.received import load_received_run
from pantheraml.worker.train import DTYPES

MERGED_INTO_NF4 = "the adapter is merged into the base's 4-bit weights (nf4), which it was trained on"
PLAIN_BASE_HINT = "; --base plain merges it into the unquantized base instead"


def export_task(folder: Path, emit: EventWriter) -> None:
    request = ExportRequest.read(folder)
    run, config = load_received_run(request, emit)
    if request.base == "trained" and base_quantization(config.model, config.method) is not None:
        has_plain = detect_checkpoint_format(read_config(config.model)) is None
        emit(Notice(message=MERGED_INTO_NF4 + (PLAIN_BASE_HINT if has_plain else "")))
    export = export_merged if request.gguf is None else partial(export_gguf, kind=request.gguf)
    export(
        config.model,
        config.method,
        run.trained(),
        dtype=DTYPES[request.precision],
        device=torch.device("cpu"),
        output=request.output,
        plain_base=request.base == "plain",
    )
    emit(ModelSaved(path=str(request.output), form="merged" if request.gguf is None else "gguf"))

"""Task `export`: the run's adapter merged into its base, as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from pantheraml.base.events import EventWriter
from pantheraml.models.adapters import quantisation
from pantheraml.models.loader import read_config
from pantheraml.models.quantise.stored import stored_format
from pantheraml.models.trained import export_merged
from pantheraml.specs.tasks import ExportRequest
from pantheraml.worker.received import received
from pantheraml.worker.train import DTYPES

MERGED_OVER_4_BIT = "the adapter is merged over the base's 4-bit weights (nf4), which it was trained on"
OFFER = "; --base plain merges it into the unquantized base instead"


def export_task(folder: Path, emit: EventWriter) -> None:
    request = ExportRequest.read(folder)
    run, config = received(request, emit)
    if request.base == "trained" and quantisation(config.model, config.method) is not None:
        has_plain = stored_format(read_config(config.model)) is None
        emit("notice", message=MERGED_OVER_4_BIT + (OFFER if has_plain else ""))
    export_merged(
        config.model,
        config.method,
        run.trained(),
        dtype=DTYPES[request.precision],
        device=torch.device("cpu"),
        output=request.output,
        plain_base=request.base == "plain",
    )
    emit("model.saved", path=str(request.output), form="merged")

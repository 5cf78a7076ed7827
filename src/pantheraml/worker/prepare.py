"""Task `prepare`: check the model folder, read and check every row, tokenise once for all ranks."""

from __future__ import annotations

import json
from pathlib import Path

from pantheraml.base.events import EventWriter
from pantheraml.base.folders import write_text
from pantheraml.data.prepare import prepare
from pantheraml.models.loader import check_model, load_tokenizer
from pantheraml.specs.run_dir import RunDir


def prepare_task(folder: Path, emit: EventWriter) -> None:
    run = RunDir(folder)
    config = run.config()
    check_model(config.model)
    prepared = prepare(config.data, tokenizer=load_tokenizer(config.model), emit=emit)
    places = {
        "train": str(prepared.train),
        "eval": None if prepared.eval is None else str(prepared.eval),
        "format": prepared.format,
    }
    write_text(run.data_file, json.dumps(places, indent=1))

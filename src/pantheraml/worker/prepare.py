"""Task `prepare`: check the model folder, read and check every row, tokenise once for all ranks.

Documents are packed only if the model computes for them what it computes for each alone (see `models.packing`).
"""

from __future__ import annotations

import json
from pathlib import Path

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.base.events import Emit, EventWriter
from pantheraml.base.folders import write_text
from pantheraml.data.prepare import prepare
from pantheraml.models.loader import check_model, load_tokenizer, read_config
from pantheraml.models.packing import judge
from pantheraml.specs.plan import Choice
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, TrainConfig


def prepare_task(folder: Path, emit: EventWriter) -> None:
    run = RunDir(folder)
    config = run.config()
    check_model(config.model)
    prepared = prepare(packed_if_right(config, emit), tokenizer=load_tokenizer(config.model), emit=emit)
    places = {
        "train": str(prepared.train),
        "eval": None if prepared.eval is None else str(prepared.eval),
        "format": prepared.format,
        "sources": prepared.sources,
    }
    write_text(run.data_file, json.dumps(places, indent=1))


def packed_if_right(config: TrainConfig, emit: Emit) -> DataConfig:
    """`config.data`, without packing where that would change what the model computes."""
    data, model = config.data, config.model
    verdict = judge(read_config(model), longest=data.seq_len, trust_remote_code=model.trust_remote_code)
    if verdict.refused is not None:
        raise UnsupportedModelError(
            f"The model cannot be trained on text: {verdict.refused}.",
            todo="Use a decoder. (Of BERT and its kin: is_decoder=true in the model's config.json makes them one.)",
        )
    if not data.packing or verdict.ways:
        return data
    assert verdict.reason is not None
    emit("warning", message=f"packing is off, and rows are padded: {verdict.reason}")
    emit("choice", **Choice(name="data.packing", value=False, reason=verdict.reason, automatic=True).model_dump())
    return data.model_copy(update={"packing": False})

"""Task `prepare`: check the model folder, read and check every row, tokenize once for all ranks.

Documents are packed only if the model's output for each is the same as without packing (see `models.packing_check`).
"""

from __future__ import annotations

import json
from pathlib import Path

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import ChoiceMade, Emit, WarningIssued
from pantheraml.base.folders import write_text
from pantheraml.data.prepare import prepare
from pantheraml.models.loader import check_model, load_tokenizer, read_config
from pantheraml.models.packing_check import check_packing_support
from pantheraml.specs.plan import Choice
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, TrainConfig


def prepare_task(folder: Path, emit: EventWriter) -> None:
    run = RunDir(folder)
    config = run.config()
    check_model(config.model)
    prepared = prepare(resolve_packing(config, emit), tokenizer=load_tokenizer(config.model), emit=emit)
    paths = {
        "train": str(prepared.train),
        "eval": None if prepared.eval is None else str(prepared.eval),
        "format": prepared.format,
        "sources": prepared.sources,
    }
    write_text(run.data_file, json.dumps(paths, indent=1))


def resolve_packing(config: TrainConfig, emit: Emit) -> DataConfig:
    """Return `config.data`, with packing turned off if it would change the model's output."""
    data, model = config.data, config.model
    support = check_packing_support(read_config(model), longest=data.seq_len, trust_remote_code=model.trust_remote_code)
    if support.refused is not None:
        raise UnsupportedModelError(
            f"The model cannot be trained on text: {support.refused}.",
            fix="Use a decoder. (BERT-like models become one with is_decoder=true in the model's config.json.)",
        )
    if not data.packing or support.modes:
        return data
    assert support.reason is not None
    emit(WarningIssued(message=f"packing is off and rows are padded: {support.reason}"))
    emit(ChoiceMade(**Choice(name="data.packing", value=False, reason=support.reason, automatic=True).model_dump()))
    return data.model_copy(update={"packing": False})

"""Task `quantise`: a model's weights in nf4, rounded by what some text makes of its layers, as a folder of its own."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.base.errors import ConfigError, OutOfMemoryError, UnsupportedModelError
from pantheraml.base.events import Emit, EventWriter
from pantheraml.base.folders import committed_folder, require_empty, write_text
from pantheraml.data.batch import Batch
from pantheraml.data.order import step_samples
from pantheraml.engine.calibrate import Visit, decoder_layers, visits
from pantheraml.engine.feed import read_batch
from pantheraml.kernels.nf4 import NF4Weight
from pantheraml.models.adapters import parameter_count
from pantheraml.models.loader import load_model, load_tokenizer, model_folder, read_config
from pantheraml.models.packing import keep_documents_apart
from pantheraml.models.quantise.folder import PackedFolder, packed_config
from pantheraml.models.quantise.packed import packable_layers
from pantheraml.models.quantise.rounding import products_changed, round_nf4
from pantheraml.models.quantise.stored import nf4_parts, stored_format
from pantheraml.models.unread import read_in_turn
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import Quantised, QuantiseRequest
from pantheraml.specs.train import ModelConfig
from pantheraml.worker.train import DTYPES, check_fits, open_data

TOKENS_AT_ONCE = 16_384
"""In one pass; what a layer of an 8B model keeps for its way back is some 3 GB then, by count."""


def quantise_task(folder: Path, emit: EventWriter) -> None:
    request = QuantiseRequest.read(folder)
    run = RunDir(request.run_dir)
    with open_world(run.plan(), timeout_seconds=60) as world:
        try:
            done = quantise(run, request, world, emit)
        except torch.OutOfMemoryError as err:
            raise OutOfMemoryError(
                f"A decoder layer and what {TOKENS_AT_ONCE:,} tokens need in it do not fit on {world.device}.",
                todo=f"Use --tokens {TOKENS_AT_ONCE // 4}, or --device cpu.",
            ) from err
    write_text(folder / "quantised.json", done.model_dump_json(indent=1))


def quantise(run: RunDir, request: QuantiseRequest, world: World, emit: Emit) -> Quantised:
    """Writes `request.output`, whole or not at all."""
    begin = time.perf_counter()
    config, output = run.config().model, request.output
    require_empty(output)
    if config.trust_remote_code:
        raise ConfigError(
            "A model that brings code of its own cannot be read packed, which is how it would be written.",
            todo="Leave model.trust_remote_code out if transformers knows the model; if not, use method.kind=qlora.",
        )
    source = read_config(config)
    if (stored := stored_format(source)) is not None:
        raise ConfigError(
            f"The model's weights are stored in {stored.packing} already.",
            todo="Give the model's plain (bf16) weights.",
        )
    computed = DTYPES[run.plan().precision]
    model: Any = load_model(config, dtype=computed, device=world.device, quantise="dense", layers_unread=True)
    with read_in_turn(model):
        keep_documents_apart(model, longest=run.config().data.seq_len)
    linears, text, dtype = _linears(model), _text(run, model, request.tokens, world), _kept_dtype(source, computed)
    with committed_folder(output) as folder:
        _write_beside_weights(folder, config, model)
        packed = PackedFolder(folder, parts=len(decoder_layers(model)) + 1)
        left: list[float] = []
        for visit in visits(model, text, linears, partial(_tell, emit)):
            packed.add(_rounded(visit, dtype, left))
        packed.add(_beside(model, dtype))
        plain = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name not in linears]
        size = packed.finish(packed_config(source, dtype, plain))
    return Quantised(
        output=output,
        layers=len(linears),
        share=sum(model.get_submodule(name).weight.numel() for name in linears) / parameter_count(model),
        tokens=sum(batch.tokens for batch in text),
        left=statistics.mean(left) if left else None,
        bytes=size,
        seconds=time.perf_counter() - begin,
    )


def _write_beside_weights(folder: Path, config: ModelConfig, model: Any) -> None:
    """Tokenizer and generation settings, these as they are: some that are published transformers would not write."""
    load_tokenizer(config).save_pretrained(folder)
    settings = model_folder(config) / "generation_config.json"
    if settings.is_file():
        shutil.copyfile(settings, folder / settings.name)
    else:
        model.generation_config.save_pretrained(folder)


def _text(run: RunDir, model: Any, tokens: int, world: World) -> list[Batch]:
    """The first sequences that the run would train on."""
    dataset, _ = open_data(run)
    check_fits(model, dataset)
    count = min(len(dataset), -(-tokens // dataset.seq_len))
    ids = step_samples(dataset.fingerprint, run.config().train.seed, len(dataset), count, step=0)
    at_once = max(1, TOKENS_AT_ONCE // dataset.seq_len)
    return [read_batch(dataset, ids[start : start + at_once], world) for start in range(0, count, at_once)]


def _tell(emit: Emit, stage: str, done: int, total: int) -> None:
    emit("quantise.progress", stage=stage, done=done, total=total)


def _linears(model: Any) -> list[str]:
    """Those that are rounded: in decoder layers, all of them."""
    packable = packable_layers(model, "nf4")
    odd = [name for name in packable if type(model.get_submodule(name)) is not nn.Linear]
    if odd:
        kind = type(model.get_submodule(odd[0])).__name__
        raise UnsupportedModelError(
            f"The model's {odd[0]} is a {kind}, and bitsandbytes' format is for linear layers.",
            todo="Train with method.kind=qlora as it is: its weights are then rounded to the nearest value.",
        )
    inside = tuple(f"{name}." for name, _ in decoder_layers(model))
    found = [name for name in packable if name.startswith(inside)]
    if not found:
        raise UnsupportedModelError(f"The decoder layers of {type(model).__name__} have no linear layers to round.")
    return found


def _rounded(visit: Visit, dtype: torch.dtype, left: list[float]) -> dict[str, Tensor]:
    """A decoder layer's tensors, by their names in the model. What is left of the change is added to `left`."""
    own = {f"{visit.name}.{name}": tensor for name, tensor in visit.layer.state_dict().items()}
    weights = {name: own.pop(f"{name}.weight") for name in visit.moments}
    tensors = _cast(own, dtype)
    for name in list(visit.moments):
        moments = visit.moments.pop(name)  # the largest tensors there are
        weight, both = weights.pop(name), (moments.inputs, moments.gradients)
        packed = round_nf4(weight, *both)
        ours, nearest = (
            products_changed(each.dequantise(torch.float32), weight, *both) for each in (packed, NF4Weight.pack(weight))
        )
        left += [ours / nearest] if nearest > 0 else []
        tensors |= {f"{name}.{part}": tensor for part, tensor in nf4_parts(packed, dtype).items()}
    return tensors


def _beside(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is in no decoder layer; weights that are tied to others are in no file."""
    inside = tuple(f"{name}." for name, _ in decoder_layers(model))
    tied = set(model.all_tied_weights_keys)
    own = {name: t for name, t in model.state_dict().items() if not name.startswith(inside) and name not in tied}
    return _cast(own, dtype)


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _kept_dtype(source: Any, computed: torch.dtype) -> torch.dtype:
    """Of what is not rounded: the checkpoint's, if that holds all that is left of the numbers; else what was computed
    in."""
    stored = source.dtype
    exact = isinstance(stored, torch.dtype) and stored.itemsize < computed.itemsize
    return stored if exact else computed

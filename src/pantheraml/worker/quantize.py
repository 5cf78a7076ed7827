"""Task `quantize`: quantize a model to nf4, with rounding calibrated on text, and save it as a new model folder."""

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
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Emit, QuantizeProgress
from pantheraml.base.folders import committed_folder, require_empty, write_text
from pantheraml.data.batch import Batch
from pantheraml.data.order import step_samples
from pantheraml.engine.calibrate import CalibratedLayer, calibrate_layers, decoder_layers
from pantheraml.engine.step.feed import read_batch
from pantheraml.kernels.nf4.format import NF4Weight
from pantheraml.models.adapters import parameter_count
from pantheraml.models.lazy_weights import materialize_per_layer
from pantheraml.models.loader import load_model, load_tokenizer, model_folder, read_config
from pantheraml.models.packing_check import isolate_documents
from pantheraml.models.quantize.checkpoint_formats import detect_checkpoint_format, nf4_checkpoint_tensors
from pantheraml.models.quantize.quantized_folder import QuantizedFolder, quantized_config
from pantheraml.models.quantize.quantized_linear import quantizable_linears
from pantheraml.models.quantize.rounding import round_nf4, rounding_error
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import QuantizeRequest, QuantizeResult
from pantheraml.specs.train import ModelConfig
from pantheraml.worker.train import DTYPES, check_fits, open_data

BATCH_TOKENS = 16_384
"""Tokens per forward and backward; a layer of an 8B model then saves about 3 GB for backward (counted)."""


def quantize_task(folder: Path, emit: EventWriter) -> None:
    request = QuantizeRequest.read(folder)
    run = RunDir(request.run_dir)
    with open_world(run.plan(), timeout_seconds=60) as world:
        try:
            result = quantize(run, request, world, emit)
        except torch.OutOfMemoryError as err:
            raise OutOfMemoryError(
                f"A decoder layer with the activations of {BATCH_TOKENS:,} tokens does not fit on {world.device}.",
                fix=f"Use --tokens {BATCH_TOKENS // 4}, or --device cpu.",
            ) from err
    write_text(folder / "quantized.json", result.model_dump_json(indent=1))


def quantize(run: RunDir, request: QuantizeRequest, world: World, emit: Emit) -> QuantizeResult:
    """Write `request.output`, completely or not at all."""
    begin = time.perf_counter()
    config, output = run.config().model, request.output
    require_empty(output)
    if config.trust_remote_code:
        raise ConfigError(
            "A model with custom code (model.trust_remote_code) cannot be loaded from quantized weights.",
            fix="Remove model.trust_remote_code if transformers supports the model; otherwise use method.kind=qlora.",
        )
    source = read_config(config)
    if (stored := detect_checkpoint_format(source)) is not None:
        raise ConfigError(
            f"The model's weights are already stored in {stored.quant_format}.",
            fix="Use the model's unquantized (bf16) weights.",
        )
    compute_dtype = DTYPES[run.plan().precision]
    model: Any = load_model(config, dtype=compute_dtype, device=world.device, quantize="dense", lazy_layers=True)
    with materialize_per_layer(model):
        isolate_documents(model, longest=run.config().data.seq_len)
    linears, text = _linears(model), _calibration_text(run, model, request.tokens, world)
    dtype = _storage_dtype(source, compute_dtype)
    with committed_folder(output) as folder:
        _write_tokenizer_and_settings(folder, config, model)
        quantized = QuantizedFolder(folder)
        errors: list[float] = []
        for layer in calibrate_layers(model, text, linears, partial(_report_progress, emit)):
            quantized.add(_quantize_layer(layer, dtype, errors))
        quantized.add(_other_tensors(model, dtype))
        plain = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in linears
        ]
        size = quantized.finish(quantized_config(source, dtype, plain))
    return QuantizeResult(
        output=output,
        layers=len(linears),
        share=sum(model.get_submodule(name).weight.numel() for name in linears) / parameter_count(model),
        tokens=sum(batch.tokens for batch in text),
        left=statistics.mean(errors) if errors else None,
        bytes=size,
        seconds=time.perf_counter() - begin,
    )


def _write_tokenizer_and_settings(folder: Path, config: ModelConfig, model: Any) -> None:
    """Generation settings are copied: transformers refuses to save some published ones."""
    load_tokenizer(config).save_pretrained(folder)
    settings = model_folder(config) / "generation_config.json"
    if settings.is_file():
        shutil.copyfile(settings, folder / settings.name)
    else:
        model.generation_config.save_pretrained(folder)


def _calibration_text(run: RunDir, model: Any, tokens: int, world: World) -> list[Batch]:
    """The first sequences of the run's training order."""
    dataset, _ = open_data(run)
    check_fits(model, dataset)
    count = min(len(dataset), -(-tokens // dataset.seq_len))
    ids = step_samples(dataset.fingerprint, run.config().train.seed, len(dataset), count, step=0)
    rows = max(1, BATCH_TOKENS // dataset.seq_len)
    return [read_batch(dataset, ids[start : start + rows], world) for start in range(0, count, rows)]


def _report_progress(emit: Emit, stage: str, done: int, total: int) -> None:
    emit(QuantizeProgress(stage=stage, done=done, total=total))


def _linears(model: Any) -> list[str]:
    """Names of the linear layers to quantize: all in decoder layers."""
    quantizable = quantizable_linears(model, "nf4")
    odd = [name for name in quantizable if type(model.get_submodule(name)) is not nn.Linear]
    if odd:
        kind = type(model.get_submodule(odd[0])).__name__
        raise UnsupportedModelError(
            f"The model's {odd[0]} is a {kind}, but the bitsandbytes format supports only nn.Linear.",
            fix="Train the unquantized model with method.kind=qlora, which rounds to nearest.",
        )
    inside = tuple(f"{name}." for name, _ in decoder_layers(model))
    linears = [name for name in quantizable if name.startswith(inside)]
    if not linears:
        raise UnsupportedModelError(
            f"The decoder layers of {type(model).__name__} have no linear layers to quantize.",
            fix="Train the unquantized model with method.kind=lora.",
        )
    return linears


def _quantize_layer(calibrated: CalibratedLayer, dtype: torch.dtype, errors: list[float]) -> dict[str, Tensor]:
    """Return a decoder layer's tensors by their names in the model. Appends to `errors` the output error of each linear
    layer, relative to round-to-nearest."""
    own = {f"{calibrated.name}.{name}": tensor for name, tensor in calibrated.layer.state_dict().items()}
    weights = {name: own.pop(f"{name}.weight") for name in calibrated.moments}
    tensors = _cast(own, dtype)
    for name in list(calibrated.moments):
        moments = calibrated.moments.pop(name)  # frees the largest tensors
        weight, both = weights.pop(name), (moments.inputs, moments.gradients)
        quantized = round_nf4(weight, *both)
        error, nearest = (
            rounding_error(each.dequantize(torch.float32), weight, *both)
            for each in (quantized, NF4Weight.quantize(weight))
        )
        errors += [error / nearest] if nearest > 0 else []
        tensors |= {f"{name}.{part}": tensor for part, tensor in nf4_checkpoint_tensors(quantized, dtype).items()}
    return tensors


def _other_tensors(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors outside decoder layers, without tied weights, which are not saved."""
    inside = tuple(f"{name}." for name, _ in decoder_layers(model))
    tied = set(model.all_tied_weights_keys)
    own = {name: t for name, t in model.state_dict().items() if not name.startswith(inside) and name not in tied}
    return _cast(own, dtype)


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _storage_dtype(source: Any, compute_dtype: torch.dtype) -> torch.dtype:
    """Dtype of unquantized tensors: the checkpoint's if narrower than `compute_dtype`, which loses nothing."""
    stored = source.dtype
    exact = isinstance(stored, torch.dtype) and stored.itemsize < compute_dtype.itemsize
    return stored if exact else compute_dtype

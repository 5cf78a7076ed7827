"""Samples per GPU from a model and the memory of a GPU, before anything is loaded.

By the predicted memory if the sizes of the model are known. From a number of parameters alone, a rule of thumb: for
LoRA with activation checkpointing, on a decoder of the usual proportions (12 * layers * hidden^2 parameters, hidden =
128 * layers). Per sample and token it counts the saved layer inputs, and the working set of one layer, in bf16.
Measured numbers are better: `get_optimal_batch_size` of `pantheraml.performance` probes the model.
"""

from __future__ import annotations

import re

from pantheraml.base.errors import ConfigError, OutOfMemoryError
from pantheraml.planner.candidates import SAFE_SHARE, needed_bytes
from pantheraml.planner.memory import predict_memory
from pantheraml.planner.model_shapes import ModelShapes
from pantheraml.planner.out_of_memory import FROZEN_WEIGHT_SHARE
from pantheraml.planner.setting import Setting

GPU_MEMORY_FOR_MODEL = 0.85
"""Fraction of a GPU's memory; the rest is for CUDA's context, fragmentation and communication buckets."""
ADAPTER_SHARE = 0.02
"""LoRA parameters relative to the model's, at rank 64 of every linear layer."""
ADAPTER_BYTES = 16
"""Weight, gradient and AdamW's two states in float32, per parameter."""
LAYER_TENSORS = 34
"""Tensors of hidden size in bf16 that one layer keeps while it is recomputed; MLPs are wider than hidden."""
ADAPTER_RANK = 64
SPLIT = "Use shorter samples, or split the model over the GPUs: `pantheraml train` with parallel.shard."
BATCH_LIMIT = 64
"""Larger batches per GPU are not faster."""
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_UNITS = {"MB": 1e6, "MIB": 2**20, "GB": 1e9, "GIB": 2**30, "TB": 1e12, "TIB": 2**40}


def choose_batch_size(parameters: float, memory: float, *, four_bit: bool, max_seq_length: int) -> tuple[int, str]:
    """Return the samples per pass that fit, a power of two, and the reason; OutOfMemoryError if none does."""
    weights = parameters * 2 * FROZEN_WEIGHT_SHARE["nf4" if four_bit else None]
    weights += parameters * ADAPTER_SHARE * ADAPTER_BYTES
    layers = (parameters / (12 * 128**2)) ** (1 / 3)
    per_sample = 2 * 128 * layers * (layers + LAYER_TENSORS) * max_seq_length
    usable = GPU_MEMORY_FOR_MODEL * memory
    sizes = f"{weights / 1e9:.3g} GB for weights and {per_sample / 1e9:.2g} GB per sample of {max_seq_length} tokens"
    if usable - weights < per_sample:
        raise OutOfMemoryError(
            f"A model of {parameters / 1e9:.3g}B parameters needs about {sizes}, but {usable / 1e9:.3g} of"
            f" {memory / 1e9:.3g} GB can be used.",
            fix=("" if four_bit else "Load it in 4 bits. ") + SPLIT,
        )
    fits = 2 ** (int((usable - weights) / per_sample).bit_length() - 1)
    return min(BATCH_LIMIT, fits), f"about {sizes}, of {memory / 1e9:.3g} GB"


def choose_batch_size_of(
    shapes: ModelShapes, memory: float, *, four_bit: bool, max_seq_length: int
) -> tuple[int, str] | None:
    """The same for a model whose sizes are known, by the predicted memory; None: it is not predicted."""
    setting = Setting(
        lora_rank=ADAPTER_RANK,
        frozen_weights="nf4" if four_bit else None,
        activation_checkpointing="full",
        seq_len=max_seq_length,
        packed=False,
    )
    needed = {}
    for batch in (2**power for power in range(BATCH_LIMIT.bit_length())):
        found = predict_memory(shapes, setting.model_copy(update={"micro_batch": batch}), capacity_bytes=int(memory))
        if found is None:
            return None
        needed[batch] = needed_bytes(found)
    fitting = [batch for batch, size in needed.items() if size <= SAFE_SHARE * memory]
    if not fitting:
        raise OutOfMemoryError(
            f"This model is predicted to need {needed[1] / 1e9:.3g} GB for one sample of {max_seq_length} tokens, and"
            f" there are {memory / 1e9:.3g} GB.",
            fix=("" if four_bit else "Load it in 4 bits. ") + SPLIT,
        )
    batch = fitting[-1]
    return batch, f"{needed[batch] / 1e9:.3g} of {memory / 1e9:.3g} GB are predicted to be needed"


def parse_parameters(size: str | float) -> float:
    """Return the number of parameters."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMBT])?", str(size).strip().upper())
    count = 0.0 if match is None else float(match[1]) * _SUFFIXES.get(match[2] or "", 1)
    if count < 1e3:
        raise ConfigError(f"model_size={size!r} is not a number of parameters.", fix='Write it like "7B" or "350M".')
    return count


def parse_memory(memory: str | float) -> float:
    """Return bytes."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([MGT]I?B)?", str(memory).strip().upper())
    size = 0.0 if match is None else float(match[1]) * _UNITS.get(match[2] or "", 1)
    if size < 1e6:
        raise ConfigError(f"available_memory={memory!r} is not a size.", fix='Write it like "32GB" or "80GiB".')
    return size

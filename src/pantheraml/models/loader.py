"""Loading causal language models and their tokenizers, with errors in plain words.

Weights come from safetensors; pickled weights and code that travels with a model are used only if the config asks by
name. A checkpoint that lacks weights of its architecture is an error: transformers would fill them with random numbers.
Weights are streamed to the device layer by layer; a checkpoint that does not fit its model tensor for tensor is loaded
by transformers, through the host's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from pantheraml.base import log
from pantheraml.base.errors import ModelError, OutOfMemoryError, UnsupportedModelError
from pantheraml.base.memory_room import ROOM, memory_room
from pantheraml.models.hub import local_folder
from pantheraml.models.matching import CannotStream
from pantheraml.models.quantise.packed import pack_linears, set_dense_dtype
from pantheraml.models.quantise.stored import stored_format
from pantheraml.models.stream import check_buffers, stream_model
from pantheraml.models.units import Placement, Target
from pantheraml.models.weight_files import check_safetensors, weight_files
from pantheraml.specs.consent import refuse_foreign_code
from pantheraml.specs.hf_config import read_hf_config
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


def model_folder(config: ModelConfig) -> Path:
    """The local folder of the model: its path, or the download of its hub name."""
    refuse_foreign_code(config)
    more = (*(("*.py",) if config.trust_remote_code else ()), *(("*.bin",) if config.allow_pickle else ()))
    return local_folder(config.path, revision=config.revision, more_files=more)


def check_model(config: ModelConfig) -> None:
    """Everything about the model that can be known without loading it; ModelError if it cannot work."""
    _check(model_folder(config), config)


def read_config(config: ModelConfig) -> Any:
    """The model's `config.json` as transformers understands it."""
    return _read_config(model_folder(config), config)


def _check(folder: Path, config: ModelConfig) -> Any:
    found = _read_config(folder, config)
    if config.init == "pretrained":
        stored_format(found)
        for file in weight_files(folder, allow_pickle=config.allow_pickle):
            if file.suffix == ".safetensors":
                check_safetensors(file)
    return found


def _read_config(folder: Path, config: ModelConfig) -> Any:
    read_hf_config(folder)
    # code that somebody trusts may load libraries of any size
    room = contextlib.nullcontext() if config.trust_remote_code else memory_room()
    try:
        with room:
            found = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except MemoryError as err:
        raise ModelError(
            f"The model's config.json takes more than {ROOM >> 20} MiB of memory to read, the most that it may.",
            where=str(folder / "config.json"),
            todo="Check where the model comes from.",
        ) from err
    # configuration classes check their fields, each in its own way
    except Exception as err:
        if "trust_remote_code" in str(err):
            raise ModelError(
                f"The model in {folder} needs Python code that comes with it, which is not run unasked.",
                todo="Read that code, then set model.trust_remote_code=true.",
            ) from err
        raise ModelError(
            f"The model's config.json cannot be used: {_first_line(err)}",
            where=str(folder / "config.json"),
            todo=f"If the model is newer than transformers {transformers.__version__}, install a newer one; if it comes"
            " with Python code of its own, read that and set model.trust_remote_code=true.",
        ) from err
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING and not config.trust_remote_code:
        raise UnsupportedModelError(
            f"A model of type {found.model_type!r} is not a causal language model.",
            where=str(folder / "config.json"),
            todo="Give a model that generates text (its class in config.json ends in ForCausalLM).",
        )
    return found


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's fast tokenizer (or the one that `model.tokenizer` names)."""
    refuse_foreign_code(config)
    folder = model_folder(config) if config.tokenizer is None else local_folder(config.tokenizer)
    todo = "Set model.tokenizer to a folder with a tokenizer.json."
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"There is no tokenizer in {folder}.", todo=todo)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    # tokenizers raises bare Exception for a damaged tokenizer.json, and nothing narrower can be named
    except Exception as err:
        raise ModelError(f"The tokenizer cannot be loaded: {_first_line(err)}", where=str(folder), todo=todo) from err
    if not tokenizer.is_fast:
        raise ModelError(f"The tokenizer in {folder} has no fast version (no tokenizer.json).", todo=todo)
    if len(tokenizer) == 0:
        raise ModelError(f"The tokenizer in {folder} has an empty vocabulary.", todo=todo)
    return tokenizer


def load_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantise: Target | None = None,
    seed: int = 0,
    layers_unread: bool = False,
) -> PreTrainedModel:
    """The model on `device`, without a key/value cache, ready for training. `seed` matters for init=random alone.

    `quantise` says what its linear layers but the head are kept in; None: as the checkpoint has them, in `dtype` unless
    they are stored packed. `layers_unread`: where it can be, the weights of decoder layers are left to `read_weights`.
    """
    folder = model_folder(config)
    source = _check(folder, config)
    with _load_errors(folder), _device_errors(device):
        if config.init == "random":
            model = _random_model(source, config, dtype, seed)
            _place(model, dtype, dtype, device, quantise)
        else:
            place = Placement(quantise, stored_format(source), dtype, device)
            model = _pretrained_model(folder, source, config, place, layers_unread=layers_unread)
    model.config.get_text_config().use_cache = False
    return model


def weights_fingerprint(config: ModelConfig) -> str:
    """Tells models apart without reading them whole: config.json, and of each weight file its size and samples."""
    folder = model_folder(config)
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    if config.init == "pretrained":
        for path in weight_files(folder, allow_pickle=config.allow_pickle):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with open(path, "rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(sample * max(0, size - _SAMPLE_BYTES) // max(1, _SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _pretrained_model(
    folder: Path, source: Any, config: ModelConfig, place: Placement, *, layers_unread: bool
) -> PreTrainedModel:
    files = weight_files(folder, allow_pickle=config.allow_pickle)
    try:
        if config.trust_remote_code:
            raise CannotStream("code that comes with a model may load it in its own way")
        if files[0].suffix != ".safetensors":
            raise CannotStream("its weights are pickled")
        source.name_or_path = str(folder)
        if place.stored is not None:
            del source.quantization_config
        model = stream_model(source, files, attention_for(source), place, layers_unread=layers_unread)
        set_dense_dtype(model, place.dtype)
        model.generation_config = _generation_config(folder)
        return model
    except CannotStream as reason:
        if place.stored is not None:
            raise UnsupportedModelError(
                f"The model's weights are stored in {place.stored.packing} and do not fit it one by one: {reason}.",
                where=str(folder),
                todo="Use the model's plain (bf16) weights.",
            ) from reason
        logger.info("the weights go through the host's memory, because %s", reason)
    # Packing starts from the weights as they are stored, so that it does not depend on this run's precision.
    model = _from_pretrained(folder, source, config, place.dtype if place.target in (None, "dense") else None)
    _place(model, model.dtype, place.dtype, place.device, place.target)
    return model


def _place(
    model: PreTrainedModel, stored: torch.dtype, dtype: torch.dtype, device: torch.device, quantise: Target | None
) -> None:
    """Pack, cast and move a model that is whole in the host's memory."""
    if quantise is not None and quantise != "dense":
        pack_linears(model, quantise, dtype=dtype, device=device)
        _cast_parameters(model, stored, dtype)
    model.to(device)


def _from_pretrained(folder: Path, source: Any, config: ModelConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    _refuse_other_weights(folder, source)
    if not config.trust_remote_code:
        check_buffers(source)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="auto" if dtype is None else dtype,
        attn_implementation=attention_for(source),
        use_safetensors=None if config.allow_pickle else True,
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"The weights do not fit config.json: {shown} missing or of another shape.",
            where=str(folder),
            todo="Get the model again, or check that the weights belong to this config.json.",
        )
    return model


def _refuse_other_weights(folder: Path, source: Any) -> None:
    """Transformers would read other files than those that were checked."""
    if getattr(source, "transformers_weights", None) is not None:
        other = "config.json names weight files of its own (transformers_weights)"
    elif (folder / "adapter_config.json").exists():
        other = "an adapter lies beside the weights, and transformers would load that adapter's base instead"
    else:
        return
    raise ModelError(
        f"The model folder cannot be used: {other}.",
        where=str(folder),
        todo="Remove that, or give a folder with the plain model alone.",
    )


def _generation_config(folder: Path) -> GenerationConfig:
    """As transformers finds it beside the weights."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def attention_for(model_config: Any) -> str:
    """Torch's own attention, except for the few families that need scores which it does not give out (Gemma 2)."""
    if getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "eager"  # transformers before 5.20 lets such models onto SDPA, which leaves the cap out
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    return "sdpa" if architecture is None or architecture._supports_sdpa else "eager"


def _random_model(source: Any, config: ModelConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    if not config.trust_remote_code:
        check_buffers(source)
    # Built in float32 on the CPU, so that the numbers depend on the seed alone, and without touching the caller's RNG.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            source,
            dtype=torch.float32,
            attn_implementation=attention_for(source),
            trust_remote_code=config.trust_remote_code,
        )
    _cast_parameters(model, torch.float32, dtype)
    return model


def _cast_parameters(model: PreTrainedModel, old: torch.dtype, new: torch.dtype) -> None:
    """Parameters alone: rotary frequencies are buffers, and in bf16 they would put tokens at wrong positions."""
    for parameter in model.parameters():
        if parameter.dtype == old:
            parameter.data = parameter.data.to(new)


@contextlib.contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except UnpicklingError as err:
        raise ModelError(
            "The model cannot be loaded: its pickled weights hold something other than tensors.",
            where=str(folder),
            todo="Do not trust them; get the model in safetensors.",
        ) from err
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as err:
        raise ModelError(f"The model cannot be loaded: {_first_line(err)}", where=str(folder)) from err


@contextlib.contextmanager
def _device_errors(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as err:
        raise OutOfMemoryError(
            f"The model's weights do not fit on {device}.",
            todo="Use method.kind=qlora, or a GPU with more memory.",
        ) from err


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]

"""Load language models, also with vision, and their tokenizers, with clear errors.

Weights come from safetensors; pickled weights and remote code are used only if the config enables them. A checkpoint
that lacks weights of its architecture is an error: transformers would initialize them randomly. Weights are streamed to
the device layer by layer; a checkpoint that does not match its model tensor for tensor is loaded by transformers,
through host memory.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, ModelError, OutOfMemoryError, UnsupportedModelError
from pantheraml.base.memory_room import MAX_GROWTH_BYTES, memory_limit
from pantheraml.models.checkpoint_mapping import CannotStream
from pantheraml.models.hub import local_folder
from pantheraml.models.model_kind import (
    CLASSIFIER,
    TEXT,
    VISION,
    Attention,
    ModelKind,
    classifier_head,
    inside,
    is_classifier_config,
    is_vision_config,
)
from pantheraml.models.quantize.checkpoint_formats import detect_checkpoint_format
from pantheraml.models.quantize.quantized_linear import quantize_linears, set_dense_dtype
from pantheraml.models.rope_scaling import RopeChange
from pantheraml.models.stream import check_buffers, stream_model
from pantheraml.models.weight_files import check_safetensors, weight_files
from pantheraml.models.weight_reader import WeightFormat, WeightPlacement
from pantheraml.specs.consent import refuse_foreign_code
from pantheraml.specs.hf_config import read_hf_config
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


def model_folder(config: ModelConfig) -> Path:
    """Return the model's local folder: its path, or the download of its hub name."""
    refuse_foreign_code(config)
    more = (*(("*.py",) if config.trust_remote_code else ()), *(("*.bin",) if config.allow_pickle else ()))
    return local_folder(config.path, revision=config.revision, more_files=more)


def check_model(config: ModelConfig) -> None:
    """Check everything about the model that is known without loading it; ModelError if it cannot work."""
    _check(model_folder(config), config)


def read_config(config: ModelConfig, kind: ModelKind = TEXT) -> Any:
    """Return the model's `config.json` as parsed by transformers."""
    return _read_config(model_folder(config), config, kind)


def kind_of(config: ModelConfig) -> ModelKind:
    """Return the kind of a model that may be of any."""
    source = _parse_config(model_folder(config), config)
    return VISION if is_vision_config(source) else TEXT


def kind_to_load(config: ModelConfig) -> ModelKind:
    """Return TEXT; CLASSIFIER for a classifier's checkpoint; VISION for a vision-language model of which transformers
    has no text-only class."""
    source = _parse_config(model_folder(config), config)
    if is_classifier_config(source) and not is_vision_config(source):
        logger.info("the checkpoint is a %s (%s)", CLASSIFIER.noun, source.architectures[0])
        return CLASSIFIER
    if type(source) in TEXT.mapping or not is_vision_config(source):
        return TEXT
    logger.info("a %s model has no text-only form: loading it with its vision tower and processor", source.model_type)
    return VISION


def _check(folder: Path, config: ModelConfig, kind: ModelKind = TEXT) -> Any:
    source = _read_config(folder, config, kind)
    if config.init == "pretrained":
        detect_checkpoint_format(source)
        for file in weight_files(folder, allow_pickle=config.allow_pickle):
            if file.suffix == ".safetensors":
                check_safetensors(file)
    return source


def _read_config(folder: Path, config: ModelConfig, kind: ModelKind) -> Any:
    source = _parse_config(folder, config)
    of_kind = type(source) in kind.mapping and not (kind.classifies and is_vision_config(source))
    if not of_kind and not config.trust_remote_code:
        raise UnsupportedModelError(
            f"A model of type {source.model_type!r} is not a {kind.noun}.",
            where=str(folder / "config.json"),
            fix="Load it with FastVisionModel." if kind is TEXT and is_vision_config(source) else kind.otherwise,
        )
    architecture = kind.mapping.get(type(source), None)
    if architecture is not None and not kind.classifies and not issubclass(architecture, GenerationMixin):
        raise UnsupportedModelError(
            f"A model of type {source.model_type!r} does not predict the next token: diffusion models and policies are "
            "not supported.",
            where=str(folder / "config.json"),
            fix="Use an autoregressive model.",
        )
    _set_labels(source, kind.labels)
    return source


def _set_labels(source: Any, labels: Mapping[str, Any]) -> None:
    number, names = labels.get("num_labels"), labels.get("id2label")
    if number is not None and (type(number) is not int or number < 1):
        raise ConfigError(
            f"num_labels={number!r} is not a positive integer.",
            fix="Pass the number of classes, or 1 for a reward model.",
        )
    if number is not None and names is not None and len(names) != number:
        raise ConfigError(f"num_labels={number}, but id2label has {len(names)}.", fix="Give as many names as labels.")
    for name, value in labels.items():
        setattr(source, name, value)


def _parse_config(folder: Path, config: ModelConfig) -> Any:
    read_hf_config(folder)
    # trusted remote code may load libraries of any size
    limit = contextlib.nullcontext() if config.trust_remote_code else memory_limit()
    try:
        with limit:
            return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except MemoryError as err:
        raise ModelError(
            f"Reading the model's config.json takes more than {MAX_GROWTH_BYTES >> 20} MiB of memory, the limit.",
            where=str(folder / "config.json"),
            fix="Check the source of the model.",
        ) from err
    # config classes validate their fields, each in its own way
    except Exception as err:
        if "trust_remote_code" in str(err):
            raise ModelError(
                f"The model in {folder} needs remote code (Python files in its folder), which is not run by default.",
                fix="Review that code, then set model.trust_remote_code=true.",
            ) from err
        raise ModelError(
            f"The model's config.json cannot be used: {_first_line(err)}",
            where=str(folder / "config.json"),
            fix=f"If the model is newer than transformers {transformers.__version__}, upgrade it; if it has Python"
            " code of its own, review that and set model.trust_remote_code=true.",
        ) from err


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the model's fast tokenizer (or the one that `model.tokenizer` names)."""
    refuse_foreign_code(config)
    folder = model_folder(config) if config.tokenizer is None else local_folder(config.tokenizer)
    fix = "Set model.tokenizer to a folder with a tokenizer.json."
    if not has_tokenizer(folder):
        raise ModelError(f"There is no tokenizer in {folder}.", fix=fix)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    # tokenizers raises a bare Exception for a corrupted tokenizer.json
    except Exception as err:
        raise ModelError(f"The tokenizer cannot be loaded: {_first_line(err)}", where=str(folder), fix=fix) from err
    if not tokenizer.is_fast:
        raise ModelError(f"The tokenizer in {folder} has no fast version (no tokenizer.json).", fix=fix)
    if len(tokenizer) == 0:
        raise ModelError(f"The tokenizer in {folder} has an empty vocabulary.", fix=fix)
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantize: WeightFormat | None = None,
    seed: int = 0,
    lazy_layers: bool = False,
    rope: RopeChange | None = None,
    kind: ModelKind = TEXT,
) -> PreTrainedModel:
    """Load the model on `device`, without a key/value cache, ready for training. `seed` is used only for init=random,
    and for the head of a classifier that the checkpoint does not have.

    `quantize`: format of the linear layers except the head; None: as in the checkpoint, which is `dtype` unless it is
    quantized. `lazy_layers`: where possible, leave the weights of decoder layers for `materialize`. `rope` replaces the
    RoPE of config.json. Parts that see images are never quantized.
    """
    folder = model_folder(config)
    source = _check(folder, config, kind)
    if rope is not None:
        rope.apply(source)
    with _load_errors(folder), _device_errors(device):
        if config.init == "random":
            model = _random_model(source, config, dtype, seed, kind)
            _place(model, dtype, dtype, device, quantize)
        else:
            place = WeightPlacement(quantize, detect_checkpoint_format(source), dtype, device)
            model = _pretrained_model(folder, source, config, place, kind, seed=seed, lazy_layers=lazy_layers)
    model.config.get_text_config().use_cache = False
    return model


def weights_fingerprint(config: ModelConfig) -> str:
    """Hash config.json, and the size and samples of each weight file, without reading all weights."""
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
    folder: Path,
    source: Any,
    config: ModelConfig,
    place: WeightPlacement,
    kind: ModelKind,
    *,
    seed: int,
    lazy_layers: bool,
) -> PreTrainedModel:
    files = weight_files(folder, allow_pickle=config.allow_pickle)
    try:
        if config.trust_remote_code:
            raise CannotStream("remote code may load the model in its own way")
        if files[0].suffix != ".safetensors":
            raise CannotStream("its weights are pickled")
        source.name_or_path = str(folder)
        if place.checkpoint_format is not None:
            del source.quantization_config
        attention = attention_for(source, kind)
        with _seeded(seed):
            model = stream_model(source, files, attention, place, lazy_layers=lazy_layers, kind=kind)
        set_dense_dtype(model, place.dtype)
        model.generation_config = _generation_config(folder)
        return model
    except CannotStream as reason:
        if place.checkpoint_format is not None:
            raise UnsupportedModelError(
                f"The checkpoint is quantized in {place.checkpoint_format.quant_format} and its tensors do not match"
                f" the model's: {reason}.",
                where=str(folder),
                fix="Use the model's plain (bf16) weights.",
            ) from reason
        logger.info("loading through host memory, because %s", reason)
    # Quantize from the checkpoint's dtype, so that the result does not depend on this run's precision.
    dtype = place.dtype if place.target in (None, "dense") else None
    with _seeded(seed):
        model = _from_pretrained(folder, source, config, dtype, kind)
    _place(model, model.dtype, place.dtype, place.device, place.target)
    return model


def _place(
    model: PreTrainedModel,
    checkpoint_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    quantize: WeightFormat | None,
) -> None:
    """Quantize, cast and move a model that is complete in host memory."""
    if quantize is not None and quantize != "dense":
        quantize_linears(model, quantize, dtype=dtype, device=device)
        _cast_parameters(model, checkpoint_dtype, dtype)
    model.to(device)


def _from_pretrained(
    folder: Path, source: Any, config: ModelConfig, dtype: torch.dtype | None, kind: ModelKind
) -> PreTrainedModel:
    _reject_redirected_weights(folder, source)
    if not config.trust_remote_code:
        check_buffers(source, kind)
    model, info = kind.auto_model.from_pretrained(
        folder,
        config=source,
        dtype="auto" if dtype is None else dtype,
        attn_implementation=attention_for(source, kind),
        use_safetensors=None if config.allow_pickle else True,
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
    )
    new = inside(classifier_head(model), model)
    model.new_weights = {name for name in info["missing_keys"] if name.rpartition(".")[0] in new}
    missing = sorted(info["missing_keys"] - model.new_weights) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"The weights do not match config.json: {shown} missing or of a different shape.",
            where=str(folder),
            fix="Download the model again, or check that the weights belong to this config.json.",
        )
    return model


def _reject_redirected_weights(folder: Path, source: Any) -> None:
    """Reject folders from which transformers would read other files than those that were checked."""
    if getattr(source, "transformers_weights", None) is not None:
        reason = "config.json names weight files of its own (transformers_weights)"
    elif (folder / "adapter_config.json").exists():
        reason = "it also contains an adapter, and transformers would load that adapter's base instead"
    else:
        return
    raise ModelError(
        f"The model folder cannot be used: {reason}.",
        where=str(folder),
        fix="Remove it, or give a folder that contains only the plain model.",
    )


def _generation_config(folder: Path) -> GenerationConfig:
    """Read the generation config as transformers does."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def attention_for(model_config: Any, kind: ModelKind = TEXT) -> Attention:
    """Return sdpa, or eager for the few families that need attention scores or softcapping (Gemma 2).

    With parts that have no SDPA (Gemma 4's audio encoder): a mapping that names them, too.
    """
    if getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "eager"  # transformers before 5.20 allows SDPA, which ignores the softcap
    own = "sdpa" if _has_sdpa(kind.mapping, model_config) else "eager"
    parts = {name: getattr(model_config, name, None) for name in getattr(model_config, "sub_configs", ())}
    eager = {name: "eager" for name, part in parts.items() if part is not None and not _has_sdpa(MODEL_MAPPING, part)}
    return {"": own, **eager} if eager else own


def _has_sdpa(classes: Any, config: Any) -> bool:
    architecture = classes.get(type(config), None)
    return architecture is None or architecture._supports_sdpa


def _random_model(source: Any, config: ModelConfig, dtype: torch.dtype, seed: int, kind: ModelKind) -> PreTrainedModel:
    if not config.trust_remote_code:
        check_buffers(source, kind)
    # Float32 on the CPU, so that the values depend only on the seed; the caller's RNG state is preserved.
    with _seeded(seed):
        model: PreTrainedModel = kind.auto_model.from_config(
            source,
            dtype=torch.float32,
            attn_implementation=attention_for(source, kind),
            trust_remote_code=config.trust_remote_code,
        )
    _cast_parameters(model, torch.float32, dtype)
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _cast_parameters(model: PreTrainedModel, old: torch.dtype, new: torch.dtype) -> None:
    """Cast parameters only: RoPE frequencies are buffers, and in bf16 they would shift positions."""
    for parameter in model.parameters():
        if parameter.dtype == old:
            parameter.data = parameter.data.to(new)


@contextlib.contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except UnpicklingError as err:
        raise ModelError(
            "The model cannot be loaded: its pickled weights contain objects other than tensors.",
            where=str(folder),
            fix="Do not trust them; use safetensors weights.",
        ) from err
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as err:
        raise ModelError(
            f"The model cannot be loaded: {_first_line(err)}",
            where=str(folder),
            fix="Check that the folder is complete; download it again if it is not.",
        ) from err


@contextlib.contextmanager
def _device_errors(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as err:
        raise OutOfMemoryError(
            f"The model's weights do not fit in the memory of {device}.",
            fix="Use method.kind=qlora, or a GPU with more memory.",
        ) from err


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]

"""Prepare a loaded model for training, and save what was trained.

LoRA, DoRA and QLoRA use PEFT's own layers, in float32, over a base that keeps its dtype. The adapter config names the
adapted layers explicitly, so that plain PEFT can load it on the unquantized base, whatever the base was quantized to
here.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pantheraml.base.errors import ConfigError, ModelError, UnsupportedModelError
from pantheraml.base.folders import committed_folder
from pantheraml.models.base_identity import BaseIdentity
from pantheraml.models.loader import model_folder, read_config
from pantheraml.models.model_kind import classifier_head, inside, is_classifier
from pantheraml.models.quantize.int8 import Int8Linear
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_linear import LORA_LAYERS, QuantizedLinear, quant_formats_of
from pantheraml.models.trained_copies import FullModules
from pantheraml.specs.paths import is_hub_name
from pantheraml.specs.train import MethodConfig, ModelConfig

ADAPTER = "default"
"""PEFT's name for the model's only adapter; files do not contain it."""


def apply_method(
    model: PreTrainedModel,
    method: MethodConfig,
    *,
    seed: int,
    full_modules: FullModules | None = None,
    lora: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the model set up for `method`: adapters over frozen weights, or all weights trainable.

    `full_modules`: modules to be trained in full beside the adapters. `lora`: other arguments of PEFT's `LoraConfig`.
    """
    if method.kind == "full":
        if any(isinstance(layer, QuantizedLinear) for layer in model.modules()):
            raise UnsupportedModelError(
                "The checkpoint is quantized, and quantized weights cannot be trained.",
                fix="Use method.kind=lora, or the model's plain weights.",
            )
        return model.requires_grad_(True)
    targets = target_layers(model, method.target_modules)
    # PEFT draws initial values, which are replaced below if they are the usual ones; preserve the caller's RNG state.
    gpus = sorted({each.device.index for each in model.parameters() if each.is_cuda})
    with torch.random.fork_rng(devices=gpus), _peft_errors(targets):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)):
            generator.manual_seed(seed)
        config = _lora_config(model, method, targets, lora or {})
        prepare_config(model, config)
        config.target_parameters = _check_parameters(model, method) or None
        if full_modules is not None and full_modules.names:
            config.modules_to_save, config.ensure_weight_tying = list(full_modules.names), full_modules.tied
        adapted = get_peft_model(model, config, adapter_name=ADAPTER)
    if config.init_lora_weights is True:
        _initialize(adapted, seed)
    return adapted


@contextlib.contextmanager
def _peft_errors(targets: list[str]) -> Iterator[None]:
    """Explain PEFT's errors for layers that it cannot adapt, such as those that Mamba's kernels bypass."""
    try:
        yield
    except ValueError as err:
        problem = (str(err).strip().splitlines() or [""])[0]
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in targets)
        others = [kind for kind in kinds if f"'{kind}'" not in problem]
        raise UnsupportedModelError(
            f"PEFT cannot add adapters to the layers of method.target_modules: {problem}",
            fix=f"Choose other layers: method.target_modules={','.join(others)}."
            if others
            else "Use method.kind=full.",
        ) from err


def base_quantization(model: ModelConfig, method: MethodConfig) -> Literal["nf4"] | None:
    """Return the quantization the base needs at inference: an adapter trained over nf4 corrects nf4's errors."""
    return "nf4" if method.kind == "qlora" or model.precision == "nf4" else None


def trained_form(method: MethodConfig) -> Literal["adapter", "model"]:
    """Return what training produces: an adapter, or a whole model."""
    return "model" if method.kind == "full" else "adapter"


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def parameter_count(model: nn.Module) -> int:
    """Count all weights, quantized ones by their dense size."""
    quantized = sum(
        m.in_features * m.out_features + (0 if m.bias is None else m.bias.numel())
        for m in model.modules()
        if isinstance(m, QuantizedLinear)
    )
    return quantized + sum(parameter.numel() for parameter in model.parameters())


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> layer for every layer that can carry an adapter.

    That leaves out the output of `nn.MultiheadAttention`, which reads its weight and never calls it.
    """
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D | QuantizedLinear)
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
    }


def bypassed_by_kernels(model: PreTrainedModel, name: str) -> bool:
    """Return whether PEFT refuses layers of this name in this architecture, since Mamba's kernels bypass them."""
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name)
    except ValueError:
        return True
    return False


def target_layers(model: PreTrainedModel, target_modules: str | list[str]) -> list[str]:
    """Return the full names of the layers that `target_modules` selects; ModelError for a name that matches none."""
    layers = linear_layers(model)
    head = model.get_output_embeddings()
    if target_modules == "all-linear":
        scoring = inside(classifier_head(model), model)
        return [name for name, layer in layers.items() if layer is not head and name not in scoring]
    targets = [target_modules] if isinstance(target_modules, str) else target_modules
    matches = {target: [name for name in layers if name == target or name.endswith(f".{target}")] for target in targets}
    unknown = [target for target, names in matches.items() if not names]
    if unknown or not targets:
        known = sorted({name.rpartition(".")[2] for name in layers})
        problem = f"names layers that this model does not have: {', '.join(unknown)}" if unknown else "is an empty list"
        raise ModelError(f"method.target_modules {problem}.", fix=f"Choose from {', '.join(known)}, or use all-linear.")
    selected = {name for names in matches.values() for name in names}
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    if tied and any(layers[name] is head for name in selected):
        raise UnsupportedModelError(
            "method.target_modules includes the output head, which is tied to the input embedding in this model.",
            fix="Leave the output head out.",
        )
    return [name for name in layers if name in selected]


def _check_parameters(model: nn.Module, method: MethodConfig) -> list[str]:
    """ConfigError for a name that no weight has, or for settings that PEFT supports for layers only."""
    names = method.target_parameters
    known = [name for name, _ in model.named_parameters()]
    for target in names:
        if not any(name == target or name.endswith(f".{target}") for name in known):
            stacked = sorted({".".join(n.split(".")[-3:]) for n, p in model.named_parameters() if p.ndim == 3})
            raise ConfigError(
                f"target_parameters names weights that this model does not have: {target}.",
                fix=f"Choose from {', '.join(stacked)}." if stacked else "Remove it: the model has no stacked experts.",
            )
    if names and (method.dropout or method.kind == "dora"):
        raise ConfigError(
            "target_parameters supports neither lora_dropout nor use_dora.", fix="Set lora_dropout=0, use_dora=False."
        )
    return list(names)


def _lora_config(
    model: PreTrainedModel, method: MethodConfig, targets: list[str], others: Mapping[str, Any]
) -> LoraConfig:
    layers = linear_layers(model)
    transposed = {
        isinstance(m, Conv1D) or (isinstance(m, Int8Linear | NF4Linear) and m.from_conv1d)
        for m in map(layers.get, targets)
    }
    if len(transposed) > 1:
        raise UnsupportedModelError(
            "method.target_modules mixes layers with different weight layouts (Linear and Conv1D).",
            fix="Leave one kind out.",
        )
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS if is_classifier(model) else TaskType.CAUSAL_LM,
        r=method.rank,
        lora_alpha=cast(int, method.alpha),  # PEFT declares int, but floats work
        lora_dropout=method.dropout,
        use_dora=method.kind == "dora",
        use_rslora=method.rslora,
        target_modules=_shorten_names(targets, [name for name, _ in model.named_modules()]),
        fan_in_fan_out=transposed.pop(),
        **others,
    )
    config._register_custom_module(LORA_LAYERS)
    return config


_DATA_FREE_INITS = (True, False, "gaussian")
"""Values of `init_lora_weights` that do not depend on the base's weights."""


def prepare_config(model: PreTrainedModel, config: LoraConfig) -> None:
    """Change a config made for plain PEFT so that PEFT can adapt `model`, whose layers may be quantized."""
    formats = " and ".join(quant_formats_of(model))
    if not formats:
        return
    refused = {
        "use_dora=True": config.use_dora,
        f"init_lora_weights={config.init_lora_weights!r}": config.init_lora_weights not in _DATA_FREE_INITS,
        f"bias={config.bias!r}": config.bias != "none",
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{setting} needs unquantized weights, but this model's are in {formats}.",
                fix="Remove it, or load the model with dtype=torch.bfloat16, without load_in_4bit, load_in_8bit or"
                " load_in_fp8.",
            )
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        names = target_layers(model, "all-linear")
        config.target_modules = set(_shorten_names(names, [name for name, _ in model.named_modules()]))
    config._register_custom_module(LORA_LAYERS)


def _shorten_names(targets: list[str], modules: Iterable[str]) -> list[str]:
    """Return the last name components if PEFT would match exactly the same layers by them, else the full names."""
    last = {name.rpartition(".")[2] for name in targets}
    matched = {name for name in modules if name.rpartition(".")[2] in last}
    return sorted(last) if matched == set(targets) else targets


def _initialize(model: nn.Module, seed: int) -> None:
    """Initialize LoRA as usual (A uniform, B zero, DoRA's magnitude from the weight), from the seed and layer name
    alone.

    Drawn in float32 on the CPU, so the values do not depend on rank, device, base dtype or the caller's RNG.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        bound = 1 / math.sqrt(down.shape[1])
        initial = torch.empty(down.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        down.data = initial.to(down.device)
        up.data = torch.zeros_like(up, dtype=torch.float32)
        if ADAPTER in layer.lora_magnitude_vector:
            weight = layer.get_base_layer().weight.detach()
            # as PEFT does: the norm per output, for either weight layout
            norm = torch.linalg.vector_norm(weight.float(), dim=0 if layer.fan_in_fan_out else 1)
            layer.lora_magnitude_vector[ADAPTER].weight.data = norm


@dataclass(frozen=True)
class TrainedWeights:
    """A model and its trained weights by parameter name, unsharded and on the CPU (the model may hold only shards)."""

    model: nn.Module
    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> TrainedWeights:
        """Take the weights from a model that is not sharded."""
        return cls(model, {name: parameter.detach().cpu() for name, parameter in trainable_parameters(model)})


def save_trained(
    trained: TrainedWeights,
    path: Path,
    *,
    method: MethodConfig,
    model_config: ModelConfig,
    tokenizer: Any,
    base: BaseIdentity | None = None,
) -> None:
    """Write the trained weights and the tokenizer to the folder `path`, atomically.

    `base` is recorded with an adapter; None: identify the model as it is now.
    """
    with committed_folder(path) as folder:
        if method.kind == "full":
            save_full_model(cast(PreTrainedModel, trained.model), folder, model_config, weights=trained.weights)
        else:
            _save_adapter(cast(PeftModel, trained.model), trained.weights, folder, model_config)
            (base or BaseIdentity.of(model_config)).write(folder)
        tokenizer.save_pretrained(folder)


def name_in_file(parameter: str, adapter: str = ADAPTER) -> str:
    """Return the name as PEFT writes it: without the adapter name, and DoRA's magnitude without `.weight`."""
    magnitude = "lora_magnitude_vector"
    return parameter.replace(f".{magnitude}.{adapter}.weight", f".{magnitude}").replace(f".{adapter}.", ".")


def _save_adapter(model: PeftModel, trained: Mapping[str, Tensor], folder: Path, model_config: ModelConfig) -> None:
    # PEFT's own state dict would miss layers that `model`, perhaps one pipeline stage, does not have.
    weights = {name_in_file(name): weight.detach().cpu().contiguous() for name, weight in trained.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path = base_name(model_config)
    config.revision = model_config.revision
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set; sorting makes the file deterministic
    config.save_pretrained(str(folder))


def save_full_model(
    model: PreTrainedModel, folder: Path, model_config: ModelConfig, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Save a plain Hugging Face folder with `weights`, or the model's own.

    Training disables `use_cache`; the saved config restores the base model's setting.
    """
    text_config = model.config.get_text_config()
    use_cache = text_config.use_cache
    text_config.use_cache = read_config(model_config).get_text_config().use_cache
    try:
        model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    finally:
        text_config.use_cache = use_cache


def base_name(model_config: ModelConfig) -> str:
    """Return what an adapter records as its base: an absolute path, or the hub name as given."""
    path = Path(model_config.path).expanduser()
    if not path.is_dir() and is_hub_name(model_config.path):
        return model_config.path
    return str(model_folder(model_config))

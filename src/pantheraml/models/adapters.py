"""From a loaded model to one that trains, and from a trained one to a folder.

LoRA, DoRA and QLoRA are PEFT's own layers, in float32, over a base that keeps its dtype. Which layers get an adapter is
spelt out in the adapter's config, so that plain PEFT loads it on the plain base whatever the base was packed in here.
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
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.base.folders import committed_folder
from pantheraml.models.loader import model_folder, read_config
from pantheraml.models.quantise.int8 import Int8Linear
from pantheraml.models.quantise.nf4 import NF4Linear
from pantheraml.models.quantise.packed import LORA_LAYERS, PackedLinear
from pantheraml.models.trained_on import TrainedOn
from pantheraml.specs.paths import is_hub_name
from pantheraml.specs.train import MethodConfig, ModelConfig

ADAPTER = "default"
"""PEFT's name for the one adapter of a model; files carry no name."""


def apply_method(model: PreTrainedModel, method: MethodConfig, *, seed: int) -> nn.Module:
    """The model as `method` trains it: with adapters over frozen weights, or with every weight trainable."""
    if method.kind == "full":
        if any(isinstance(layer, PackedLinear) for layer in model.modules()):
            raise UnsupportedModelError(
                "The model's weights are stored packed, and packed weights cannot be trained.",
                todo="Use method.kind=lora, or the model's plain weights.",
            )
        return model.requires_grad_(True)
    targets = target_layers(model, method.target_modules)
    # PEFT draws first values of its own; they are replaced below, and the caller's RNG must not feel them
    with torch.random.fork_rng(devices=[]), _refusals(targets):
        adapted = get_peft_model(model, _lora_config(model, method, targets), adapter_name=ADAPTER)
    _initialise(adapted, seed)
    return adapted


@contextlib.contextmanager
def _refusals(targets: list[str]) -> Iterator[None]:
    """PEFT knows layers that it cannot adapt, such as those that Mamba's kernels read past."""
    try:
        yield
    except ValueError as err:
        problem = (str(err).strip().splitlines() or [""])[0]
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in targets)
        others = [kind for kind in kinds if f"'{kind}'" not in problem]
        raise UnsupportedModelError(
            f"PEFT cannot put adapters on the layers of method.target_modules: {problem}",
            todo=f"Name others: method.target_modules={','.join(others)}." if others else "Use method.kind=full.",
        ) from err


def quantisation(model: ModelConfig, method: MethodConfig) -> Literal["nf4"] | None:
    """What the base stays packed in when the adapter is used: it has learnt to correct what nf4 left of the base."""
    return "nf4" if method.kind == "qlora" or model.precision == "nf4" else None


def trained_form(method: MethodConfig) -> Literal["adapter", "model"]:
    """What training leaves: an adapter, or a whole model."""
    return "model" if method.kind == "full" else "adapter"


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def parameter_count(model: nn.Module) -> int:
    """All weights, packed ones counted by what they stand for."""
    packed = sum(
        m.in_features * m.out_features + (0 if m.bias is None else m.bias.numel())
        for m in model.modules()
        if isinstance(m, PackedLinear)
    )
    return packed + sum(parameter.numel() for parameter in model.parameters())


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer, for every layer that can carry an adapter."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D | PackedLinear)}


def target_layers(model: PreTrainedModel, target_modules: str | list[str]) -> list[str]:
    """The full names of the layers that `target_modules` means; ModelError for a name that means none."""
    layers = linear_layers(model)
    head = model.get_output_embeddings()
    if target_modules == "all-linear":
        return [name for name, layer in layers.items() if layer is not head]
    wanted = [target_modules] if isinstance(target_modules, str) else target_modules
    found = {target: [name for name in layers if name == target or name.endswith(f".{target}")] for target in wanted}
    unknown = [target for target, names in found.items() if not names]
    if unknown or not wanted:
        known = sorted({name.rpartition(".")[2] for name in layers})
        what = f"names layers that this model does not have: {', '.join(unknown)}" if unknown else "is an empty list"
        raise ModelError(f"method.target_modules {what}.", todo=f"Choose from {', '.join(known)}, or use all-linear.")
    chosen = {name for names in found.values() for name in names}
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    if tied and any(layers[name] is head for name in chosen):
        raise UnsupportedModelError(
            "method.target_modules names the output head, which shares its weight with the input embedding here.",
            todo="Leave the head out.",
        )
    return [name for name in layers if name in chosen]


def _lora_config(model: PreTrainedModel, method: MethodConfig, targets: list[str]) -> LoraConfig:
    layers = linear_layers(model)
    transposed = {
        isinstance(m, Conv1D) or (isinstance(m, Int8Linear | NF4Linear) and m.from_conv1d)
        for m in map(layers.get, targets)
    }
    if len(transposed) > 1:
        raise UnsupportedModelError(
            "method.target_modules mixes layers that store their weight in two different ways (Linear and Conv1D).",
            todo="Leave one kind out.",
        )
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=method.rank,
        lora_alpha=cast(int, method.alpha),  # PEFT says int and divides
        lora_dropout=method.dropout,
        use_dora=method.kind == "dora",
        use_rslora=method.rslora,
        target_modules=_shortest(targets, [name for name, _ in model.named_modules()]),
        fan_in_fan_out=transposed.pop(),
    )
    config._register_custom_module(LORA_LAYERS)
    return config


def _shortest(targets: list[str], modules: Iterable[str]) -> list[str]:
    """The last parts of the names if those mean just the same layers in PEFT's matching, else the full names."""
    last = {name.rpartition(".")[2] for name in targets}
    meant = {name for name in modules if name.rpartition(".")[2] in last}
    return sorted(last) if meant == set(targets) else targets


def _initialise(model: nn.Module, seed: int) -> None:
    """LoRA's usual start (A uniform, B zero, DoRA's magnitude the weight's), from the seed and the layer's name alone.

    Drawn in float32 on the CPU: neither rank, device, dtype of the base nor the caller's RNG changes a number.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        bound = 1 / math.sqrt(down.shape[1])
        first = torch.empty(down.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        down.data = first.to(down.device)
        up.data = torch.zeros_like(up, dtype=torch.float32)
        if ADAPTER in layer.lora_magnitude_vector:
            weight = layer.get_base_layer().weight.detach()
            # in PEFT's own words: the norm of each output's row, whichever way round the weight is stored
            norm = torch.linalg.vector_norm(weight.float(), dim=0 if layer.fan_in_fan_out else 1)
            layer.lora_magnitude_vector[ADAPTER].weight.data = norm


@dataclass(frozen=True)
class Trained:
    """What training has to show: its model, and the trained weights by their names in it, whole and on the CPU (the
    model may hold only parts of them)."""

    model: nn.Module
    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Trained:
        """A model that holds its weights whole."""
        return cls(model, {name: parameter.detach().cpu() for name, parameter in trainable_parameters(model)})


def save_trained(
    trained: Trained,
    path: Path,
    *,
    method: MethodConfig,
    model_config: ModelConfig,
    tokenizer: Any,
    base: TrainedOn | None = None,
) -> None:
    """Writes what was trained, and the tokenizer, to the folder `path`: whole or not at all. An adapter is told its
    `base`; None: the model as it is now."""
    with committed_folder(path) as folder:
        if method.kind == "full":
            save_full_model(cast(PreTrainedModel, trained.model), folder, model_config, weights=trained.weights)
        else:
            _save_adapter(cast(PeftModel, trained.model), trained.weights, folder, model_config)
            (base or TrainedOn.of(model_config)).write(folder)
        tokenizer.save_pretrained(folder)


def _name_in_file(parameter: str) -> str:
    """As PEFT writes it: without the adapter's name, and DoRA's magnitude as it was before it became a layer."""
    magnitude = "lora_magnitude_vector"
    return parameter.replace(f".{magnitude}.{ADAPTER}.weight", f".{magnitude}").replace(f".{ADAPTER}.", ".")


def _save_adapter(model: PeftModel, trained: Mapping[str, Tensor], folder: Path, model_config: ModelConfig) -> None:
    # Not PEFT's own selection: that leaves out layers that `model`, a stage of a pipeline perhaps, does not have.
    weights = {_name_in_file(name): weight.detach().cpu().contiguous() for name, weight in trained.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path = base_name(model_config)
    config.revision = model_config.revision
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set; the same run writes the same file
    config.save_pretrained(str(folder))


def save_full_model(
    model: PreTrainedModel, folder: Path, model_config: ModelConfig, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """A plain Hugging Face folder, of `weights` or the model's own.

    Training had the cache off; the file says what the base model says about it.
    """
    text_config = model.config.get_text_config()
    during = text_config.use_cache
    text_config.use_cache = read_config(model_config).get_text_config().use_cache
    try:
        model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    finally:
        text_config.use_cache = during


def base_name(model_config: ModelConfig) -> str:
    """What an adapter says about its base: an absolute path, or the hub name as it was given."""
    path = Path(model_config.path).expanduser()
    if not path.is_dir() and is_hub_name(model_config.path):
        return model_config.path
    return str(model_folder(model_config))

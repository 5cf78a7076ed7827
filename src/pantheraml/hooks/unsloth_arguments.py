"""Arguments that scripts written for Unsloth pass to `FastLanguageModel`, and which ask for little or nothing here.

Each is honored, accepted with a warning that it has no effect, or rejected with an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.models.adapters import bypassed_by_kernels, linear_layers, target_layers
from pantheraml.models.model_kind import CLASSIFIER, TEXT, VISION, ModelKind
from pantheraml.models.peft_arguments import PASSED_ON, LayerChoice, matched_names

logger = log.get(__name__)

_FOR_VLLM = "it configures vLLM, which only fast_inference=True uses"

# Values that ask for nothing; any other value is an error.
LOADING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "fix_tokenizer": (True, False), "resize_model_vocab": (None,),
    "qat_scheme": (None,), "text_only": (None, True), "use_exact_model_name": (False, True),
}  # fmt: skip
ADAPTER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "loftq_config": (None, {}), "qat_scheme": (None,),
    "finetune_language_layers": (True,),
}  # fmt: skip
# Arguments without effect, and the reason.
LOADING_UNUSED: Mapping[str, str] = {
    "max_lora_rank": _FOR_VLLM, "gpu_memory_utilization": _FOR_VLLM, "float8_kv_cache": _FOR_VLLM,
    "disable_log_stats": _FOR_VLLM,
    "offload_embedding": "embeddings stay on the model's device",
    "attn_implementation": "attention is chosen so that packed documents do not see each other",
    "unsloth_force_compile": "layers are fused or compiled where that was measured to be faster",
    "unsloth_tiled_mlp": "the MLP is not computed in tiles",
    "device_map_planner_kwargs": "memory for activations is not part of a device map",
}  # fmt: skip
ADAPTER_UNUSED: Mapping[str, str] = {
    "temporary_location": "nothing is written to disk",
    "finetune_vision_layers": "only text models are loaded",
    "finetune_audio_layers": "only text models are loaded",
}  # fmt: skip


def check_others(
    others: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    unused: Mapping[str, str],
    *,
    function: str,
    parameters: Iterable[str],
) -> None:
    """Warn of arguments without effect; ConfigError for one that is unknown, or whose value cannot be honored."""
    for name, value in others.items():
        if name in unused:
            if value is not None and value is not False:
                logger.warning("%s: %s=%r has no effect: %s", function, name, value, unused[name])
        elif name not in neutral and not (name in PASSED_ON and function == "get_peft_model"):
            known = [other for other in (*parameters, *neutral, *unused) if other != "others"]
            raise ConfigError(
                f"FastLanguageModel.{function} has no argument {name!r}.", fix=f"Its arguments are {', '.join(known)}."
            )
        elif value not in neutral.get(name, (value,)):
            raise ConfigError(f"FastLanguageModel.{function} does not support {name}={value!r}.", fix="Remove it.")


def kind_for(auto_model: Any, labels: Mapping[str, Any]) -> ModelKind:
    """Return the kind of model that `auto_model`, transformers' class to load by, or a classifier's labels ask for."""
    name = getattr(auto_model, "__name__", str(auto_model))
    if name.endswith("ForSequenceClassification") or (auto_model is None and labels):
        return CLASSIFIER.labelled(labels)
    if labels:
        raise ConfigError(
            f"from_pretrained got {', '.join(labels)}, which a model of auto_model={name} does not have.",
            fix="Remove auto_model to load a classifier.",
        )
    if auto_model is None or name.endswith("ForCausalLM"):
        return TEXT
    if auto_model is VISION.auto_model:
        return VISION
    raise ConfigError(
        f"from_pretrained does not support auto_model={name}: models that answer in text, and classifiers, are loaded.",
        fix="Remove it, or use another library for this model.",
    )


def chosen_targets(
    model: PreTrainedModel,
    targets: str | Iterable[str] | None,
    *,
    attention: bool,
    mlp: bool,
    choice: LayerChoice | None = None,
) -> str | list[str]:
    """Return the target modules without names that the model lacks, and without the parts that are switched off.

    Names that the model lacks are ignored if others match, as in PEFT; so are those that PEFT refuses. A string that
    no layer is named by is a regular expression for whole names, as in PEFT.
    """
    if targets is None:
        targets = "all-linear"
    named = _by_pattern(model, targets) if isinstance(targets, str) else _without_missing(model, list(targets))
    if choice is not None and choice != LayerChoice():
        named = choice.of(target_layers(model, named))
    if attention and mlp:
        return named
    off = [word for words, on in ((_ATTENTION, attention), (_MLP, mlp)) if not on for word in words]
    kept = [name for name in target_layers(model, named) if not any(word in name.lower() for word in off)]
    if not kept:
        raise ConfigError(
            f"No layer of {targets!r} is left to train: finetune_attention_modules={attention}, "
            f"finetune_mlp_modules={mlp}.",
            fix="Set one of them to True, or choose other target_modules.",
        )
    return kept


def _by_pattern(model: PreTrainedModel, targets: str) -> str | list[str]:
    layers = linear_layers(model)
    if targets == "all-linear" or any(name == targets or name.endswith(f".{targets}") for name in layers):
        return targets
    return matched_names(targets, layers) or targets  # an error says what is wrong with it


_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "feed_forward", "ffn", "expert", "moe")


def _without_missing(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """Return the names without those that no layer has, or that cannot be adapted, if others remain."""
    layers = linear_layers(model)
    present = [t for t in targets if any(name == t or name.endswith(f".{t}") for name in layers)]
    missing = [target for target in targets if target not in present]
    if missing and present:
        known = sorted({name.rpartition(".")[2] for name in layers})
        logger.warning(
            "target_modules that this model does not have are ignored: %s (it has %s)",
            ", ".join(missing),
            ", ".join(known),
        )
    bypassed = [target for target in present if bypassed_by_kernels(model, target.rpartition(".")[2])]
    kept = [target for target in present if target not in bypassed]
    if not kept:
        return targets  # an error says what is wrong with them
    if bypassed:
        logger.warning("target_modules that Mamba's kernels bypass are ignored: %s", ", ".join(bypassed))
    return kept

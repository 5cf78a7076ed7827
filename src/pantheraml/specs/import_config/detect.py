"""Which trainer a config file is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ConfigError

SOURCES = {"axolotl": "Axolotl", "llama-factory": "LLaMA-Factory"}
"""Name on the command line -> name of the trainer."""

_MARKS = {
    "axolotl": (
        "base_model adapter micro_batch_size sequence_len num_epochs sample_packing val_set_size lora_r"
        " lora_target_linear datasets optimizer lr_scheduler pretraining_dataset"
    ),
    "llama-factory": (
        "model_name_or_path stage finetuning_type template cutoff_len per_device_train_batch_size num_train_epochs"
        " lora_rank lora_target lr_scheduler_type dataset dataset_dir do_train"
    ),
}
_NEEDED = {"axolotl": "base_model", "llama-factory": "model_name_or_path"}
_OTHERS = (
    ({"compute_environment", "distributed_type"}, "It is a config of Accelerate, which starts processes."),
    ({"zero_optimization", "train_micro_batch_size_per_gpu"}, "It is a config of DeepSpeed."),
    ({"train_dataset", "dist_config", "model_class"}, "It is a config of LLaMA-Factory's v1, which is not converted."),
)


def detect(values: Mapping[str, Any], path: Path) -> str:
    """Return a key of SOURCES; ConfigError if it is neither of them, or could be both."""
    if isinstance(values.get("model"), dict) and "path" in values["model"]:
        raise ConfigError(f"{path} is already a config of PantheraML.", fix=f"Train with it: pantheraml train {path}")
    for keys, what in _OTHERS:
        if keys & values.keys():
            raise _neither(path, what)
    score = {name: sum(key in values for key in marks.split()) for name, marks in _MARKS.items()}
    needed = [name for name, key in _NEEDED.items() if key in values]
    if len(needed) == 1:
        return needed[0]
    best = max(score, key=lambda name: score[name])
    if score[best] < 2:
        raise _neither(path, f"It has none of the keys {' and '.join(_NEEDED.values())}.")
    if list(score.values()).count(score[best]) > 1:
        raise ConfigError(
            f"{path} could be a config of {' or '.join(SOURCES.values())}.",
            fix=f"Say which: --from {' or --from '.join(SOURCES)}",
        )
    return best


def _neither(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a training config of {' or '.join(SOURCES.values())}. {what}",
        fix=f"If it is one of them, say which: --from {' or --from '.join(SOURCES)}",
    )

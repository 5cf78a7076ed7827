"""Outcomes of a notebook, what is not supported by design and why, and the category of a notebook."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["ok", "error", "unsupported", "limit"]
OUTCOMES: dict[Outcome, str] = {
    "ok": "ran to its end",
    "error": "an error of ours",
    "unsupported": "not supported by design",
    "limit": "cannot be run by this tool",
}


@dataclass(frozen=True)
class Result:
    name: str
    category: str
    outcome: Outcome
    reason: str = ""
    """The error, or why it is not supported or not run."""
    cell: int | None = None
    where: str = ""
    """The deepest frames of the error."""
    seconds: float = 0.0
    copies: int = 1
    message: str = ""
    """What the product said where something is not supported by design."""
    losses: tuple[float, ...] = ()
    """Of all its training steps."""
    refused: tuple[str, ...] = ()
    """Saves that the product does not support, of those that the notebook leaves to its reader."""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", None, (), [])}


# The first pattern found in the code decides.
UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (r"FastSentenceTransformer", "embedding models: language models and classifiers are trained"),
    (r"WhisperFor|CsmFor|csm-1b", "speech models: models that answer in text are trained"),
    (r"kadirnar/Emilia", "audio in the training data"),
    (r"Temporal_Caption_Bench", "videos in the training data"),
    (r"launch_openenv", "RL environments that are servers (OpenEnv): any reward function can call one"),
    (r"SyntheticDataKit", "data made by a vLLM server (synthetic-data-kit)"),
    (r"qat_scheme|executorch", "quantization-aware training and export with torchao / ExecuTorch"),
    (r"[Dd]iffusion[Gg]emma", "diffusion language models: the loss and the sampling are not autoregressive"),
    (
        r"deepseek_ocr|DeepSeek-OCR|ERNIE-4.5-VL|PaddleOCR-VL",
        "model code that comes with the checkpoint (trust_remote_code)",
    ),
)
"""Reasons for errors of ours that are on purpose."""
LIMITS: tuple[tuple[str, str], ...] = (
    (r"\bSNAC\b|xcodec2|sparktts|outetts|OuteTTS", "needs an audio codec to prepare its data"),
    (r"nemo_gym|NeMo-Gym|nemo-gym", "needs an RL environment that is a server of its own (NeMo Gym)"),
    (r"OpenSpiel|openenv", "needs an RL environment that is a server of its own (OpenEnv)"),
    (r"synthetic-data-kit", "needs data made by a vLLM server (synthetic-data-kit)"),
    (r"unsloth studio|unsloth-studio|Unsloth Studio|studio/setup\.sh", "installs another program (Unsloth Studio)"),
    (r"\bsglang\b", "needs an inference server on a GPU (SGLang)"),
)
"""What this tool cannot provide."""


OLD_REWARDS = "its reward functions read texts, which TRL passed them before 0.24"
"""Why a reward function of a notebook fails with the installed TRL, whatever trains."""


def not_possible(code: str) -> str | None:
    """Return why this tool cannot run the code, or None."""
    if reason_not_supported(code) is not None:
        return None  # it runs until it gets the error that says so
    return next((reason for pattern, reason in LIMITS if re.search(pattern, code)), None)


def reason_not_supported(code: str) -> str | None:
    """Return why the product does not support what the code does, or None: then an error of ours is a defect."""
    return next((reason for pattern, reason in UNSUPPORTED if re.search(pattern, code)), None)


def category_of(name: str, code: str) -> str:
    """Return the kind of training."""
    if "FastSentenceTransformer" in code:
        return "embeddings"
    if "num_labels" in code:
        return "classifiers"
    if re.search(r"TTS|Whisper|Audio|Multimodal", name):
        return "speech and audio"
    vision = "FastVisionModel" in code and not re.search(r"Reinforcement|\(E2B\)_GRPO", name)
    if re.search(r"GRPOTrainer\(", code):
        return "GRPO, vision" if vision else "GRPO"
    if vision or name.endswith("-Vision"):
        return "vision"
    if re.search(r"(DPO|ORPO|KTO)Trainer\(", code):
        return "preferences (DPO, ORPO)"
    if "UnslothTrainer(" in code:
        return "continued pretraining"
    if re.search(r"(SFT)?Trainer\(", code):
        return "supervised fine-tuning"
    return "inference and tools"

"""Outcomes of a notebook, what is not supported by design and why, and the category of a notebook."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

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
    losses: tuple[float, ...] = ()
    """Of all its training steps."""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", None, ())}


# The first pattern found in the code decides.
UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (r"FastSentenceTransformer", "embedding models: decoders with a language-model head are trained"),
    (r"ForSequenceClassification|num_labels", "encoders with a classification head: decoders are trained"),
    (r"[Ww]hisper|\bSNAC\b|xcodec2|sparktts|outetts|CsmFor|OuteTTS|csm-1b", "speech models and audio codecs"),
    (r"kadirnar/Emilia", "audio in the training data"),
    (r"nemo_gym|NeMo-Gym|nemo-gym", "an RL environment that is a server of its own (NeMo Gym)"),
    (r"launch_openenv|OpenSpiel|openenv", "an RL environment that is a server of its own (OpenEnv)"),
    (r"SyntheticDataKit|synthetic-data-kit", "data made by a vLLM server (synthetic-data-kit)"),
    (r"unsloth studio|unsloth-studio|Unsloth Studio|studio/setup\.sh", "installs another program (Unsloth Studio)"),
    (r"qat_scheme|executorch", "quantization-aware training and export with torchao / ExecuTorch"),
    (r"diffusiongemma", "diffusion language models: the loss and the sampling are not autoregressive"),
    (r"deepseek_ocr|DeepSeek-OCR", "model code that comes with the checkpoint (trust_remote_code)"),
)
LIMITS: tuple[tuple[str, str], ...] = ((r"\bsglang\b", "an inference server that needs a GPU (SGLang)"),)
"""What this tool cannot run."""


def decided(code: str) -> tuple[Outcome, str] | None:
    """Return the outcome that is known without running the code, and why."""
    for outcome, patterns in (("unsupported", UNSUPPORTED), ("limit", LIMITS)):
        for pattern, reason in patterns:
            if re.search(pattern, code):
                return cast(Outcome, outcome), reason
    return None


def category_of(name: str, code: str) -> str:
    """Return the kind of training."""
    if re.search(r"FastSentenceTransformer|num_labels", code):
        return "encoders and embeddings"
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

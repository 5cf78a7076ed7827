"""Suite of one H200: PantheraML and its peers in every setting of the comparison, most important first.

GPU time is limited, so cases are ordered by worth: those that a target names, then our path through TRL, then peers
that are neither the fastest nor the leanest.
"""

from __future__ import annotations

from dataclasses import replace

from table import Table

from suites.case import QUANTIZED, Case
from suites.comparison import COLUMNS, Comparison, StartLimit, Targets

LEAN = "offload"
"""Our leanest mode: layer inputs in pinned host memory, everything else recomputed. Over fp8 weights `full`, which
keeps the inputs on the GPU, is lean enough, and allows CUDA graphs."""

OURS = Case("", system="pantheraml", path="cli", model="8b", method="lora", precision="fp8", minutes=1.2)
OURS_TRL = replace(OURS, path="trl")
UNSLOTH = replace(OURS_TRL, system="unsloth", precision="bf16", minutes=1.2)
UNSLOTH_FP8 = replace(UNSLOTH, precision="fp8", minutes=4)
LIGER = replace(UNSLOTH, system="liger", minutes=1.2)
HF = replace(UNSLOTH, system="hf", minutes=1.2)
OURS_NF4, OURS_TRL_NF4 = (
    replace(case, method="qlora", precision="nf4", checkpointing=LEAN) for case in (OURS, OURS_TRL)
)
OURS_1B, OURS_TRL_1B, UNSLOTH_1B, LIGER_1B, HF_1B = (
    replace(case, model="1b", minutes=0.7) for case in (OURS, OURS_TRL, UNSLOTH, LIGER, HF)
)
OURS_DPO, UNSLOTH_DPO, UNSLOTH_DPO_FP8 = (
    replace(case, trainer="dpo", seq=1024) for case in (OURS_TRL, UNSLOTH, UNSLOTH_FP8)
)
OURS_GRPO, UNSLOTH_GRPO, UNSLOTH_GRPO_FP8 = (
    replace(case, trainer="grpo", batch=8, seq=1024) for case in (OURS_TRL, UNSLOTH, UNSLOTH_FP8)
)

CASES = (
    # 8B LoRA, 4 x 2048: the headline, and start-up time without and with compiled kernels
    replace(OURS, name="ours-8b-lora-fp8", cache="fresh", minutes=1.5, alone=True),
    replace(UNSLOTH, name="unsloth-8b-lora"),
    replace(UNSLOTH_FP8, name="unsloth-8b-lora-fp8"),
    replace(OURS, name="ours-8b-lora-bf16", precision="bf16"),
    replace(OURS_TRL, name="ours-trl-8b-lora-fp8"),
    replace(OURS, name="ours-8b-lora-fp8-warm", minutes=1, alone=True),
    # memory-lean
    replace(OURS, name="ours-8b-lora-lean", checkpointing="full"),
    replace(UNSLOTH, name="unsloth-8b-lora-lean", checkpointing="unsloth"),
    replace(OURS_NF4, name="ours-8b-qlora-lean"),
    replace(UNSLOTH, name="unsloth-8b-qlora-lean", method="qlora", precision="nf4", checkpointing="unsloth"),
    replace(OURS_NF4, name="ours-8b-qlora-lean-quantized", model="8b" + QUANTIZED),
    # uneven documents, packed
    replace(OURS, name="ours-8b-lora-uneven", data="uneven"),
    replace(UNSLOTH, name="unsloth-8b-lora-uneven", data="uneven"),
    # 1B
    replace(OURS_1B, name="ours-1b-lora-fp8"),
    replace(UNSLOTH_1B, name="unsloth-1b-lora"),
    replace(OURS_1B, name="ours-1b-lora-bf16", precision="bf16"),
    replace(
        OURS_1B,
        name="ours-1b-full",
        method="full",
        precision="bf16",
        settings={"train.weights": "bf16", "train.optimizer": "adamw_bf16"},
    ),
    replace(
        OURS_1B,
        name="ours-1b-full-fp8",
        method="full",
        settings={"train.weights": "bf16", "train.optimizer": "adamw_bf16"},
    ),
    replace(LIGER_1B, name="liger-1b-full", method="full"),
    replace(
        OURS_1B,
        name="ours-1b-full-lean",
        method="full",
        precision="bf16",
        checkpointing=LEAN,
        settings={"train.weights": "bf16", "train.optimizer": "adamw8bit"},
    ),
    replace(UNSLOTH_1B, name="unsloth-1b-full", method="full", checkpointing="unsloth"),
    # longer sequences
    replace(OURS, name="ours-8b-lora-fp8-4096", batch=2, seq=4096),
    replace(OURS_TRL, name="ours-trl-8b-lora-fp8-4096", batch=2, seq=4096),
    replace(UNSLOTH, name="unsloth-8b-lora-4096", batch=2, seq=4096),
    replace(UNSLOTH_FP8, name="unsloth-8b-lora-fp8-4096", batch=2, seq=4096),
    # preference pairs, 4 x 2 x 1024, and the training part of GRPO, 8 x 1024
    replace(OURS_DPO, name="ours-trl-8b-dpo-fp8"),
    replace(UNSLOTH_DPO, name="unsloth-8b-dpo"),
    replace(UNSLOTH_DPO_FP8, name="unsloth-8b-dpo-fp8"),
    replace(OURS_DPO, name="ours-trl-8b-dpo-bf16", precision="bf16"),
    replace(OURS_GRPO, name="ours-trl-8b-grpo-fp8"),
    replace(UNSLOTH_GRPO, name="unsloth-8b-grpo"),
    replace(UNSLOTH_GRPO_FP8, name="unsloth-8b-grpo-fp8"),
    replace(OURS_GRPO, name="ours-trl-8b-grpo-bf16", precision="bf16"),
    # the same, of uneven lengths: padded by TRL
    replace(OURS_DPO, name="ours-trl-8b-dpo-uneven", data="uneven"),
    replace(UNSLOTH_DPO, name="unsloth-8b-dpo-uneven", data="uneven"),
    replace(OURS_GRPO, name="ours-trl-8b-grpo-uneven", data="uneven"),
    replace(UNSLOTH_GRPO, name="unsloth-8b-grpo-uneven", data="uneven"),
    # our path through TRL, and the other peers
    replace(OURS_TRL, name="ours-trl-8b-lora-uneven", data="uneven"),
    replace(OURS_TRL, name="ours-trl-8b-lora-lean", checkpointing="full"),
    replace(OURS_TRL_NF4, name="ours-trl-8b-qlora-lean"),
    replace(OURS_TRL_NF4, name="ours-trl-8b-qlora-lean-quantized", model="8b" + QUANTIZED),
    replace(OURS_TRL, name="ours-trl-8b-lora-bf16", precision="bf16"),
    replace(OURS_TRL_1B, name="ours-trl-1b-lora-fp8"),
    replace(OURS_TRL_1B, name="ours-trl-1b-lora-bf16", precision="bf16"),
    replace(OURS_TRL_1B, name="ours-trl-1b-full", method="full", precision="bf16"),
    replace(OURS_TRL_1B, name="ours-trl-1b-full-fp8", method="full"),
    replace(OURS_TRL_1B, name="ours-trl-1b-full-lean", method="full", precision="bf16", checkpointing=LEAN),
    replace(LIGER, name="liger-8b-lora"),
    replace(HF, name="hf-8b-lora"),
    replace(UNSLOTH_FP8, name="unsloth-8b-lora-uneven-fp8", data="uneven"),
    replace(HF, name="hf-8b-qlora-lean", method="qlora", precision="nf4", checkpointing="full"),
    replace(LIGER_1B, name="liger-1b-lora"),
    replace(HF_1B, name="hf-1b-lora"),
    replace(HF_1B, name="hf-1b-full", method="full"),
)

QLORA_QUANTIZED = "8B QLoRA 4x2048, lean, calibrated"

TARGETS = Targets(
    comparisons=(
        Comparison("8B LoRA 4x2048", "ours-8b-lora-fp8", ("unsloth-8b-lora", "unsloth-8b-lora-fp8"), 1.6, 0.95),
        Comparison("8B LoRA 4x2048", "ours-trl-8b-lora-fp8", ("unsloth-8b-lora", "unsloth-8b-lora-fp8"), 1.6, 0.95),
        Comparison("8B LoRA 4x2048, Unsloth's default", "ours-8b-lora-fp8", ("unsloth-8b-lora",), 1.8, None),
        Comparison("8B LoRA 4x2048, Unsloth's default", "ours-trl-8b-lora-fp8", ("unsloth-8b-lora",), 1.8, None),
        Comparison("8B LoRA 4x2048, both bf16", "ours-8b-lora-bf16", ("unsloth-8b-lora",), 1.1, None),
        Comparison("8B LoRA 4x2048, both bf16", "ours-trl-8b-lora-bf16", ("unsloth-8b-lora",), 1.1, None),
        Comparison(
            "8B LoRA 2x4096",
            "ours-8b-lora-fp8-4096",
            ("unsloth-8b-lora-4096", "unsloth-8b-lora-fp8-4096"),
            1.6,
            0.95,
        ),
        Comparison(
            "8B LoRA 2x4096",
            "ours-trl-8b-lora-fp8-4096",
            ("unsloth-8b-lora-4096", "unsloth-8b-lora-fp8-4096"),
            1.6,
            0.95,
        ),
        Comparison("8B LoRA 4x2048, lean", "ours-8b-lora-lean", ("unsloth-8b-lora-lean",), 1.8, 0.8),
        Comparison("8B LoRA 4x2048, lean", "ours-trl-8b-lora-lean", ("unsloth-8b-lora-lean",), 1.8, 0.8),
        Comparison("8B QLoRA 4x2048, lean", "ours-8b-qlora-lean", ("unsloth-8b-qlora-lean",), 1.5, 1.0),
        Comparison("8B QLoRA 4x2048, lean", "ours-trl-8b-qlora-lean", ("unsloth-8b-qlora-lean",), 1.5, 1.0),
        Comparison(QLORA_QUANTIZED, "ours-8b-qlora-lean-quantized", ("unsloth-8b-qlora-lean",), 1.5, 1.0),
        Comparison(QLORA_QUANTIZED, "ours-trl-8b-qlora-lean-quantized", ("unsloth-8b-qlora-lean",), 1.5, 1.0),
        Comparison("1B LoRA 4x2048", "ours-1b-lora-fp8", ("unsloth-1b-lora",), 1.7, 1.0),
        Comparison("1B LoRA 4x2048", "ours-trl-1b-lora-fp8", ("unsloth-1b-lora",), 1.7, 1.0),
        Comparison("1B LoRA 4x2048, both bf16", "ours-1b-lora-bf16", ("unsloth-1b-lora",), 1.15, None),
        Comparison("1B LoRA 4x2048, both bf16", "ours-trl-1b-lora-bf16", ("unsloth-1b-lora",), 1.15, None),
        Comparison("1B full 4x2048", "ours-1b-full", ("liger-1b-full", "unsloth-1b-full"), 1.3, None),
        Comparison("1B full 4x2048, fp8 matmuls", "ours-1b-full-fp8", ("liger-1b-full", "unsloth-1b-full"), 1.3, None),
        Comparison("1B full 4x2048", "ours-trl-1b-full", ("liger-1b-full", "unsloth-1b-full"), 1.3, None),
        Comparison(
            "1B full 4x2048, fp8 matmuls", "ours-trl-1b-full-fp8", ("liger-1b-full", "unsloth-1b-full"), 1.3, None
        ),
        Comparison("1B full 4x2048, lean", "ours-1b-full-lean", ("liger-1b-full", "unsloth-1b-full"), None, 1.0),
        Comparison("1B full 4x2048, lean", "ours-trl-1b-full-lean", ("liger-1b-full", "unsloth-1b-full"), None, 1.0),
        Comparison(
            "8B LoRA, uneven documents, packed",
            "ours-8b-lora-uneven",
            ("unsloth-8b-lora-uneven", "unsloth-8b-lora-uneven-fp8"),
            1.6,
            0.95,
        ),
        Comparison(
            "8B LoRA, uneven documents, packed",
            "ours-trl-8b-lora-uneven",
            ("unsloth-8b-lora-uneven", "unsloth-8b-lora-uneven-fp8"),
            1.6,
            0.95,
        ),
        Comparison("8B LoRA, DPO 4x2x1024", "ours-trl-8b-dpo-fp8", ("unsloth-8b-dpo", "unsloth-8b-dpo-fp8"), 1.5, None),
        Comparison(
            "8B LoRA, GRPO 8x1024", "ours-trl-8b-grpo-fp8", ("unsloth-8b-grpo", "unsloth-8b-grpo-fp8"), 1.5, None
        ),
        Comparison("8B LoRA, DPO, uneven", "ours-trl-8b-dpo-uneven", ("unsloth-8b-dpo-uneven",), 1.5, None),
        Comparison("8B LoRA, GRPO, uneven", "ours-trl-8b-grpo-uneven", ("unsloth-8b-grpo-uneven",), 1.5, None),
    ),
    starts=(
        StartLimit("8B LoRA, cold kernel cache", "ours-8b-lora-fp8", 60),
        StartLimit("8B LoRA, warm kernel cache", "ours-8b-lora-fp8-warm", 30),
    ),
)

TABLE = Table(
    title="One H200: PantheraML and its peers",
    how=(
        "Random weights in the shapes of Llama-3.1-8B and Llama-3.2-1B, random tokens, LoRA of rank 16 on all linear"
        " layers, fused AdamW; each case in its own process, peers through TRL's SFTTrainer, or the trainer in the"
        " case's name (DPO: the reference is the model without adapters; GRPO: the training part alone, on given"
        " completions, half of each sequence); ours with the extra"
        " `flash` from commit `fdbe8ad` on, except `05ea92db5` and `a7a1573ae`. Tokens per second, without padding:"
        " median of the steps after the third (TRL cases synchronized with the GPU up to commit `3fa1d81`). Peak: the"
        " maximum that torch allocated in training. First step: from the start of the process."
    ),
    columns=COLUMNS,
    summary=TARGETS.markdown,
)

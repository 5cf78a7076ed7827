"""Model families that notebooks load, by hub name: architecture, special tokens, and how their chat templates look.

A family's config is that of its architecture with small sizes; positions are those of the real models, since notebooks
ask for more (RoPE scaling). The first pattern that matches a name decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turns:
    """A chat format of plain turns: text before and after a message, and what opens an answer."""

    before: str
    """With {role}."""
    after: str
    answer: str
    roles: dict[str, str] = field(default_factory=dict)
    """Names of roles that differ."""
    image: str = ""
    """Placeholder of an image in a message."""
    audio: str = ""
    bos: bool = True


@dataclass(frozen=True)
class Family:
    model_type: str
    bos: str | None
    eos: str
    pad: str | None
    turns: Turns | None = None
    special: tuple[str, ...] = ()
    """Tokens that are never split, beyond those of the turns."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Config values beyond the common small ones."""
    processor: str | None = None
    """Name of the recipe in processors.py; None: text only."""
    config_only: bool = False
    """The product refuses the architecture when it reads the config: no weights are made."""
    encoder: bool = False
    """Its published weights fill in masks."""


_CHATML = Turns("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n", bos=False)
_LLAMA_3 = Turns(
    "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_GEMMA = Turns(
    "<start_of_turn>{role}\n", "<end_of_turn>\n", "<start_of_turn>model\n",
    roles={"assistant": "model", "system": "user", "developer": "user"},
)  # fmt: skip
_GEMMA_4 = Turns("<|turn>{role}\n", "<turn|>\n", "<|turn>model\n", roles={"assistant": "model"})
_INST = Turns("[INST]{role}: ", "[/INST]", "", bos=True)
_ZEPHYR = Turns("<|{role}|>\n", "</s>\n", "<|assistant|>\n", bos=False)
_PHI_3 = Turns("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n", bos=False)
_PHI_4 = Turns("<|im_start|>{role}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>", bos=False)
_HARMONY = Turns(
    "<|start|>{role}<|message|>", "<|end|>", "<|start|>assistant", roles={"assistant": "assistant<|channel|>final"},
    bos=False,
)  # fmt: skip
_GRANITE = Turns(
    "<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>",
    bos=False,
)  # fmt: skip
_GLM = Turns("<|{role}|>\n", "", "<|assistant|>\n", bos=False)
_ERNIE = Turns("{role}: ", "\n", "Assistant: ", roles={"user": "User", "assistant": "Assistant"})
_MUSE = Turns(
    "<|start|>{role}<|message|>", "<|eot|>", "<|start|>assistant to=user<|message|>",
    roles={"assistant": "assistant to=user"}, image="<|patch|>",
)  # fmt: skip

_LLAMA_3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_QWEN_TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>",
)  # fmt: skip
_GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>", "<|return|>")
_MISTRAL_TOKENS = (
    "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[THINK]",
    "[/THINK]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip


def _llama_3(turns: Turns | None, positions: int) -> Family:
    return Family(
        "llama", "<|begin_of_text|>", "<|eot_id|>" if turns else "<|end_of_text|>",
        "<|finetune_right_pad_id|>", turns, (*_LLAMA_3_TOKENS, "<|end_of_text|>"),
        {"max_position_embeddings": positions},
    )  # fmt: skip


def _qwen(model_type: str, *, chat: bool = True, processor: str | None = None, **sizes: Any) -> Family:
    turns = (
        _CHATML
        if processor is None
        else Turns(
            _CHATML.before,
            _CHATML.after,
            _CHATML.answer,
            image="<|vision_start|><|image_pad|><|vision_end|>",
            bos=False,
        )
    )
    return Family(
        model_type, None, "<|im_end|>" if chat else "<|endoftext|>", "<|vision_pad|>", turns, _QWEN_TOKENS, sizes,
        processor,
    )  # fmt: skip


def _gemma(model_type: str, *, chat: bool = True, processor: str | None = None, **sizes: Any) -> Family:
    image = {"gemma3": "<start_of_image>", "gemma3n": "<image_soft_token>"}.get(processor or "", "")
    audio = "<audio_soft_token>" if processor == "gemma3n" else ""
    turns = Turns(_GEMMA.before, _GEMMA.after, _GEMMA.answer, _GEMMA.roles, image, audio)
    extra = ("<audio_soft_token>", "<start_of_audio>", "<end_of_audio>") if model_type.startswith("gemma3n") else ()
    return Family(
        model_type, "<bos>", "<end_of_turn>" if chat and model_type != "gemma" else "<eos>", "<pad>",
        turns if chat else None, (*_GEMMA_TOKENS, *extra), sizes, processor,
    )  # fmt: skip


def _mistral(
    model_type: str, positions: int, *, chat: bool = True, processor: str | None = None, **sizes: Any
) -> Family:
    turns = Turns(_INST.before, _INST.after, _INST.answer, image="[IMG]" if processor else "")
    sizes = {"max_position_embeddings": positions, **sizes} if processor is None else sizes
    return Family(model_type, "<s>", "</s>", "<pad>", turns if chat else None, _MISTRAL_TOKENS, sizes, processor)


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: tuple[tuple[str, Family], ...] = (
    (r"ModernBERT", Family(
        "modernbert", "[CLS]", "[SEP]", "[PAD]", None, ("[MASK]",), {"max_position_embeddings": 8192}, encoder=True,
    )),
    (r"gpt-oss", Family(
        "gpt_oss", "<|startoftext|>", "<|return|>", "<|endoftext|>", _HARMONY, _HARMONY_TOKENS,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "max_position_embeddings": 131072},
    )),
    (r"muse-glimmer", Family(
        "muse_glimmer", "<|begin_of_text|>", "<|end|>", "<|pad|>", _MUSE,
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|end_of_text|>", "<|patch|>", "<|image_start|>",
         "<|image_end|>", "<|video|>", "<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>"),
        processor="muse_glimmer",
    )),
    (r"diffusiongemma", Family("diffusion_gemma", "<bos>", "<eos>", "<pad>", config_only=True)),
    (r"gemma-4", Family(
        "gemma4", "<bos>", "<turn|>", "<pad>",
        Turns(_GEMMA_4.before, _GEMMA_4.after, _GEMMA_4.answer, _GEMMA_4.roles, "<|image|>", "<|audio|>"),
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|image|>", "<|image>", "<image|>",
         "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
        processor="gemma4",
    )),
    (r"gemma-3n", _gemma("gemma3n", processor="gemma3n")),
    (r"gemma-3-(270m|1b)|functiongemma", _gemma(
        "gemma3_text", sliding_window=32, max_position_embeddings=32768, query_pre_attn_scalar=16,
    )),
    (r"gemma-3-", _gemma("gemma3", processor="gemma3")),
    (r"gemma-2", _gemma(
        "gemma2", chat=False, sliding_window=32, max_position_embeddings=8192, query_pre_attn_scalar=16,
    )),
    (r"codegemma|gemma", _gemma("gemma", max_position_embeddings=8192)),
    (r"Qwen2\.5-VL", _qwen("qwen2_5_vl", processor="qwen2_5_vl")),
    (r"Qwen2-VL", _qwen("qwen2_vl", processor="qwen2_vl")),
    (r"Qwen3-VL", _qwen("qwen3_vl", processor="qwen3_vl")),
    (r"Qwen3\.[56]-\d+B-A", _qwen("qwen3_5_moe", processor="qwen3_5", **_MOE)),
    (r"Qwen3\.[56]", _qwen("qwen3_5", processor="qwen3_5")),
    (r"Qwen3-.*-A\dB|qwen3_moe", _qwen("qwen3_moe", max_position_embeddings=40960, norm_topk_prob=True, **_MOE)),
    (r"Qwen3-.*Base", _qwen("qwen3", chat=False, max_position_embeddings=32768)),
    (r"Qwen3", _qwen("qwen3", max_position_embeddings=40960)),
    (r"Qwen2(\.5)?-.*(Instruct|Coder)", _qwen("qwen2", max_position_embeddings=32768)),
    (r"Qwen2", _qwen("qwen2", chat=False, max_position_embeddings=32768)),
    (r"Llama-3\.2-\d+B-Vision", Family(
        "mllama", "<|begin_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>",
        Turns(_LLAMA_3.before, _LLAMA_3.after, _LLAMA_3.answer, image="<|image|>"), (*_LLAMA_3_TOKENS, "<|image|>"),
        processor="mllama",
    )),
    (r"Llama-3(\.[123])?-.*Instruct", _llama_3(_LLAMA_3, 131072)),
    (r"llama-3-8b", _llama_3(None, 8192)),
    (r"Llama-3\.", _llama_3(None, 131072)),
    (r"tinyllama", Family("llama", "<s>", "</s>", "<unk>", None, (), {"max_position_embeddings": 2048})),
    (r"zephyr", Family("mistral", "<s>", "</s>", "<unk>", _ZEPHYR, (), {
        "max_position_embeddings": 32768, "sliding_window": 4096,
    })),
    (r"Pixtral", _mistral("llava", 0, processor="pixtral")),
    (r"Ministral-3", _mistral("mistral3", 0, processor="mistral3", text="ministral3")),
    (r"Magistral", _mistral("mistral3", 0, processor="mistral3")),
    (r"mistral-7b-v0|Mistral-Nemo-Base", _mistral("mistral", 32768, chat=False)),
    (r"mistral", _mistral("mistral", 32768)),
    (r"Phi-4", Family(
        "llama", "<|endoftext|>", "<|im_end|>", "<|dummy_87|>", _PHI_4,
        ("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|endoftext|>"), {"max_position_embeddings": 16384},
    )),
    (r"Phi-3", Family(
        "llama", "<s>", "<|endoftext|>", "<|placeholder6|>", _PHI_3,
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"), {"max_position_embeddings": 4096},
    )),
    (r"granite-4\.0-h", Family(
        "granitemoehybrid", "<|end_of_text|>", "<|end_of_text|>", "<|pad|>", _GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>"), {
            "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64, "mamba_n_heads": 8,
            "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
            "layer_types": ["mamba", "attention"], "max_position_embeddings": 131072,
        },
    )),
    (r"granite", Family(
        "granite", "<|end_of_text|>", "<|end_of_text|>", "<|pad|>", _GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>"), {"max_position_embeddings": 32768},
    )),
    (r"Falcon-H1", Family(
        "falcon_h1", "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", _CHATML,
        ("<|im_start|>", "<|im_end|>"), {
            "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 1,
            "max_position_embeddings": 16384,
        },
    )),
    (r"LFM2\.5-VL|LFM2-VL", Family(
        "lfm2_vl", "<|startoftext|>", "<|im_end|>", "<|pad|>",
        Turns(_CHATML.before, _CHATML.after, _CHATML.answer, image="<image>"),
        ("<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        processor="lfm2_vl",
    )),
    (r"LFM2", Family(
        "lfm2", "<|startoftext|>", "<|im_end|>", "<|pad|>",
        Turns(_CHATML.before, _CHATML.after, _CHATML.answer), ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
         "max_position_embeddings": 128000},
    )),
    (r"GLM-4\.7-Flash", Family(
        "glm4_moe_lite", None, "<|endoftext|>", "<|pad|>", _GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"), {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1,
            "topk_group": 1, "max_position_embeddings": 202752, "num_key_value_heads": 4,
        },
    )),
    (r"ERNIE-4\.5-(?!VL)", Family("ernie4_5_moe", "<s>", "</s>", "<unk>", _ERNIE, (), {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "max_position_embeddings": 131072,
        "moe_layer_start_index": 1,
    })),
    (r"Nemotron-3-Nano", Family("nemotron_h", "<s>", "<|im_end|>", "<unk>", _CHATML, ("<|im_start|>", "<|im_end|>"), {
        "layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
        "max_position_embeddings": 262144,
    })),
)  # fmt: skip


def family_of(hub_name: str) -> Family | None:
    """Return the family of a model by its hub name, None if it is not known."""
    return next((family for pattern, family in FAMILIES if re.search(pattern, hub_name, re.IGNORECASE)), None)


_TEMPLATE = """
{%- macro text(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content is iterable -%}
    {%- for part in content -%}
      {%- if part.type == 'image' or part.type == 'image_url' -%}{{- IMAGE -}}
      {%- elif part.type == 'audio' -%}{{- AUDIO -}}
      {%- elif part.text is string -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set names = ROLES -%}
{{- BOS -}}
{%- if tools -%}{{- BEFORE.replace('{role}', names.get('system', 'system')) ~ (tools | tojson) ~ AFTER -}}{%- endif -%}
{%- for message in messages -%}
  {{- BEFORE.replace('{role}', names.get(message.role, message.role)) -}}
  {%- if message.thinking is string -%}{{- message.thinking ~ '\\n' -}}{%- endif -%}
  {{- text(message.content) -}}
  {%- for call in message.tool_calls or [] -%}{{- (call.function or call) | tojson -}}{%- endfor -%}
  {{- AFTER -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ANSWER -}}{%- endif -%}
"""


def chat_template(turns: Turns) -> str:
    """Return a Jinja template for a format of plain turns."""
    values = {
        "IMAGE": repr(turns.image), "AUDIO": repr(turns.audio), "ROLES": repr(turns.roles),
        "BOS": "bos_token" if turns.bos else "''", "BEFORE": repr(turns.before), "AFTER": repr(turns.after),
        "ANSWER": repr(turns.answer),
    }  # fmt: skip
    return re.sub(r"\b(" + "|".join(values) + r")\b", lambda match: values[match[1]], _TEMPLATE).strip()

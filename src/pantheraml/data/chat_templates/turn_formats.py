"""The chat formats that are plain turns, as their model cards describe them."""

from __future__ import annotations

from dataclasses import replace

from pantheraml.data.chat_templates.turn_format import TurnFormat

CHATML = TurnFormat(
    system="<|im_start|>system\n{content}{end}\n",
    user="<|im_start|>user\n{content}{end}\n",
    assistant="<|im_start|>assistant\n{content}{end}\n",
    others="<|im_start|>{role}\n{content}{end}\n",
    generation="<|im_start|>assistant\n",
    end_of_turn="<|im_end|>",
    bos=False,
)
LFM2 = replace(CHATML, bos=True)
LLAMA_3 = TurnFormat(
    system="<|start_header_id|>system<|end_header_id|>\n\n{content}{end}",
    user="<|start_header_id|>user<|end_header_id|>\n\n{content}{end}",
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{content}{end}",
    others="<|start_header_id|>{role}<|end_header_id|>\n\n{content}{end}",
    generation="<|start_header_id|>assistant<|end_header_id|>\n\n",
    end_of_turn="<|eot_id|>",
    trim=True,
)
# every conversation has a system turn; tools and their results need the tokenizer's own template
LLAMA_3_1 = replace(
    LLAMA_3,
    system="<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n{content}{end}",
    default_system="",
    others=None,
)
LLAMA_2 = TurnFormat(
    user="{bos}[INST] {content} [/INST]",
    assistant=" {content} {end}",
    generation="",
    system_in_user=("<<SYS>>\n", "\n<</SYS>>\n\n"),
    bos=False,
    trim=True,
    alternate=True,
)
MISTRAL = TurnFormat(user="[INST] {content} [/INST]", assistant=" {content}{end}", generation="", alternate=True)
GEMMA = TurnFormat(
    user="<start_of_turn>user\n{content}{end}\n",
    assistant="<start_of_turn>model\n{content}{end}\n",
    generation="<start_of_turn>model\n",
    end_of_turn="<end_of_turn>",
    trim=True,
    alternate=True,
)
GEMMA_3 = replace(GEMMA, media={"image": "<start_of_image>"})
GEMMA_3N = replace(GEMMA, media={"image": "<image_soft_token>", "audio": "<audio_soft_token>"})
PHI_3 = TurnFormat(
    system="<|system|>\n{content}{end}\n",
    user="<|user|>\n{content}{end}\n",
    assistant="<|assistant|>\n{content}{end}\n",
    generation="<|assistant|>\n",
    end_of_turn="<|end|>",
    bos=False,
)
PHI_4 = TurnFormat(
    system="<|im_start|>system<|im_sep|>{content}{end}",
    user="<|im_start|>user<|im_sep|>{content}{end}",
    assistant="<|im_start|>assistant<|im_sep|>{content}{end}",
    generation="<|im_start|>assistant<|im_sep|>",
    end_of_turn="<|im_end|>",
    bos=False,
)
ZEPHYR = TurnFormat(
    system="<|system|>\n{content}{end}\n",
    user="<|user|>\n{content}{end}\n",
    assistant="<|assistant|>\n{content}{end}\n",
    generation="<|assistant|>\n",
    bos=False,
)
VICUNA = TurnFormat(
    system="{content} ",
    user="USER: {content} ",
    assistant="ASSISTANT: {content}{end}",
    generation="ASSISTANT:",
    default_system="A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions.",
)
VICUNA_OLD = TurnFormat(
    system="{content}\n",
    user="### Human: {content}\n",
    assistant="### Assistant: {content}{end}\n",
    generation="### Assistant:",
    default_system="A chat between a curious human and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the human's questions.",
)
ALPACA = TurnFormat(
    system="{content}\n\n",
    user="### Instruction:\n{content}\n\n",
    assistant="### Response:\n{content}{end}\n\n",
    generation="### Response:\n",
    default_system="Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.",
)
UNSLOTH = TurnFormat(
    system="{content}\n",
    user=">>> User: {content}\n",
    assistant=">>> Assistant: {content}{end}\n",
    generation=">>> Assistant: ",
    default_system="You are a helpful assistant to the user",
)
STARLING = TurnFormat(
    system="GPT4 Correct System: {content}{end}",
    user="GPT4 Correct User: {content}{end}",
    assistant="GPT4 Correct Assistant: {content}{end}",
    generation="GPT4 Correct Assistant:",
    end_of_turn="<|end_of_turn|>",
)

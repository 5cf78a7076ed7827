"""Tiny random vision-language models with real processors, and rows with tiny images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3Processor,
    LlavaConfig,
    LlavaProcessor,
    Mistral3Config,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pantheraml.models.processor import with_tokenizer_fields

SQUARE = ("pixtral", "mistral3")
"""Families whose processor here supports square pictures only."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "pixtral", "mistral3")

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that logits differ by more than rounding
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.2,
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(**extra: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=extra
    )
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    return made


def _processor(family: str) -> Any:
    image = {"size": {"height": 16, "width": 16}}
    if family.startswith("qwen"):
        tokens = tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>",
                           vision_start="<|vision_start|>", vision_end="<|vision_end|>")  # fmt: skip
        template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
        kind, patch = (Qwen2_5_VLProcessor, 4) if family == "qwen2_5_vl" else (Qwen3VLProcessor, 4)
        pixels = {"size": {"shortest_edge": 64, "longest_edge": 576}}
        images = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2, **pixels)
        return with_tokenizer_fields(kind, False)(images, tokens, chat_template=template)
    if family == "gemma3":
        tokens = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
        images = Gemma3ImageProcessorPil(**image)
        template = TEMPLATE.replace("IMAGE", "<start_of_image>")
        return Gemma3Processor(images, tokens, chat_template=template, image_seq_length=4)
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        return LlavaProcessor(
            images, tokenizer(image_token="<image>"), chat_template=TEMPLATE.replace("IMAGE", "<image>"),
            patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        )  # fmt: skip
    # PixtralProcessor needs torchvision; for square pictures this one differs only in having no break tokens
    images = PixtralImageProcessorPil(size={"longest_edge": 16}, patch_size=4)
    return LlavaProcessor(
        images, tokenizer(image_token="[IMG]"), chat_template=TEMPLATE.replace("IMAGE", "[IMG]"),
        patch_size=4 if family == "pixtral" else 8, vision_feature_select_strategy="full",
    )  # fmt: skip


def _config(family: str, processor: Any) -> Any:
    tokens = processor.tokenizer
    text = {**TEXT, "vocab_size": len(tokens)}
    image = {"image_token_id": tokens.convert_tokens_to_ids(tokens.image_token)}
    if family.startswith("qwen"):
        ids = {
            f"{name}_token_id": tokens.convert_tokens_to_ids(f"<|{token}|>")
            for name, token in (
                ("image", "image_pad"), ("video", "video_pad"),
                ("vision_start", "vision_start"), ("vision_end", "vision_end"),
            )
        }  # fmt: skip
        vision = {
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "initializer_range": 0.2,
        }  # fmt: skip
        if family == "qwen2_5_vl":
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
            return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": MROPE}, vision_config=vision, **ids)
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        return Qwen3VLConfig(
            text_config={**text, "rope_parameters": {**MROPE, "mrope_interleaved": True}}, vision_config=vision, **ids
        )
    if family == "gemma3":
        ids = {
            "boi_token_index": tokens.convert_tokens_to_ids("<start_of_image>"),
            "eoi_token_index": tokens.convert_tokens_to_ids("<end_of_image>"),
        }
        text |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        return Gemma3Config(text_config=text, vision_config=ENCODER, mm_tokens_per_image=4, **ids, **image)
    if family == "llava":
        return LlavaConfig(
            text_config={"model_type": "llama", **text}, vision_config={"model_type": "clip_vision_model", **ENCODER},
            **image,
        )  # fmt: skip
    pixtral = {"model_type": "pixtral", **ENCODER}
    mistral = {"model_type": "mistral", **text, "sliding_window": None}
    if family == "pixtral":
        return LlavaConfig(
            text_config=mistral, vision_config=pixtral, vision_feature_layer=-1,
            vision_feature_select_strategy="full", **image,
        )  # fmt: skip
    return Mistral3Config(text_config=mistral, vision_config=pixtral, spatial_merge_size=2, **image)


def write(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a tiny model of the family and its processor."""
    processor = _processor(family)
    config = _config(family, processor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # Gemma 3's is zero at first, and hides the images
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(number: int, *, square: bool = False) -> Image.Image:
    """Return a picture that differs from the others in colors and, unless `square`, in size."""
    size = (16 if square else 16 + 8 * (number % 2), 16)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(number))
    return Image.fromarray(pixels.byte().numpy())


def rows(count: int, *, square: bool = False) -> list[dict[str, Any]]:
    """Return conversations about one picture each, of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "What is it" + "?" * (number % 3)},
                    {"type": "image", "image": picture(number, square=square)},
                ]},
                {"role": "assistant", "content": [{"type": "text", "text": f"Number {number * 7}"}]},
            ]
        }
        for number in range(count)
    ]  # fmt: skip

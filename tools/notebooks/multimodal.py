"""Tiny models with a vision tower, and their processors: one recipe per kind of processor.

Images become 16 to 64 patches, so that a step takes milliseconds. Token ids come from the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.notebooks.families import Family

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def build_multimodal(family: Family, tokenizer: Any, common: dict[str, Any]) -> tuple[Any, Any]:
    """Return a random model of the family and its processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    assert family.processor is not None
    text = {**common, "tie_word_embeddings": False, **family.sizes}
    settings, processor = _RECIPES[family.processor](tokenizer, text)
    config = AutoConfig.for_model(family.model_type, **settings)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    processor.chat_template = tokenizer.chat_template
    return model, processor


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _name_tokens(tokenizer: Any, **tokens: str) -> None:
    """Give the tokenizer attributes that processors read: `image_token` and `image_token_id`."""
    tokenizer._set_model_specific_special_tokens(special_tokens=tokens)
    tokenizer.init_kwargs.update(tokens, extra_special_tokens=tokens)


def _gemma3(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    _name_tokens(tokenizer, boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    ids = _ids(
        tokenizer, boi_token_index="<start_of_image>", eoi_token_index="<end_of_image>",
        image_token_index="<image_soft_token>",
    )  # fmt: skip
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56}, image_seq_length=4)
    vision = {**_VISION, "image_size": 56, "patch_size": 14}
    settings = {
        "text_config": {**text, "sliding_window": 32, "max_position_embeddings": 131072}, "vision_config": vision,
        "mm_tokens_per_image": 4, **ids,
    }  # fmt: skip
    return settings, Gemma3Processor(images, tokenizer, image_seq_length=4)


def _gemma3n(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers import Gemma3nAudioFeatureExtractor, Gemma3nProcessor, SiglipImageProcessor

    _name_tokens(
        tokenizer, boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>",
        boa_token="<start_of_audio>", eoa_token="<end_of_audio>", audio_token="<audio_soft_token>",
    )  # fmt: skip
    ids = _ids(
        tokenizer, boi_token_id="<start_of_image>", eoi_token_id="<end_of_image>",
        image_token_id="<image_soft_token>", boa_token_id="<start_of_audio>", eoa_token_id="<end_of_audio>",
        audio_token_id="<audio_soft_token>",
    )  # fmt: skip
    size = text["vocab_size"]
    settings = {
        "text_config": {
            **text, "vocab_size": size + 16, "num_hidden_layers": 4, "intermediate_size": 96,
            "vocab_size_per_layer_input": size,
            "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "laurel_rank": 8, "sliding_window": 32,
            "activation_sparsity_pattern": [0.0] * 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "altup_num_inputs": 2, "tie_word_embeddings": True,
        },
        "vision_config": {
            "architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "vocab_size": 8, "vocab_offset": size,
        },
        "audio_config": {
            "hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1, "vocab_size": 8,
            "vocab_offset": size + 8,
        },
        "vision_soft_tokens_per_image": 256, **ids,
    }  # fmt: skip
    images = SiglipImageProcessor(size={"height": 256, "width": 256}, do_normalize=False)
    return settings, Gemma3nProcessor(Gemma3nAudioFeatureExtractor(), images, tokenizer, image_seq_length=256)


def _gemma4(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor

    tokens = {
        "image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "audio": "<|audio|>", "boa": "<|audio>",
        "eoa": "<audio|>", "video": "<|video|>",
    }  # fmt: skip
    _name_tokens(tokenizer, **{f"{name}_token": token for name, token in tokens.items()})
    ids = _ids(tokenizer, **{f"{name}_token_{'index' if name == 'eoa' else 'id'}": t for name, t in tokens.items()})
    settings = {
        "text_config": {
            **text, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": text["vocab_size"], "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0, "sliding_window": 32, "global_head_dim": 16, "enable_moe_block": False,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **_VISION, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "patch_size": 4,
            "pooling_kernel_size": 2, "position_embedding_size": 256, "default_output_length": 70,
        },
        "audio_config": {
            "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "output_proj_dims": 32,
            "subsampling_conv_channels": [128, 8],  # the first is the number of mel bins
        }, **ids,
    }  # fmt: skip
    images = Gemma4ImageProcessor(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    processor = Gemma4Processor(
        Gemma4AudioFeatureExtractor(), images, tokenizer, Gemma4VideoProcessor(), image_seq_length=70
    )
    return settings, processor


def _qwen_vl(tokenizer: Any, text: dict[str, Any], *, third: bool) -> tuple[dict[str, Any], Any]:
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    _name_tokens(
        tokenizer, image_token="<|image_pad|>", video_token="<|video_pad|>", vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
    )  # fmt: skip
    ids = _ids(
        tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>",
    )  # fmt: skip
    patch = 16 if third else 14
    vision = {
        "depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": patch,
        "out_hidden_size": text["hidden_size"], "spatial_merge_size": 2, "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 64, "fullatt_block_indexes": [1],
        "window_size": 4 * patch,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    decoder = {**text, "rope_parameters": {**rope, "mrope_interleaved": True} if third else rope}
    settings = {"text_config": {**decoder, "max_position_embeddings": 128000}, "vision_config": vision, **ids}
    pixels = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (4 * patch) ** 2}
    images = Qwen2VLImageProcessor(patch_size=patch, size=pixels)
    if third:
        return settings, Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(patch_size=patch))
    return settings, Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(patch_size=patch))


def _qwen3_vl(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    return _qwen_vl(tokenizer, text, third=True)


def _qwen2_5_vl(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    return _qwen_vl(tokenizer, text, third=False)


def _qwen2_vl(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    settings, processor = _qwen_vl(tokenizer, text, third=False)
    settings["vision_config"]["hidden_size"] = text["hidden_size"]  # of the result
    return settings, processor


def _qwen3_5(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    settings, processor = _qwen_vl(tokenizer, text, third=True)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    settings["text_config"] |= {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32,
        "rope_parameters": {**rope, "mrope_interleaved": True},
    }  # fmt: skip
    return settings, processor


def _pixtral_vision() -> dict[str, Any]:
    return {**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 16}


def _pixtral(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    return _mistral_vision(tokenizer, {**text, "model_type": "mistral"}, merge=1)


def _mistral3(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    text = {**text, "model_type": text.pop("text", "mistral"), "max_position_embeddings": 131072}
    settings, processor = _mistral_vision(tokenizer, text, merge=2)
    return {**settings, "spatial_merge_size": 2}, processor


def _mistral_vision(tokenizer: Any, text: dict[str, Any], *, merge: int) -> tuple[dict[str, Any], Any]:
    from transformers import PixtralImageProcessor, PixtralProcessor

    _name_tokens(tokenizer, image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    settings = {
        "text_config": text, "vision_config": _pixtral_vision(), "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", **_ids(tokenizer, image_token_index="[IMG]"),
    }  # fmt: skip
    images = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 16 * merge, "width": 16 * merge})
    return settings, PixtralProcessor(images, tokenizer, patch_size=16, spatial_merge_size=merge)


def _mllama(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers import MllamaImageProcessor, MllamaProcessor

    _name_tokens(tokenizer, image_token="<|image|>")
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 56, "patch_size": 14, "max_num_tiles": 4, "vision_output_dim": 64,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [2, 2]],
    }  # fmt: skip
    settings = {
        "text_config": {**text, "cross_attention_layers": [1], "max_position_embeddings": 131072},
        "vision_config": vision, **_ids(tokenizer, image_token_index="<|image|>"),
    }  # fmt: skip
    images = MllamaImageProcessor(size={"height": 56, "width": 56}, max_image_tiles=4)
    return settings, MllamaProcessor(images, tokenizer)


def _lfm2_vl(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers import Lfm2VlImageProcessor, Lfm2VlProcessor

    _name_tokens(
        tokenizer, image_token="<image>", image_start_token="<|image_start|>", image_end_token="<|image_end|>",
        image_thumbnail="<|img_thumbnail|>",
    )  # fmt: skip
    settings = {
        "text_config": {**text, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        "vision_config": {**_VISION, "patch_size": 16, "num_patches": 16, "model_type": "siglip2_vision_model"},
        **_ids(tokenizer, image_token_id="<image>"), "downsample_factor": 2, "projector_hidden_size": 32,
    }  # fmt: skip
    images = Lfm2VlImageProcessor(
        encoder_patch_size=16, tile_size=64, min_image_tokens=4, max_image_tokens=16, max_num_patches=64,
        do_image_splitting=False, downsample_factor=2,
    )  # fmt: skip
    return settings, Lfm2VlProcessor(images, tokenizer)


def _muse_glimmer(tokenizer: Any, text: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from transformers import MuseGlimmerImageProcessor, MuseGlimmerProcessor, MuseGlimmerVideoProcessor

    settings = {
        "text_config": {**text, "num_hidden_layers": 4, "sliding_window": 32},
        "vision_config": {**_VISION, "patch_size": 14}, "out_hidden_size": 128, "projector_hidden_size": 32,
        **_ids(tokenizer, image_token_id="<|patch|>", video_token_id="<|video|>"),
    }  # fmt: skip
    images = MuseGlimmerImageProcessor(patch_size=14, max_image_tokens=16)
    return settings, MuseGlimmerProcessor(images, MuseGlimmerVideoProcessor(patch_size=14), tokenizer)


_RECIPES: dict[str, Callable[[Any, dict[str, Any]], tuple[dict[str, Any], Any]]] = {
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "mllama": _mllama,
    "lfm2_vl": _lfm2_vl,
    "muse_glimmer": _muse_glimmer,
}

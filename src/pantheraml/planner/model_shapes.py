"""The weights of a model by part, with their sizes: from its `config.json`, or from the headers of its weight files.

A pure function of the configuration for the dense families below; any other family needs its safetensors files, whose
headers name every tensor. Sizes of quantized layers are those of `models.quantize`, byte for byte. Nothing is loaded.
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.specs.hf_config import read_hf_config

Part = Literal["embedding", "attention", "mlp", "norms", "head", "other"]
PARTS: tuple[Part, ...] = ("embedding", "attention", "mlp", "norms", "head", "other")
FrozenFormat = Literal["bf16", "fp8", "int8", "nf4"]

MAX_HEADER_BYTES = 100 << 20
"""The limit of safetensors itself."""

NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256
FLOAT32, COMPUTE = 4, 2
"""Bytes of a scale and an adapter weight; bytes of bf16 or fp16."""


@dataclass(frozen=True)
class Weight:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    part: Part
    linear: bool = False
    """The weight of a linear layer in a decoder layer, which can be quantized and adapted."""
    transposed: bool = False
    """Stored as (in, out), by GPT-2's Conv1D."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def out_in(self) -> tuple[int, int]:
        out, into = self.shape[::-1] if self.transposed else self.shape
        return out, into


@dataclass(frozen=True)
class Decoder:
    """Sizes of the decoder layers, which are all alike."""

    family: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelShapes:
    weights: tuple[Weight, ...]
    tied: bool
    """The output head is the embedding."""
    decoder: Decoder | None = None
    """None: not known, of a model read from its weight files alone, or of layers that are no plain decoder layers."""
    unlike: str | None = None
    """Parts of its layers for which the planner has no formulas."""
    window: int | None = None
    """Tokens before a token that attention reaches in some layers or all; None: the whole document, or not known."""

    @property
    def parameters(self) -> int:
        return sum(weight.size for weight in self.weights)

    @functools.cached_property
    def outside(self) -> tuple[Weight, ...]:
        """Weights outside of decoder layers."""
        return tuple(weight for weight in self.weights if _layer_number(weight.name) is None)

    @functools.cached_property
    def of_layer(self) -> tuple[Weight, ...]:
        """Weights of the first decoder layer; the others have the same if the model is known by its configuration."""
        return tuple(weight for weight in self.weights if _layer_number(weight.name) == 0)

    def by_part(self) -> dict[Part, int]:
        """Parameters of each part. A tied head counts as embedding."""
        return {part: sum(each.size for each in self.weights if each.part == part) for part in PARTS}

    def frozen_bytes(self, quantized: FrozenFormat) -> dict[Part, int]:
        """Bytes of the frozen weights: linear layers in that format, all else in bf16."""
        sizes: dict[Part, int] = dict.fromkeys(PARTS, 0)
        for weight in self.weights:
            # as `quantizable_linears` has it: a vision part stays in bf16, as do Conv1D layers in fp8 models
            plain = not weight.linear or weight.part == "other" or (quantized == "fp8" and weight.transposed)
            sizes[weight.part] += weight.size * COMPUTE if plain else linear_bytes(weight.out_in, quantized)
        return sizes

    def lora_parameters(self, rank: int, targets: str | Sequence[str] = "all-linear") -> int:
        """Parameters of LoRA adapters of `rank` on the layers that `targets` names, as `method.target_modules` does."""
        return sum(rank * sum(weight.out_in) for weight in self._targets(targets))

    def _targets(self, targets: str | Sequence[str]) -> list[Weight]:
        linears = [weight for weight in self.weights if weight.linear]
        if targets == "all-linear":
            return linears
        names = [targets] if isinstance(targets, str) else list(targets)
        chosen = [each for each in linears if any(f".{each.layer}".endswith(f".{name}") for name in names)]
        missing = [name for name in names if not any(f".{each.layer}".endswith(f".{name}") for each in linears)]
        if missing or not names:
            known = sorted({each.layer.rpartition(".")[2] for each in linears})
            raise ModelError(
                f"method.target_modules names layers that this model does not have: {', '.join(missing) or 'none'}.",
                fix=f"Choose from {', '.join(known)}, or use all-linear.",
            )
        return chosen


def _layer_number(name: str) -> int | None:
    """Number of the decoder layer that has the tensor of this name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def is_target(weight: Weight, targets: str | Sequence[str]) -> bool:
    """Whether `method.target_modules` names the layer of this weight."""
    names = [targets] if isinstance(targets, str) else targets
    return weight.linear and (targets == "all-linear" or any(f".{weight.layer}".endswith(f".{name}") for name in names))


def linear_bytes(out_in: tuple[int, int], quantized: FrozenFormat) -> int:
    """Bytes of a linear layer's weight without its bias."""
    values, rows = math.prod(out_in), out_in[0]
    if quantized == "bf16":
        return values * COMPUTE
    if quantized != "nf4":
        return values + rows * FLOAT32  # one byte a value, and a scale for each row
    blocks = -(-values // NF4_BLOCK)
    # packed values, a byte of scale for each block, and a step and a minimum for every 256 blocks
    return blocks * NF4_BLOCK // 2 + blocks + 2 * FLOAT32 * -(-blocks // NF4_SCALE_BLOCK)


def read_shapes(folder: Path) -> ModelShapes:
    """Shapes of a model folder: by the configuration where its family is known, else by the headers of its weights.

    Headers give exact sizes, and parts by the names of tensors; every matrix in attention and MLP counts as linear.
    """
    config = read_hf_config(folder)
    known = FAMILIES.get(str(config.get("model_type")))
    if known is not None:
        try:
            return shapes_of_config(config)
        except ModelError:
            if known.unlike is None or not any(folder.glob("*.safetensors")):
                raise
    if "quantization_config" in config:
        raise UnsupportedModelError(
            f"The sizes of a quantized {config.get('model_type')} checkpoint are not known before it is loaded.",
            where=str(folder),
            fix="Use the unquantized model.",
        )
    return _by_names(_headers(folder), tied=bool(config.get("tie_word_embeddings", True)))


# -- by the configuration


def shapes_of_config(config: Mapping[str, Any]) -> ModelShapes:
    """Shapes of a model of a known family. UnsupportedModelError for others."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"The sizes of model_type {family!r} cannot be computed from its configuration.",
            fix=f"Known are {', '.join(sorted(FAMILIES))}; other models need their weight files.",
        )
    known = FAMILIES[str(family)]
    tied = bool(config.get("tie_word_embeddings", known.ties))
    try:
        sizes = known.sizes(config)
        weights = tuple(known.weights(sizes, tied))
    except KeyError as err:
        raise ModelError(f"The model's config.json lacks {err}.", fix="Download it again.") from err
    return ModelShapes(weights, tied, None if known.unlike else sizes.decoder(), known.unlike, _window_of(config))


def _window_of(config: Mapping[str, Any]) -> int | None:
    uses = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    return config.get("sliding_window") if uses else None


class _Sizes:
    """Sizes of a configuration in the names of Llama."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.family = config, str(config["model_type"])
        self.hidden, self.vocab = int(config["hidden_size"]), int(config["vocab_size"])
        self.layers, self.heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        self.inner = int(config["intermediate_size"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        default = _HEAD_DIMS.get(self.family, self.hidden // self.heads)
        self.head_dim = int(config.get("head_dim") or default)
        self.attention_bias = bool(config.get("attention_bias", self.family == "gpt_oss"))
        self.mlp_bias = bool(config.get("mlp_bias", False))

    def decoder(self) -> Decoder:
        sizes = self.hidden, self.inner, self.heads, self.kv_heads, self.head_dim, self.vocab
        return Decoder(self.family, self.layers, *sizes)


_HEAD_DIMS = {"qwen3": 128, "gpt_oss": 64, "gemma": 256, "gemma2": 256, "gemma3_text": 256}
"""Defaults that are not hidden size over heads."""


def _linear(name: str, out: int, into: int, part: Part, *, bias: bool = False) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out, into), part, linear=True)
    if bias:
        yield Weight(f"{name}.bias", (out,), part)


def _llama_like(sizes: _Sizes, tied: bool) -> Iterator[Weight]:
    """Llama and the families that differ from it in biases, norms, fused layers and experts."""
    family, hidden = sizes.family, sizes.hidden
    yield Weight("model.embed_tokens.weight", (sizes.vocab, hidden), "embedding")
    for number in range(sizes.layers):
        layer = f"model.layers.{number}"
        yield from _attention(sizes, f"{layer}.self_attn")
        yield from (_experts if _has_experts(sizes, number) else _mlp)(sizes, f"{layer}.mlp")
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family in ("gemma2", "gemma3_text"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            yield Weight(f"{layer}.{name}.weight", (hidden,), "norms")
    yield Weight("model.norm.weight", (hidden,), "norms")
    if not tied:
        yield Weight("lm_head.weight", (sizes.vocab, hidden), "head")


def _attention(sizes: _Sizes, name: str) -> Iterator[Weight]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    bias = sizes.attention_bias
    if sizes.family == "phi3":
        yield from _linear(f"{name}.qkv_proj", queries + 2 * keys, sizes.hidden, "attention")
    else:
        for letter, out in (("q", queries), ("k", keys), ("v", keys)):
            biased = bias or sizes.family == "qwen2"
            yield from _linear(f"{name}.{letter}_proj", out, sizes.hidden, "attention", bias=biased)
    yield from _linear(f"{name}.o_proj", sizes.hidden, queries, "attention", bias=bias and sizes.family != "phi3")
    if sizes.family == "gpt_oss":
        yield Weight(f"{name}.sinks", (sizes.heads,), "attention")
    if sizes.family in ("qwen3", "qwen3_moe", "gemma3_text"):
        for letter in ("q", "k"):
            yield Weight(f"{name}.{letter}_norm.weight", (sizes.head_dim,), "norms")


def _mlp(sizes: _Sizes, name: str) -> Iterator[Weight]:
    inner, hidden, bias = sizes.inner, sizes.hidden, sizes.mlp_bias
    if sizes.family == "phi3":
        yield from _linear(f"{name}.gate_up_proj", 2 * inner, hidden, "mlp")
    else:
        yield from _linear(f"{name}.gate_proj", inner, hidden, "mlp", bias=bias)
        yield from _linear(f"{name}.up_proj", inner, hidden, "mlp", bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, "mlp", bias=bias)


def _has_experts(sizes: _Sizes, layer: int) -> bool:
    if sizes.family == "qwen3_moe":
        dense = sizes.config.get("mlp_only_layers") or ()
        return layer not in dense and (layer + 1) % int(sizes.config.get("decoder_sparse_step", 1)) == 0
    return sizes.family in _EXPERTS


def _experts(sizes: _Sizes, name: str) -> Iterator[Weight]:
    """A router and stacked experts, as transformers loads them: they are neither adapted nor quantized."""
    hidden, config = sizes.hidden, sizes.config
    known = _EXPERTS[sizes.family]
    count = int(next(config[key] for key in known.count if key in config))
    inner = int(config[known.width])
    first, second = (count, 2 * inner, hidden), (count, hidden, inner)
    if known.transposed:
        first, second = (count, hidden, 2 * inner), (count, inner, hidden)
    yield Weight(f"{name}.{known.router}.weight", (count, hidden), "mlp")
    yield Weight(f"{name}.experts.gate_up_proj", first, "mlp")
    yield Weight(f"{name}.experts.down_proj", second, "mlp")
    if known.biased:
        yield Weight(f"{name}.{known.router}.bias", (count,), "mlp")
        yield Weight(f"{name}.experts.gate_up_proj_bias", (count, 2 * inner), "mlp")
        yield Weight(f"{name}.experts.down_proj_bias", (count, hidden), "mlp")


def _gemma3(sizes: _Sizes, tied: bool) -> Iterator[Weight]:
    """Gemma 3 from 4B on: a vision tower (SigLIP), a projection, and the text model."""
    vision = {**_SIGLIP, **(sizes.config.get("vision_config") or {})}
    width, inner, patch = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "patch_size"))
    tower = "model.vision_tower"
    yield Weight(
        f"{tower}.embeddings.patch_embedding.weight", (width, int(vision["num_channels"]), patch, patch), "other"
    )
    yield Weight(f"{tower}.embeddings.patch_embedding.bias", (width,), "other")
    positions = (int(vision["image_size"]) // patch) ** 2
    yield Weight(f"{tower}.embeddings.position_embedding.weight", (positions, width), "other")
    for number in range(int(vision["num_hidden_layers"])):
        layer = f"{tower}.encoder.layers.{number}"
        for name, out, into in (
            *((f"self_attn.{letter}_proj", width, width) for letter in ("q", "k", "v", "out")),
            *(("mlp.fc1", inner, width), ("mlp.fc2", width, inner)),
        ):
            yield from _linear(f"{layer}.{name}", out, into, "other", bias=True)
        yield from _layer_norm(f"{layer}.layer_norm1", width)
        yield from _layer_norm(f"{layer}.layer_norm2", width)
    yield from _layer_norm(f"{tower}.post_layernorm", width)
    projector = "model.multi_modal_projector"
    yield Weight(f"{projector}.mm_input_projection_weight", (width, sizes.hidden), "other")
    yield Weight(f"{projector}.mm_soft_emb_norm.weight", (width,), "norms")
    for weight in _llama_like(sizes, tied):
        yield replace(weight, name=weight.name.replace("model.", "model.language_model.", 1))


def _gpt2(sizes: _Sizes, tied: bool) -> Iterator[Weight]:
    hidden, inner = sizes.hidden, sizes.inner
    yield Weight("transformer.wte.weight", (sizes.vocab, hidden), "embedding")
    yield Weight("transformer.wpe.weight", (int(sizes.config["n_positions"]), hidden), "embedding")
    for number in range(sizes.layers):
        layer = f"transformer.h.{number}"
        linears: tuple[tuple[str, int, int, Part], ...] = (
            ("attn.c_attn", 3 * hidden, hidden, "attention"),
            ("attn.c_proj", hidden, hidden, "attention"),
            ("mlp.c_fc", inner, hidden, "mlp"),
            ("mlp.c_proj", hidden, inner, "mlp"),
        )
        for name, out, into, part in linears:
            yield Weight(f"{layer}.{name}.weight", (into, out), part, linear=True, transposed=True)
            yield Weight(f"{layer}.{name}.bias", (out,), part)
        yield from _layer_norm(f"{layer}.ln_1", hidden)
        yield from _layer_norm(f"{layer}.ln_2", hidden)
    yield from _layer_norm("transformer.ln_f", hidden)
    if not tied:
        yield Weight("lm_head.weight", (sizes.vocab, hidden), "head")


def _layer_norm(name: str, size: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (size,), "norms")
    yield Weight(f"{name}.bias", (size,), "norms")


class _GPT2Sizes(_Sizes):
    def __init__(self, config: Mapping[str, Any]) -> None:
        hidden = int(config["n_embd"])
        inner = config.get("n_inner") or 4 * hidden
        names = {"hidden_size": hidden, "num_hidden_layers": config["n_layer"], "intermediate_size": inner}
        super().__init__({**config, **names, "num_attention_heads": config["n_head"]})


class _Gemma3Sizes(_Sizes):
    """Sizes of Gemma 3's text model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, **config["text_config"]}
        super().__init__({**text, "model_type": "gemma3_text", "vision_config": config.get("vision_config")})


_SIGLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "image_size": 224,
    "num_channels": 3,
}
"""transformers' defaults, which a saved configuration may leave out; as those of Gemma 3's text model above."""


@dataclass(frozen=True)
class _Experts:
    """How a family names and lays out its stacked experts."""

    count: tuple[str, ...]
    """Keys of the configuration; the first one that is there counts."""
    width: str
    router: str = "gate"
    transposed: bool = False
    biased: bool = False


_EXPERTS = {
    "qwen3_moe": _Experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
    "mixtral": _Experts(("num_local_experts",), "intermediate_size"),
    "gpt_oss": _Experts(("num_local_experts",), "intermediate_size", "router", transposed=True, biased=True),
}


@dataclass(frozen=True)
class _Family:
    weights: Callable[[_Sizes, bool], Iterable[Weight]]
    ties: bool
    """It ties its head if the configuration does not say."""
    sizes: type[_Sizes] = _Sizes
    unlike: str | None = None


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "granite"), _Family(_llama_like, ties=False)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "smollm3"), _Family(_llama_like, ties=True)),
    **dict.fromkeys(_EXPERTS, _Family(_llama_like, ties=False, unlike="a mixture of experts")),
    "gemma3": _Family(_gemma3, ties=True, sizes=_Gemma3Sizes, unlike="a vision part"),
    "gpt2": _Family(_gpt2, ties=True, sizes=_GPT2Sizes),
}
"""By model_type."""


# -- by the weight files


def _headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"The model folder {folder} has no safetensors files, and its family is not known.",
            fix=f"Download its weights. Without them, known are {', '.join(sorted(FAMILIES))}.",
        )
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            found |= _header(file)
        except (OSError, ValueError, struct.error, RecursionError, KeyError, TypeError, AttributeError) as err:
            raise ModelError(f"The weight file {file} is corrupted.", fix="Download the model again.") from err
    return found


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """A safetensors file begins with the length of its header, which is JSON."""
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError("the header is too long")
        header = json.loads(opened.read(length))
    tensors = ((name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return {name: tuple(int(size) for size in shape) for name, shape in tensors}


_NAMES: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("head", re.compile(r"(^|\.)(lm_head|embed_out|output_layer)\.")),
    ("embedding", re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)\.")),
    ("norms", re.compile(r"(^|\.)(\w*norm\w*|ln_\w+)\.(weight|bias)$")),
    ("attention", re.compile(r"\.(\w*attn|\w*attention)\.")),
    ("mlp", re.compile(r"\.(\w*mlp|feed_forward|ffn|block_sparse_moe|moe|experts)\.")),
)
"""The part of a tensor by its name; the first match counts."""

_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(attn|attention)\.(masked_)?bias$")
"""Tensors of old checkpoints that are no weights: frequencies and causal masks. A bias has one dimension."""


def _by_names(tensors: Mapping[str, tuple[int, ...]], *, tied: bool) -> ModelShapes:
    weights = []
    for name, shape in tensors.items():
        if _BUFFERS.search(name) and (len(shape) != 1 or name.endswith("inv_freq")):
            continue
        part: Part = next((part for part, pattern in _NAMES if pattern.search(name)), "other")
        if part == "head" and tied:
            continue
        linear = len(shape) == 2 and name.endswith(".weight") and part in ("attention", "mlp")
        weights.append(Weight(name, shape, part, linear=linear))
    has_head = any(weight.part == "head" for weight in weights)
    return ModelShapes(tuple(weights), tied=not has_head)

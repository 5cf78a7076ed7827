"""Sizes of one rank in one forward pass: tokens, widths of its part of a layer, and bytes of each dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pantheraml.planner.memory.blocks import round_up
from pantheraml.planner.model_shapes import Decoder
from pantheraml.planner.setting import Setting

FLOAT32, HALF, BYTE = 4, 2, 1
DTYPE_BYTES: dict[str, int] = {"fp32": FLOAT32, "bf16": HALF, "fp16": HALF}

FP8_COLUMNS, PLAIN_COLUMNS = 128, 64
"""Adapter columns of a fused matmul are padded to a multiple: kernels.lora_columns, models.fast.linear_groups."""

GroupName = Literal["qkv", "output", "first", "second"]
_MEMBERS: dict[GroupName, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "first": ("gate_proj", "up_proj"),
    "second": ("down_proj",),
}
_MERGED: dict[GroupName, tuple[str, ...]] = {**_MEMBERS, "qkv": ("qkv_proj",), "first": ("gate_up_proj",)}


@dataclass(frozen=True)
class LinearSizes:
    """Linear layers of one input, as fused layers run them."""

    width: int
    heights: tuple[int, ...]
    adapted: tuple[bool, ...]
    """Which of them have an adapter."""
    rank: int

    @property
    def height(self) -> int:
        return sum(self.heights)

    @property
    def ranks(self) -> int:
        return self.rank * sum(self.adapted)


@dataclass(frozen=True)
class StepSizes:
    """`tokens` go through every layer of this rank at a time."""

    setting: Setting
    decoder: Decoder
    tokens: int
    hidden: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def compute(self) -> int:
        """Bytes of a value in the compute dtype."""
        return DTYPE_BYTES[self.setting.precision]

    @property
    def trains_weights(self) -> bool:
        return self.setting.method == "full"

    @property
    def fp8_layers(self) -> bool:
        """Fused layers whose matmuls take e4m3 rows: frozen fp8 or nf4, or a full fine-tune with fp8 matmuls."""
        return self.setting.frozen_weights in ("fp8", "nf4") or self.setting.fp8_matmuls

    @property
    def operand(self) -> int:
        """Bytes of a value of a fused matmul's input."""
        return BYTE if self.fp8_layers else self.compute

    def pad(self, group: LinearSizes) -> int:
        """Columns that a fused matmul has for the adapters of a group."""
        if self.trains_weights:
            return 0
        return round_up(group.ranks, FP8_COLUMNS if self.fp8_layers else PLAIN_COLUMNS)

    def group(self, name: GroupName) -> LinearSizes:
        merged = self.decoder.family == "phi3"
        members = (_MERGED if merged else _MEMBERS)[name]
        heights = {
            "qkv": (self.queries + 2 * self.keys,) if merged else (self.queries, self.keys, self.keys),
            "output": (self.hidden,),
            "first": (2 * self.inner,) if merged else (self.inner, self.inner),
            "second": (self.hidden,),
        }[name]
        width = {"qkv": self.hidden, "output": self.queries, "first": self.hidden, "second": self.inner}[name]
        adapted = tuple(self.setting.method != "full" and _is_target(each, self.setting) for each in members)
        return LinearSizes(width, heights, adapted, self.setting.lora_rank)

    @property
    def groups(self) -> tuple[LinearSizes, LinearSizes, LinearSizes, LinearSizes]:
        """In the order of a layer."""
        return self.group("qkv"), self.group("output"), self.group("first"), self.group("second")


def _is_target(name: str, setting: Setting) -> bool:
    targets = setting.lora_targets
    if targets == "all-linear":
        return True
    names = (targets,) if isinstance(targets, str) else targets
    return any(each.rpartition(".")[2] == name for each in names)


def step_sizes(decoder: Decoder, setting: Setting) -> StepSizes:
    """Context parallel ranks have a part of the tokens, tensor parallel ranks a part of heads, MLP and vocabulary."""
    tensor = setting.dims.tensor
    return StepSizes(
        setting=setting,
        decoder=decoder,
        tokens=setting.tokens,
        hidden=decoder.hidden,
        queries=decoder.queries // tensor,
        keys=decoder.keys // tensor,
        heads=decoder.heads // tensor,
        kv_heads=decoder.kv_heads // tensor,
        inner=decoder.inner // tensor,
        vocabulary=-(-decoder.vocabulary // tensor),
    )

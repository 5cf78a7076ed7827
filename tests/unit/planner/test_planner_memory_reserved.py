"""What torch's allocator reserves: its rules, and the steps that are sent through them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pantheraml.planner.memory import predict_memory
from pantheraml.planner.memory.allocator import Allocator, Block
from pantheraml.planner.memory.blocks import MIB
from pantheraml.planner.memory.predict import _Rank
from pantheraml.planner.memory.reserved import CONTEXT_BYTES, NCCL_BYTES, TYPICAL_UNUSED, driver_bytes, unused_bytes
from pantheraml.planner.memory.weights import FIRST_RANK
from pantheraml.planner.model_shapes import shapes_of_config
from pantheraml.planner.setting import Setting
from pantheraml.specs.parallel import ParallelDims

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = shapes_of_config(LLAMA_1B)
LORA = Setting(frozen_weights="fp8", fused=True, cuda_graph=True, micro_batch=4)
FULL = Setting(method="full", trained_weights="bf16", optimizer="adamw_bf16", micro_batch=4)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([1 * MIB, 1 * MIB], 2 * MIB),
        ([1 * MIB + 1], 20 * MIB),
        ([10 * MIB - 512] * 2, 20 * MIB),
        ([10 * MIB - 512] * 3, 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB], 12 * MIB),
        ([33 * MIB], 34 * MIB),
        ([300, 3 * MIB], 22 * MIB),
    ],
)
def test_segments_have_the_sizes_of_torch(sizes: list[int], reserved: int) -> None:
    """As `memory_reserved` counts them; torch's own tests expect the same (test_cuda.py, graph_memory_stats)."""
    allocator = Allocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.reserved == reserved


def test_the_smallest_free_block_is_taken_and_its_rest_stays_free() -> None:
    allocator = Allocator()
    large, between, small = (allocator.allocate(size * MIB) for size in (64, 2, 32))
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(30 * MIB).size == 30 * MIB  # of the 32, as a rest of 2 is split off
    assert allocator.allocate(40 * MIB).size == 40 * MIB  # of the 64
    assert allocator.allocate(24 * MIB).size == 24 * MIB  # its rest
    assert allocator.reserved == (64 + 20 + 32) * MIB
    assert between.size == 2 * MIB
    assert allocator.allocate(32 * MIB).size == 32 * MIB
    assert allocator.reserved == (64 + 20 + 32 + 32) * MIB


def test_a_gap_between_two_tensors_that_stay_is_reserved_for_nothing() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    allocator.allocate(6 * MIB)
    assert allocator.reserved == 40 * MIB  # 10 MiB are free, in two gaps
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB


def test_everything_freed_joins_to_whole_segments_again() -> None:
    allocator, draw = Allocator(), random.Random(0)
    alive: list[Block] = []
    for _ in range(3000):
        if alive and draw.random() < 0.5:
            allocator.free(alive.pop(draw.randrange(len(alive))))
        else:
            alive.append(allocator.allocate(int(10 ** draw.uniform(1, 8))))
        assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
    for block in alive:
        allocator.free(block)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


@pytest.mark.parametrize(
    "setting",
    [
        LORA,
        LORA.model_copy(update={"cuda_graph": False, "activation_checkpointing": "full"}),
        LORA.model_copy(update={"frozen_weights": "nf4", "activation_checkpointing": "offload", "cuda_graph": False}),
        FULL,
        FULL.model_copy(update={"cuda_graph": True}),
        FULL.model_copy(update={"activation_checkpointing": "selective"}),
        FULL.model_copy(update={"dims": ParallelDims(pipeline=4), "accumulation": 4}),
    ],
)
def test_the_simulated_step_allocates_what_is_predicted(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[Allocator] = []

    class Kept(Allocator):
        def __init__(self) -> None:
            super().__init__()
            peaks.append(self)

    monkeypatch.setattr("pantheraml.planner.memory.reserved.Allocator", Kept)
    rank = _Rank(SHAPES, setting, FIRST_RANK, 32 * MIB)
    unused_bytes(rank.step_tensors())
    eager, *captured = peaks
    whole = max(eager.peak_allocated, *(eager.allocated + graph.peak_allocated for graph in captured), 0)
    assert whole == pytest.approx(sum(rank.peak[1].values()), rel=0.01)


def predicted(setting: Setting, capacity: int | None = None) -> Any:
    return predict_memory(SHAPES, setting, capacity_bytes=capacity, capability=(9, 0))


def test_reserved_is_never_less_than_typical_and_more_where_tensors_leave_gaps() -> None:
    lora, full = predicted(LORA), predicted(FULL.model_copy(update={"activation_checkpointing": "full"}))
    assert lora.reserved_bytes == lora.allocated_bytes + round(TYPICAL_UNUSED * lora.allocated_bytes)
    assert full.reserved_bytes > (1 + TYPICAL_UNUSED) * full.allocated_bytes


def test_the_driver_counts_its_context_and_communication() -> None:
    found = predicted(LORA)
    assert found.device_bytes == found.reserved_bytes + CONTEXT_BYTES
    two = predicted(LORA.model_copy(update={"dims": ParallelDims(replicate=2), "cuda_graph": False}))
    assert two.device_bytes == two.reserved_bytes + CONTEXT_BYTES + NCCL_BYTES
    assert driver_bytes(2, hopper=True) == driver_bytes(4096, hopper=True) > driver_bytes(4096, hopper=False)
    assert found.fits is None
    assert predicted(LORA, capacity=found.device_bytes).fits is True
    assert predicted(LORA, capacity=found.device_bytes - 1).fits is False


def test_every_kind_of_parallelism_is_simulated() -> None:
    for dims in (
        ParallelDims(shard=4),
        ParallelDims(tensor=2),
        ParallelDims(pipeline=4),
        ParallelDims(shard=2, context=2),
    ):
        found = predicted(FULL.model_copy(update={"dims": dims, "accumulation": 4}))
        assert found.allocated_bytes < found.reserved_bytes < 1.4 * found.allocated_bytes

"""A small run for a few CPU cores: a Llama with random weights, and full sequences of random tokens."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from inputs import write_full_sequences, write_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.base.events import EventBase
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.optim.schedule import learning_rate
from pantheraml.engine.step.feed import Feed, StepBatches
from pantheraml.engine.step.step import Stepper
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.layout import ALONE, make_layout
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model

HEADS = 8


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    vocabulary: int
    seq_len: int
    batch: int
    """Sequences per data-parallel process."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


def write_inputs(folder: Path, size: Size, *, sequences: int = 32) -> None:
    shape = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=size.seq_len,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    write_tokenizer(folder / "model", size.vocabulary)
    write_full_sequences(folder / "data.jsonl", shape="tiny", sequences=sequences, seq_len=size.seq_len)


def config_of(folder: Path, size: Size, method: str, *, shares: int, stages: int = 1) -> TrainConfig:
    """Config for a global batch of `shares` times `size.batch` sequences, with `stages` pipeline stages per process."""
    return TrainConfig.model_validate(
        {
            "model": {"path": str(folder / "model"), "precision": "fp32"},
            "data": {
                "path": str(folder / "data.jsonl"),
                "seq_len": size.seq_len,
                "cache_dir": str(folder / "cache"),
            },
            "method": {"kind": method, "rank": 16, "alpha": 16},
            "train": {"global_batch_size": shares * size.batch, "max_steps": 1000, "learning_rate": 1e-4},
            "parallel": {"stages_per_process": stages, "pipeline": 2} if stages > 1 else {},
            "device": "cpu",
        }
    )


def plan_of(config: TrainConfig, dims: ParallelDims, *, micro_batch: int) -> Plan:
    return Plan(
        device="cpu",
        device_ids=(),
        world_size=dims.world_size,
        dims=dims,
        backend="gloo",
        precision="fp32",
        frozen_weights=None,
        fused=False,
        cuda_graph=False,
        compile=False,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=micro_batch,
        activation_checkpointing="none",
        threads_per_process=1,
        predicted_memory_bytes=None,
        predicted_seconds=None,
        choices=(),
    )


@contextmanager
def opened(processes: int) -> Iterator[World]:
    """The world of all benchmark processes; `among` gives it a parallel layout."""
    nothing = TrainConfig.model_validate({"model": {"path": "-"}, "data": {"path": "-"}, "device": "cpu"})
    plan = plan_of(nothing, ParallelDims(replicate=processes), micro_batch=1)
    with open_world(plan, timeout_seconds=300) as world:
        yield world


def among(world: World, dims: ParallelDims) -> World:
    return replace(world, layout=make_layout(dims, "cpu"))


def by_itself(world: World) -> World:
    return World(rank=0, size=1, device=world.device, layout=ALONE)


def prepared(config: TrainConfig, world: World) -> TokenDataset:
    """Prepare the data on rank 0, then open it on all ranks."""
    if world.is_main:
        prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent)
    world.wait_for_main()
    return TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)


def silent(event: EventBase, /) -> None:
    """Discard an event."""


def model_of(config: TrainConfig, plan: Plan, world: World) -> nn.Module:
    return build_model(config, plan, world, silent).train()


class SmallRun:
    """Runs training steps one by one."""

    def __init__(self, config: TrainConfig, plan: Plan, world: World, dataset: TokenDataset) -> None:
        """A collective of all ranks of `world`."""
        self._config = config
        self.stepper = Stepper(model_of(config, plan, world), config, world, plan).setup()
        self._feed = Feed(
            dataset,
            world,
            seed=0,
            global_batch=config.train.global_batch_size,
            micro_batch=plan.micro_batch_size,
            limit=None,
        )
        self._done = 0

    def batches(self) -> StepBatches:
        """Batches of the next step."""
        return self._feed.step(self._done)

    def step(self) -> None:
        report = self.stepper.backward(self.batches(), stop_requested=False)
        self.stepper.apply(report.numbers, learning_rate(self._config.train, self._done, 1000))
        self._done += 1

    def __enter__(self) -> SmallRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._feed.__exit__(None, None, None)
        del self.stepper
        gc.collect()  # the model has reference cycles

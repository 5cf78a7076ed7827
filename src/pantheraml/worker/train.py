"""Task `train`: one rank of a training run, from loading the model to saving the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from pantheraml.base import env
from pantheraml.base.errors import ModelError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import (
    ChoiceMade,
    Emit,
    ModelReady,
    ModelSaved,
    Notice,
    RunFallback,
    TrainStopped,
    WarningIssued,
    silent,
)
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.origin import Origins, Source
from pantheraml.engine.compile import compile_layers
from pantheraml.engine.fault_injection import FaultInjector
from pantheraml.engine.guard.watchdog import StackDumpWatchdog, StopFlag, Watchdog, recorded_collectives
from pantheraml.engine.job import Job, RunLength, run_length
from pantheraml.engine.loop import TrainingLoop
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.engine.memory.oom import explain
from pantheraml.engine.step.step import Stepper
from pantheraml.launch.flight_record import RECORDER_ENVIRONMENT
from pantheraml.launch.stacks import COLLECTIVE_SHARE
from pantheraml.models.adapters import TrainedWeights, apply_method, parameter_count, save_trained, trained_form
from pantheraml.models.base_identity import BaseIdentity
from pantheraml.models.experts import speed_up_experts
from pantheraml.models.fast import enable_layer_chain, fuse, long_sequence_note, quantize_head_like_layers
from pantheraml.models.loader import load_model, load_tokenizer, weights_fingerprint
from pantheraml.models.packing_check import isolate_documents, require_packing_support
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.models.rope import varying_rope
from pantheraml.parallel.device_map import is_split, spread
from pantheraml.parallel.gather import full_tensors
from pantheraml.parallel.process_group import NotNeededError, World, open_world
from pantheraml.planner.defaults import learning_rate_choice, rank_choice
from pantheraml.specs.faults import planned_faults
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Choice, Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import ModelConfig, TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train_task(folder: Path, events: EventWriter) -> None:
    run = RunDir(folder)
    config, plan = run.config(), run.plan()
    stop = StopFlag(run.stop_file)
    if plan.world_size > 1:
        for name, value in RECORDER_ENVIRONMENT.items():
            env.set_default_for_this_process(name, value)
    with stop.listening(), contextlib.suppress(NotNeededError), join_world(config.parallel, plan) as world:
        emit: Emit = events if world.is_main else silent
        if world.fallback_reason is not None:
            emit(
                RunFallback(
                    message=f"training continues in one process instead of {plan.world_size}: {world.fallback_reason}",
                    reason=world.fallback_reason,
                    planned_world_size=plan.world_size,
                )
            )
            config, plan = for_single_process(config, plan)
        try:
            train_rank(run, config, plan, world, emit, stop, heartbeat=events)
        except torch.OutOfMemoryError as err:
            raise explain(err, config, plan) from err


def join_world(parallel: MultiGPUConfig, plan: Plan) -> AbstractContextManager[World]:
    return open_world(
        plan,
        timeout_seconds=parallel.timeout_seconds,
        collective_seconds=COLLECTIVE_SHARE * parallel.timeout_seconds,
        max_retries=parallel.max_retries,
        strict=parallel.strict,
    )


def for_single_process(config: TrainConfig, plan: Plan) -> tuple[TrainConfig, Plan]:
    """Return config and plan for one process; the global batch, and so the result, stays the same."""
    parallel = replace(config.parallel, batch_shares="even")
    plan = plan.model_copy(update={"world_size": 1, "dims": ParallelDims()})
    return config.model_copy(update={"parallel": parallel}), plan


def train_rank(
    run: RunDir,
    config: TrainConfig,
    plan: Plan,
    world: World,
    emit: Emit,
    stop: StopFlag,
    *,
    heartbeat: Emit = silent,
) -> None:
    """Train this rank, inside an open process group. Only rank 0 emits events; all ranks emit heartbeats."""
    # not a lambda: this file may only be in the stack of the training thread (see `launch.stacks`)
    collectives = partial(recorded_collectives, plan.backend) if world.size > 1 else None
    with StackDumpWatchdog(
        run.stacks,
        rank=world.rank,
        timeout_seconds=config.parallel.timeout_seconds,
        collectives=collectives,
        heartbeat=heartbeat,
    ) as watch:
        loop = make_loop(run, config, plan, world, emit, stop, watch)
        loop.resume()
        stopped_by = loop.run()
        if stopped_by != "request":
            save_result(run, config, loop.job.stepper, emit, base_fingerprint=loop.job.model_fingerprint)
        elif stop.signal is not None:
            heartbeat(TrainStopped(signal=stop.signal.name))
        world.wait_for_main()


def make_loop(
    run: RunDir, config: TrainConfig, plan: Plan, world: World, emit: Emit, stop: StopFlag, watch: Watchdog
) -> TrainingLoop:
    """Load model and data, and set up the training loop. Collective."""
    layout = world.layout
    # Ranks that process the same tokens need the same dropout masks.
    torch.manual_seed(config.train.seed + layout.data_rank * layout.dims.context + layout.coordinates["context"])
    train_data, eval_data = open_data(run)
    if config.data.packing and not train_data.packed:
        plan = plan_for_padded_rows(config, plan, emit)
    model = build_model(config, plan, world, emit, packed=train_data.packed)
    for dataset in (train_data, eval_data):
        check_fits(model, dataset)
    if (message := beyond_positions(model, train_data)) is not None:
        emit(Notice(message=message))
    plan = resolve_rope_batching(model, config, plan, [train_data, *filter(None, [eval_data])], emit)
    length = run_length(config, len(train_data))
    config = resolve_learning_rate(model, config, length.steps, emit)
    if (message := small_adapters(model, config, train_data, length)) is not None:
        emit(Notice(message=message))
    world.wait_for_main()  # ranks load at different speeds, and the first collective of DDP has the short timeout
    watch.beat()
    stepper = Stepper(model, config, world, plan).setup()
    if plan.compile:
        compile_layers(model)
    for choice in stepper.decisions.choices:
        emit(ChoiceMade(**choice.model_dump()))
    for warning in stepper.decisions.warnings:
        emit(WarningIssued(message=warning))
    if stepper.passes.full_logits_reason:
        emit(Notice(message=f"the loss needs full logits: {stepper.passes.full_logits_reason}"))
    watch.expect_long_work()
    return TrainingLoop(
        Job(
            config=config,
            plan=plan,
            run_dir=run.path,
            stepper=stepper,
            train_data=train_data,
            eval_data=eval_data,
            model_fingerprint=weights_fingerprint(config.model),
            emit=emit,
            stop=stop,
            watch=watch,
            faults=make_fault_injector(run, plan, stepper),
            origins=Origins(train_data, training_sources(run), partial(load_tokenizer, config.model)),
        )
    )


def make_fault_injector(run: RunDir, plan: Plan, stepper: Stepper) -> FaultInjector | None:
    faults = planned_faults()
    if not faults:
        return None
    in_python = not (plan.cuda_graph or plan.compile)
    return FaultInjector(faults, rank=stepper.world.rank, model=stepper.model, marks=run.faults, hooks_work=in_python)


def save_result(
    run: RunDir, config: TrainConfig, stepper: Stepper, emit: Emit, *, base_fingerprint: str | None = None
) -> None:
    """Gather the adapter or the full model; rank 0 saves it. Collective. `base_fingerprint`: of the model that training
    started from; None: unchanged since."""
    world, form = stepper.world, trained_form(config.method)
    weights = dict(full_tensors(stepper.parameters, world.layout, world.long_timeout_group))
    if world.is_main:
        save_trained(
            TrainedWeights(stepper.model, weights),
            run.path / form,
            method=config.method,
            model_config=config.model,
            tokenizer=load_tokenizer(config.model),
            base=None if base_fingerprint is None else base_trained_on(config.model, base_fingerprint),
        )
        emit(ModelSaved(path=form, form=form))


def base_trained_on(model: ModelConfig, fingerprint: str) -> BaseIdentity:
    """Return the identity of the base; if the model has changed since, only its fingerprint is known."""
    current = BaseIdentity.of(model)
    return current if current.fingerprint == fingerprint else BaseIdentity(fingerprint, config="", commit=None)


def open_data(run: RunDir, *, untrusted: bool = False) -> tuple[TokenDataset, TokenDataset | None]:
    """Open what `prepare` wrote: training data and, if there is any, evaluation data. `untrusted`: by someone else."""
    paths = run.data()
    evaluation = TokenDataset.open(Path(paths["eval"]), untrusted=untrusted) if paths["eval"] else None
    return TokenDataset.open(Path(paths["train"]), untrusted=untrusted), evaluation


def training_sources(run: RunDir) -> list[Source]:
    """Files of the training data, in order; empty if an earlier version prepared it."""
    return [Source(*source) for source in run.data()["sources"]]


def check_fits(model: Any, dataset: TokenDataset | None) -> None:
    """Raise ModelError if token IDs or positions exceed the model's. An embedding lookup out of range would end in an
    uninformative device-side assertion; computed positions (RoPE) would exceed what the model was pretrained on."""
    if dataset is None:
        return
    if dataset.packed:
        require_packing_support(model, longest=dataset.seq_len)
    rows = model.get_input_embeddings().weight.shape[0]
    if dataset.largest_token >= rows:
        raise ModelError(
            f"The data has token ID {dataset.largest_token}, but the model's vocabulary has only {rows} tokens.",
            fix="Use the tokenizer that belongs to the model (model.tokenizer).",
        )
    positions = _positions(model)
    if positions is not None and dataset.longest_document > positions:
        raise ModelError(
            f"The data has a row of {dataset.longest_document} tokens, but the model has only {positions} positions.",
            fix=f"Set data.seq_len={positions} or less to truncate longer rows. (With RoPE, a larger"
            " max_position_embeddings in the model's config.json allows more.)",
        )


def beyond_positions(model: Any, dataset: TokenDataset) -> str | None:
    """Notice for a data.seq_len above the model's positions that no document reaches; None if it is not above."""
    positions = _positions(model)
    if positions is None or dataset.seq_len <= positions:
        return None
    return (
        f"data.seq_len={dataset.seq_len} is above the model's {positions} positions; the longest document has"
        f" {dataset.longest_document} tokens, so none is affected"
    )


def _positions(model: Any) -> int | None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def plan_for_padded_rows(config: TrainConfig, plan: Plan, emit: Emit) -> Plan:
    """Return `plan` without the automatic choices that need packed rows of one length."""
    requested = {"cuda_graph": config.train.cuda_graph, "compile": config.train.compile}
    off = {name: False for name, value in requested.items() if value == "auto" and getattr(plan, name)}
    for name in off:
        reason = "without packing, batch shapes vary"
        emit(ChoiceMade(**Choice(name=f"train.{name}", value=False, reason=reason, automatic=True).model_dump()))
    return plan.model_copy(update=off)


def resolve_rope_batching(
    model: Any, config: TrainConfig, plan: Plan, datasets: Sequence[TokenDataset], emit: Emit
) -> Plan:
    """Return `plan` with one row per micro-batch if a long document would change the RoPE of rows batched with it."""
    reason = rope_batching_reason(model.config, datasets)
    if reason is None or plan.micro_batch_size == 1:
        return plan
    if config.train.micro_batch_size != "auto":
        size = config.train.micro_batch_size
        message = f"{reason}: with train.micro_batch_size={size} the loss depends on which rows share a batch; use 1"
        emit(WarningIssued(message=message))
        return plan
    choice = Choice(name="train.micro_batch_size", value=1, reason=reason, automatic=True)
    emit(ChoiceMade(**choice.model_dump()))
    return plan.model_copy(update={"micro_batch_size": 1})


def rope_batching_reason(model_config: Any, datasets: Sequence[TokenDataset]) -> str | None:
    """Why rows of this data must not share a micro-batch; None: they may."""
    longest = max(dataset.longest_document for dataset in datasets)
    rope = varying_rope(model_config)
    if rope is None or not rope.in_reach(longest):
        return None
    return f"RoPE ({rope.kind}) changes for a whole micro-batch with a document of more than {rope.length} tokens"


def resolve_learning_rate(model: Any, config: TrainConfig, steps: int, emit: Emit) -> TrainConfig:
    """Return `config` with a number for train.learning_rate=auto."""
    if config.train.learning_rate != "auto":
        return config
    text_config = model.config.get_text_config()
    hidden = getattr(text_config, "hidden_size", None)
    choice = learning_rate_choice(config, text_config.model_type, hidden if isinstance(hidden, int) else None, steps)
    emit(ChoiceMade(**choice.model_dump()))
    return config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": choice.value})})


def small_adapters(model: Any, config: TrainConfig, dataset: TokenDataset, length: RunLength) -> str | None:
    """Notice for adapters with fewer parameters than there are different tokens with a loss; None if they have more."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    samples = length.steps * config.train.global_batch_size if length.samples is None else length.samples
    seen = min(1.0, samples / max(1, len(dataset)))
    tokens = seen * float(dataset.target_tokens(np.arange(len(dataset))).sum())
    choice = rank_choice(config, parameters, tokens)
    return choice.reason if choice is not None and parameters < tokens else None


def build_model(config: TrainConfig, plan: Plan, world: World, emit: Emit, *, packed: bool = True) -> nn.Module:
    """Load the model for training: in the dtype of its method, with adapters, on this rank's device. `packed`: rows
    contain several documents."""
    begin = time.perf_counter()
    full = config.method.kind == "full"
    model: Any = load_model(
        config.model,
        # With autocast, full fine-tuning may keep weights in a wider dtype than it computes in.
        dtype=DTYPES[config.train.weights if full else plan.precision],
        device=world.device if plan.split is None else torch.device("cpu"),
        quantize=plan.frozen_weights,
        seed=config.train.seed,
        # DoRA initializes from the norms of the weights, so they have to be loaded.
        lazy_layers=plan.dims.model_is_sharded and config.method.kind != "dora",
    )
    if plan.split is not None:
        spread(model, plan.split)
    isolation = isolate_documents(model, longest=config.data.seq_len)
    if isolation.masked is not None and packed:
        emit(Notice(message=f"documents are separated by an attention mask: {isolation.masked}"))
    model = apply_method(model, config.method, seed=config.train.seed)
    if config.train.fused != "off":
        for reason, count in speed_up_experts(model).items():
            emit(
                Notice(message=f"adapters of the experts in {count} layers are added to all of their weights: {reason}")
            )
    if plan.fp8_matmuls:
        use_fp8_matmuls(model)
    if plan.fused:
        for reason, count in fuse(model).reasons.items():
            emit(Notice(message=f"{count} decoder layers are not fused: {reason}"))
    # Tensor parallelism shards an unquantized head over the vocabulary; each shard is small enough.
    if not full and not is_split(model) and plan.dims.tensor == 1:
        quantize_head_like_layers(model.get_base_model(), fused=plan.fused)
    apply_checkpointing(model, plan.activation_checkpointing)
    if plan.fused:
        enable_layer_chain(model)
    lean = plan.activation_checkpointing in ("full", "offload")
    text: Any = model if full else model.get_base_model()
    note = long_sequence_note(text, rows=plan.micro_batch_size, width=config.data.seq_len, lean=lean)
    if note is not None:
        emit(Notice(message=note))
    emit(
        ModelReady(
            architecture=type(model).__name__ if full else type(model.get_base_model()).__name__,
            parameters=parameter_count(model),
            trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            precision=plan.precision,
            frozen_weights=plan.frozen_weights,
            seconds=time.perf_counter() - begin,
        )
    )
    return cast(nn.Module, model)

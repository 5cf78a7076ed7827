"""Task `train`: one rank of a training run, from weights on disk to trained weights on disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pantheraml.base import env
from pantheraml.base.errors import ModelError
from pantheraml.base.events import Emit, EventWriter, silent
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.origin import Origins, Source
from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.engine.compile import compile_layers
from pantheraml.engine.faults import FaultInjector
from pantheraml.engine.guard.collectives import recorded_collectives
from pantheraml.engine.guard.signals import StopFlag
from pantheraml.engine.guard.watch import StepWatch, Watch
from pantheraml.engine.loop import Job, TrainingLoop
from pantheraml.engine.out_of_memory import explain
from pantheraml.engine.step import Stepper
from pantheraml.launch.flight_record import RECORDER_ENVIRONMENT
from pantheraml.launch.stacks import COLLECTIVE_SHARE
from pantheraml.models.adapters import Trained, apply_method, parameter_count, save_trained, trained_form
from pantheraml.models.fast import fuse, quantise_head_like_layers, run_together, why_one_layout
from pantheraml.models.loader import load_model, load_tokenizer, weights_fingerprint
from pantheraml.models.packing import keep_documents_apart, require_right_packing
from pantheraml.models.quantise.trained_fp8 import use_fp8_products
from pantheraml.models.rope import varying_rope
from pantheraml.models.trained_on import TrainedOn
from pantheraml.parallel.gather import full_tensors
from pantheraml.parallel.process_group import NotNeededError, World, open_world
from pantheraml.parallel.split import is_split, spread
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Choice, Layouts, Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import ModelConfig, TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train_task(folder: Path, events: EventWriter) -> None:
    run = RunDir(folder)
    config, plan = run.config(), run.plan()
    stop = StopFlag(run.stop_file)
    for name, value in RECORDER_ENVIRONMENT.items():
        env.suggest_for_this_process(name, value)
    with stop.listening(), contextlib.suppress(NotNeededError), join(config.parallel, plan) as world:
        emit: Emit = events if world.is_main else silent
        if world.fallback_reason is not None:
            emit(
                "run.fallback",
                message=f"one process goes on instead of {plan.world_size}: {world.fallback_reason}",
                reason=world.fallback_reason,
                planned_world_size=plan.world_size,
            )
            config, plan = alone(config, plan)
        try:
            train_rank(run, config, plan, world, emit, stop, heartbeat=events)
        except torch.OutOfMemoryError as err:
            raise explain(err, config, plan) from err


def join(parallel: MultiGPUConfig, plan: Plan) -> AbstractContextManager[World]:
    return open_world(
        plan,
        timeout_seconds=parallel.timeout_seconds,
        collective_seconds=COLLECTIVE_SHARE * parallel.timeout_seconds,
        max_retries=parallel.max_retries,
        strict=parallel.strict,
    )


def alone(config: TrainConfig, plan: Plan) -> tuple[TrainConfig, Plan]:
    """Config and plan for the one process that is left: nobody is there to share a batch with, but the global batch,
    and so the result, stays."""
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
    """This rank's part of the run, inside a process group that is already open. Ranks other than 0 `emit` nothing; all
    say by `heartbeat` that they get on."""
    # not a lambda: this file is in the stack of the thread that trains alone (see `launch.stacks`)
    collectives = partial(recorded_collectives, plan.backend) if world.size > 1 else None
    with StepWatch(
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
            heartbeat("train.stopped", signal=stop.signal.name)
        world.wait_for_main()


def make_loop(
    run: RunDir, config: TrainConfig, plan: Plan, world: World, emit: Emit, stop: StopFlag, watch: Watch
) -> TrainingLoop:
    """Model and data, ready to train. A collective."""
    layout = world.layout
    # Processes that see the same tokens drop the same ones.
    torch.manual_seed(config.train.seed + layout.data_rank * layout.dims.context + layout.place["context"])
    train_data, eval_data = open_data(run)
    if config.data.packing and not train_data.packed:
        plan = for_padded_rows(config, plan, emit)
    model = build_model(config, plan, world, emit, packed=train_data.packed)
    for dataset in (train_data, eval_data):
        check_fits(model, dataset)
    if (message := beyond_positions(model, train_data)) is not None:
        emit("notice", message=message)
    plan = with_rows_apart(model, config, plan, [train_data, *filter(None, [eval_data])], emit)
    world.wait_for_main()  # ranks may load at different speeds; DDP's own first meeting has the short timeout
    watch.beat()
    stepper = Stepper(model, config, world, plan)
    if plan.compile:
        compile_layers(model)
    for choice in stepper.decided.choices:
        emit("choice", **choice.model_dump())
    for warning in stepper.decided.warnings:
        emit("warning", message=warning)
    if stepper.passes.full_logits_reason:
        emit("notice", message=f"the loss needs full logits: {stepper.passes.full_logits_reason}")
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
            faults=injector(run, config, plan, stepper) if config.faults else None,
            origins=Origins(train_data, sources_of(run), partial(load_tokenizer, config.model)),
        )
    )


def injector(run: RunDir, config: TrainConfig, plan: Plan, stepper: Stepper) -> FaultInjector:
    in_python = not (plan.cuda_graph or plan.compile)
    return FaultInjector(
        config.faults, rank=stepper.world.rank, model=stepper.model, marks=run.faults, hooks_work=in_python
    )


def save_result(
    run: RunDir, config: TrainConfig, stepper: Stepper, emit: Emit, *, base_fingerprint: str | None = None
) -> None:
    """The adapter or the whole model, from wherever its parts are. A collective; rank 0 writes. `base_fingerprint` is
    of the model that training began with; None: it is the same still."""
    world, form = stepper.world, trained_form(config.method)
    weights = dict(full_tensors(stepper.parameters, world.layout, world.patient_group))
    if world.is_main:
        save_trained(
            Trained(stepper.model, weights),
            run.path / form,
            method=config.method,
            model_config=config.model,
            tokenizer=load_tokenizer(config.model),
            base=None if base_fingerprint is None else trained_on(config.model, base_fingerprint),
        )
        emit("model.saved", path=form, form=form)


def trained_on(model: ModelConfig, fingerprint: str) -> TrainedOn:
    """The base of that fingerprint; if the model has changed since, no more than that is known of it."""
    now = TrainedOn.of(model)
    return now if now.fingerprint == fingerprint else TrainedOn(fingerprint, config="", commit=None)


def open_data(run: RunDir) -> tuple[TokenDataset, TokenDataset | None]:
    """What the `prepare` task left: training and, if there is any, evaluation data."""
    places = run.data()
    evaluation = TokenDataset.open(Path(places["eval"])) if places["eval"] else None
    return TokenDataset.open(Path(places["train"])), evaluation


def sources_of(run: RunDir) -> list[Source]:
    """The files of the training data, in order; none where an earlier version prepared it."""
    return [Source(*source) for source in run.data()["sources"]]


def check_fits(model: Any, dataset: TokenDataset | None) -> None:
    """A token or a position beyond an embedding would end in a device-side assertion that names nothing; positions that
    are computed would train what the model never saw."""
    if dataset is None:
        return
    if dataset.packed:
        require_right_packing(model, longest=dataset.seq_len)
    rows = model.get_input_embeddings().weight.shape[0]
    if dataset.largest_token >= rows:
        raise ModelError(
            f"The data has the token {dataset.largest_token}, but the model knows only {rows} tokens.",
            todo="Use the tokenizer that belongs to the model (model.tokenizer).",
        )
    positions = _positions(model)
    if positions is not None and dataset.longest_document > positions:
        raise ModelError(
            f"The data has a row of {dataset.longest_document} tokens, but the model knows only {positions} positions.",
            todo=f"Set data.seq_len={positions} or less; longer rows are cut then. (Where positions are computed, as"
            " rotary ones are, a larger max_position_embeddings in the model's config.json allows more.)",
        )


def beyond_positions(model: Any, dataset: TokenDataset) -> str | None:
    """Notice of a data.seq_len above the model's positions, which no document reaches; None where it is not above."""
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


def for_padded_rows(config: TrainConfig, plan: Plan, emit: Emit) -> Plan:
    """`plan` for data that was to be packed and is not, without what was chosen for rows of one length."""
    chosen = {"cuda_graph": config.train.cuda_graph, "compile": config.train.compile}
    off = {name: False for name, asked in chosen.items() if asked == "auto" and getattr(plan, name)}
    for name in off:
        reason = "without packing every batch has another shape"
        emit("choice", **Choice(name=f"train.{name}", value=False, reason=reason, automatic=True).model_dump())
    return plan.model_copy(update=off)


def with_rows_apart(model: Any, config: TrainConfig, plan: Plan, datasets: Sequence[TokenDataset], emit: Emit) -> Plan:
    """`plan` with one row a micro-batch, if a long document would change what is computed for others beside it."""
    longest = max(dataset.longest_document for dataset in datasets)
    rope = varying_rope(model.config)
    if rope is None or not rope.in_reach(longest) or plan.micro_batch_size == 1:
        return plan
    reason = f"RoPE ({rope.kind}) changes for a whole micro-batch with a document of more than {rope.length} tokens"
    if config.train.micro_batch_size != "auto":
        asked = config.train.micro_batch_size
        message = f"{reason}: with train.micro_batch_size={asked} the loss depends on what rows stand together; use 1"
        emit("warning", message=message)
        return plan
    emit("choice", **Choice(name="train.micro_batch_size", value=1, reason=reason, automatic=True).model_dump())
    return plan.model_copy(update={"micro_batch_size": 1})


def build_model(config: TrainConfig, plan: Plan, world: World, emit: Emit, *, packed: bool = True) -> nn.Module:
    """The model as it will be trained: loaded in the dtype of its method, with adapters, on this rank's device.
    `packed`: for rows of several documents."""
    begin = time.perf_counter()
    full = config.method.kind == "full"
    model: Any = load_model(
        config.model,
        # Under autocast the weights of a full fine-tune may be wider than its arithmetic.
        dtype=DTYPES[config.train.weights if full else plan.precision],
        device=world.device if plan.split is None else torch.device("cpu"),
        quantise=plan.frozen_weights,
        seed=config.train.seed,
        # DoRA begins with the norms of the weights, and so has to see them.
        layers_unread=plan.dims.model_copies_apart and config.method.kind != "dora",
    )
    if plan.split is not None:
        spread(model, plan.split)
    apart = keep_documents_apart(model, longest=config.data.seq_len)
    if apart.masked is not None and packed:
        emit("notice", message=f"documents are kept apart by an attention mask: {apart.masked}")
    model = apply_method(model, config.method, seed=config.train.seed)
    if plan.fp8_products:
        use_fp8_products(model)
    layouts = fp8_layouts(model, config, plan, emit)
    if plan.fused:
        for reason, count in fuse(model, layouts=layouts).reasons.items():
            emit("notice", message=f"{count} decoder layers are not fused: {reason}")
    # Tensor parallelism cuts a plain head over the vocabulary; what a rank then has of it is small enough.
    if not full and not is_split(model) and plan.dims.tensor == 1:
        quantise_head_like_layers(model.get_base_model(), fused=plan.fused)
    apply_checkpointing(model, plan.activation_checkpointing)
    if plan.fused:
        run_together(model)
    emit(
        "model.ready",
        architecture=type(model).__name__ if full else type(model.get_base_model()).__name__,
        parameters=parameter_count(model),
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        precision=plan.precision,
        frozen_weights=plan.frozen_weights,
        seconds=time.perf_counter() - begin,
    )
    return model


def fp8_layouts(model: nn.Module, config: TrainConfig, plan: Plan, emit: Emit) -> Layouts:
    """As planned, unless the plan could not know how large the weights are."""
    if not plan.fused or plan.fp8_layouts == 1 or config.train.fp8_layouts == 2:
        return plan.fp8_layouts if plan.fused else 1
    why_one = why_one_layout(model)
    if why_one is None:
        return 2
    emit("choice", **Choice(name="train.fp8_layouts", value=1, reason=why_one, automatic=True).model_dump())
    return 1

"""Settings of the Hugging Face Trainer, which Axolotl and LLaMA-Factory both pass on, partly under other names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pantheraml.specs.import_config.draft import Draft, as_number

OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw8bit",
}
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
SINKS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True)
class Names:
    """Where the two trainers call the same setting differently, and where their defaults differ."""

    epochs: str
    schedule: str
    optimizer: str
    workers: str
    evaluation_data: tuple[str, ...]
    default_epochs: float
    default_schedule: str
    default_save_steps: int | None
    """None: a checkpoint after every epoch."""
    default_warmup: str | None = None
    """What happens without warmup settings, if anything."""
    ratio_rounds_up: bool = True


def translate_training(draft: Draft, names: Names) -> None:
    """Translate everything but model, method, data and batch size. Needs the evaluation data to be known."""
    _steps(draft, names)
    _learning_rate(draft, names)
    _warmup(draft, names)
    _optimizer(draft, names)
    _evaluation(draft, names)
    _checkpoints(draft, names)
    _small_ones(draft, names)


def has_eval(draft: Draft) -> bool:
    return "data.eval_fraction" in draft.settings or "data.eval_path" in draft.settings


def _max_steps(draft: Draft) -> int | None:
    steps = draft.integer("max_steps")
    return steps if steps is not None and steps > 0 else None


def _epochs(draft: Draft, names: Names) -> float:
    epochs = draft.number(names.epochs)
    return names.default_epochs if epochs is None else epochs


def _steps(draft: Draft, names: Names) -> None:
    steps = _max_steps(draft)
    if steps is not None:
        draft.put("train.max_steps", steps, "max_steps")
        draft.unneeded(names.epochs, "max_steps takes precedence")
        return
    draft.unneeded("max_steps", "not set (-1)")
    draft.put("train.epochs", as_number(_epochs(draft, names)), names.epochs)


def _learning_rate(draft: Draft, names: Names) -> None:
    rate = draft.number("learning_rate")
    if rate is None:
        draft.put("train.learning_rate", 5e-5)  # the Trainer's own default
    else:
        draft.put("train.learning_rate", rate, "learning_rate")
    given = draft.text(names.schedule)
    name = given or names.default_schedule
    if name in SCHEDULES:
        draft.put("train.schedule", SCHEDULES[name], names.schedule)
    else:
        draft.unsupported(names.schedule, f"{name} is not one of cosine, linear, constant; train.schedule stays cosine")
    _schedule_settings(draft, name, draft.settings["train.learning_rate"].value)


def _schedule_settings(draft: Draft, schedule: str, rate: float) -> None:
    settings = draft.get("lr_scheduler_kwargs")
    if not settings:
        draft.unneeded("lr_scheduler_kwargs", "empty")
        return
    ratio = None
    if schedule == "cosine_with_min_lr" and isinstance(settings, dict) and len(settings) == 1:
        low, share = settings.get("min_lr"), settings.get("min_lr_rate")
        numbers = [x for x in (low, share) if isinstance(x, int | float) and not isinstance(x, bool)]
        if numbers:
            ratio = share if share is not None else numbers[0] / rate
    if ratio is None:
        draft.unsupported("lr_scheduler_kwargs", "only min_lr or min_lr_rate of cosine_with_min_lr is known here")
    else:
        draft.put("train.min_learning_rate_ratio", ratio, "lr_scheduler_kwargs")


def _warmup(draft: Draft, names: Names) -> None:
    steps, ratio = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if (draft.get(names.schedule) or names.default_schedule) == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            draft.unneeded(key, "the schedule `constant` has no warmup (constant_with_warmup has)")
        return
    if steps is not None and (steps >= 1 or (steps == 0 and not ratio)):
        draft.put("train.warmup_steps", math.ceil(steps), "warmup_steps")
        draft.unneeded("warmup_ratio", "warmup_steps takes precedence")
        return
    key = "warmup_steps" if steps else "warmup_ratio"  # below 1, warmup_steps is a ratio
    share = steps or ratio
    draft.unneeded("warmup_ratio" if steps else "warmup_steps", "not set (0)")
    if share is None:
        if names.default_warmup:
            draft.notes.append(names.default_warmup)
        return
    if share < 0 or share >= 1:
        draft.refuse(key, f"takes a fraction of the steps from 0 to 1, not {share:g}")
    total = _max_steps(draft)
    if share == 0:
        draft.unneeded(key, "0, as here")
    elif total is not None:
        warm = math.ceil(share * total) if names.ratio_rounds_up else int(share * total)
        draft.put("train.warmup_steps", warm, key, reason=f"of {total} steps")
    else:
        draft.unsupported(
            key,
            f"the number of steps is known only once the data has been read: set train.warmup_steps to {share:g} x"
            " (steps of the run), or set max_steps and import again",
        )


def _optimizer(draft: Draft, names: Names) -> None:
    name = draft.text(names.optimizer) or "adamw_torch"
    if name in OPTIMIZERS:
        paged = "states are not paged to host memory" if name.startswith("paged") else ""
        draft.put("train.optimizer", OPTIMIZERS[name], names.optimizer, reason=paged)
    else:
        draft.unsupported(
            names.optimizer, f"{name} is not one of adamw, adamw_bf16, adamw8bit; train.optimizer stays adamw"
        )
    draft.unsupported_if_on("optim_args", "the optimizers here take train.beta1, beta2, eps and weight_decay only")
    for key, target in (("weight_decay", "weight_decay"), ("max_grad_norm", "max_grad_norm")):
        if (value := draft.number(key)) is not None:
            draft.put(f"train.{target}", value, key)
    for target, keys in (
        ("beta1", ("adam_beta1",)),
        ("beta2", ("adam_beta2",)),
        ("eps", ("adam_epsilon", "adam_eps")),
    ):
        key = draft.first(*keys)
        if (value := draft.number(key)) is not None:
            draft.put(f"train.{target}", value, key)


def hold_out(draft: Draft, key: str) -> None:
    """Translate the fraction of rows that is held out for evaluation."""
    size = draft.number(key)
    if size is None or size == 0:
        draft.unneeded(key, "0: no rows are held out, as here")
    elif 0 < size < 1:
        draft.put("data.eval_fraction", size, key, reason="rows are chosen by their content, not at random")
    else:
        draft.unsupported(
            key, f"{size:g} is a number of rows; set data.eval_fraction to it divided by the rows of the data"
        )


def _every(draft: Draft, key: str, target: str) -> bool:
    """Translate `save_steps` and the like; below 1 it is a share of all steps. Return whether it was translated."""
    steps = draft.number(key)
    if steps is None or steps <= 0:
        draft.unneeded(key, "not set")
        return False
    total = _max_steps(draft)
    if steps >= 1:
        draft.put(target, math.ceil(steps), key)
    elif total is not None:
        draft.put(target, max(1, math.ceil(steps * total)), key, reason=f"of {total} steps")
    else:
        draft.unsupported(key, f"the number of steps is not known yet: set {target} to {steps:g} x (steps of the run)")
        return False
    return True


def _per_epoch(draft: Draft, names: Names, key: str, target: str, what: str) -> None:
    times = draft.number(key)
    if not times or times <= 0:
        draft.unneeded(key, "off")
    elif times * _epochs(draft, names) == 1 and _max_steps(draft) is None:
        draft.unneeded(key, f"one {what} at the end, as here")
    else:
        per = "(steps per epoch)" if times == 1 else f"(steps per epoch) / {times:g}"
        draft.unsupported(key, f"steps per epoch are known only once the data has been read: set {target} to {per}")


def _evaluation(draft: Draft, names: Names) -> None:
    target = "train.eval_every_steps"
    strategy = draft.first("eval_strategy", "evaluation_strategy")
    keys = (strategy, "eval_steps", "evals_per_epoch", "early_stopping_patience", "load_best_model_at_end")
    if not has_eval(draft):
        wanted = any(draft.get(key) for key in names.evaluation_data)
        for key in keys:
            if draft.get(key) in (False, 0, "no"):
                draft.unneeded(key, "off")
            elif wanted or key in keys[-2:]:
                draft.unsupported(key, "needs evaluation data: set data.eval_path or data.eval_fraction first")
            else:
                draft.unneeded(key, "there is no evaluation data")
        return
    chosen = draft.get(strategy)
    chosen = "no" if chosen is False else chosen  # YAML reads `no` as false
    if chosen == "epoch":
        draft.unsupported(strategy, f"set {target} to the steps per epoch; evaluation at the end needs nothing")
        draft.unneeded("eval_steps", f"{strategy} is epoch")
    elif chosen == "no":
        draft.unneeded(strategy, "evaluation only at the end")
        draft.unneeded("eval_steps", f"{strategy} is no")
    else:
        _every(draft, "eval_steps", target)
        draft.unneeded(strategy, "follows from eval_steps")
    _per_epoch(draft, names, "evals_per_epoch", target, "evaluation")
    patience = draft.integer("early_stopping_patience")
    if patience and target in draft.settings:
        draft.put("train.early_stopping_patience", patience, "early_stopping_patience")
    else:
        draft.unsupported_if_on("early_stopping_patience", f"needs {target}: set both")
    if draft.flag("load_best_model_at_end"):
        draft.put("checkpoint.final", "best", "load_best_model_at_end")
    else:
        draft.unneeded("load_best_model_at_end", "off")


def _checkpoints(draft: Draft, names: Names) -> None:
    target = "checkpoint.every_steps"
    strategy = draft.get("save_strategy")
    strategy = "no" if strategy is False else strategy
    if strategy in ("no", "best", "epoch"):
        reasons = {
            "no": (draft.unneeded, "a checkpoint is written at the end only"),
            "epoch": (draft.unsupported, f"set {target} to the steps per epoch; the end of the run is always saved"),
            "best": (draft.unsupported, "set train.eval_every_steps and checkpoint.final=best"),
        }
        report, reason = reasons[strategy]
        report("save_strategy", reason)
        draft.unneeded("save_steps", f"save_strategy is {strategy}")
        saved = False
    else:
        draft.unneeded("save_strategy", "follows from save_steps")
        saved = _every(draft, "save_steps", target)
    _per_epoch(draft, names, "saves_per_epoch", target, "checkpoint")
    given = any(draft.has(key) for key in ("save_strategy", "save_steps", "saves_per_epoch"))
    if not given and names.default_save_steps is not None:
        draft.put(target, names.default_save_steps)
        saved = True
    elif not given and _epochs(draft, names) > 1:
        draft.notes.append(f"{draft.tool} saves after every epoch; here only the end is saved unless {target} is set.")
    keep = draft.integer("save_total_limit")
    if keep is not None and keep > 0:
        draft.put("checkpoint.keep", keep, "save_total_limit")
    elif saved:
        draft.unneeded("save_total_limit", "no limit")
        draft.notes.append(f"{draft.tool} keeps every checkpoint; here the newest 2 stay: set checkpoint.keep.")
    draft.unsupported_if_on("save_only_model", "checkpoints are always complete, so that a run can resume")


def _small_ones(draft: Draft, names: Names) -> None:
    seed = draft.integer("seed")
    draft.put("train.seed", 42 if seed is None else seed, "seed")
    _every(draft, "logging_steps", "train.log_every_steps")
    workers = draft.integer(names.workers)
    if workers is not None:
        draft.put("data.workers", max(0, workers), names.workers)
    if draft.has("torch_compile") and draft.get("torch_compile") != "auto":
        draft.put("train.compile", "on" if draft.flag("torch_compile") else "off", "torch_compile")
    else:
        draft.unneeded("torch_compile", "auto, as here")
    for key in ("find_unused_parameters", "broadcast_buffers"):
        if draft.flag(f"ddp_{key}") is not None:
            draft.put(f"parallel.{key}", draft.flag(f"ddp_{key}"), f"ddp_{key}")
    if draft.integer("ddp_bucket_cap_mb"):
        draft.put("parallel.bucket_cap_mb", draft.integer("ddp_bucket_cap_mb"), "ddp_bucket_cap_mb")
    if draft.has("output_dir"):
        draft.output_dir = draft.text("output_dir")
        draft.as_flag("output_dir", "--output")
    tf32 = "affects fp32 matmuls only, and this run computes in half precision"
    if draft.settings["model.precision"].value == "fp32" and draft.flag("tf32"):
        draft.unsupported("tf32", "fp32 matmuls run in full precision")
    else:
        draft.unneeded("tf32", tf32 if draft.get("tf32") else "off")


def batch(draft: Draft, micro: int, accumulation: int, data_ranks: int | None, *sources: str) -> None:
    """Set the two batch sizes. `data_ranks`: processes with different samples; None = not known."""
    accumulated = "gradient_accumulation_steps"
    draft.put("train.micro_batch_size", micro, sources[0])
    total = micro * accumulation * (data_ranks or 1)
    ranks = f"{data_ranks} GPU(s)" if data_ranks else "1 GPU"
    given = [
        f"{key}: {draft.get(key)}" if draft.has(key) else f"{key}: {value} (default)"
        for key, value in ((sources[0], micro), (accumulated, accumulation))
    ]
    draft.put("train.global_batch_size", total, *sources, comment=f"{' x '.join(given)} x {ranks}")
    if data_ranks is None:
        draft.notes.append(
            f"train.global_batch_size={total} is the batch of 1 GPU, as the file does not give their number. If you had"
            f" N GPUs, set it to {total} x N: it is the batch over all of them."
        )


def sharding(draft: Draft, degree: int | None, *keys: str) -> None:
    """Translate FSDP and DeepSpeed settings to parallel.shard, where the degree is known."""
    for key in keys:
        value = draft.get(key)
        if value in (None, "", [], {}, False):
            draft.unneeded(key, "off")
        elif degree is not None:
            draft.part_of(key, "parallel.shard")
        else:
            draft.unsupported(
                key,
                "to shard weights, gradients and optimizer states (FSDP, ZeRO), set parallel.shard to the number of"
                " GPUs; offload to host memory is not supported",
            )


def report_to(draft: Draft, sink: str, *sources: str) -> None:
    """Add a tracker."""
    before = draft.settings.get("report.sinks")
    sinks = [*(before.value if before else []), sink]
    if before is None or sink not in before.value:
        comment = f"{before.comment}; " if before else ""
        present = [key for key in sources if draft.has(key)]
        draft.put("report.sinks", sinks, *present, comment=comment + ", ".join(present))


def project(draft: Draft, key: str) -> None:
    """Set the project name of the trackers, of which there is one."""
    name = str(draft.get(key))
    before = draft.settings.get("report.project")
    if before is None:
        draft.put("report.project", name, key)
    elif before.value == name:
        draft.part_of(key, "report.project")
    else:
        draft.unsupported(key, f"report.project, one name for all trackers, is already {before.value}")

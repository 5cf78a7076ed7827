"""Every config field is used by every run, refused where it does not apply, or reported to have no effect."""

from __future__ import annotations

import pytest

from pantheraml.base.errors import PantheraError
from pantheraml.planner.choose import choose
from pantheraml.planner.no_effect import long_warmup
from pantheraml.specs.config_file import all_keys, load_config, parse_overrides, validate
from pantheraml.specs.train import TrainSettings
from tests.unit.planner.test_planner_choose import machine

ALWAYS_USED = """
model.path model.tokenizer model.precision model.init model.trust_remote_code model.allow_pickle model.device_map
data.path data.eval_path data.eval_fraction data.format data.seq_len data.packing data.on_bad_row data.on_long_row
data.workers data.cache_dir method.kind
train.max_steps train.global_batch_size train.micro_batch_size train.learning_rate train.schedule train.optimizer
train.weight_decay train.beta1 train.beta2 train.eps train.seed train.activation_checkpointing train.fused
train.cuda_graph train.compile train.log_every_steps
stability.clipping stability.on_nonfinite stability.on_spike stability.update_ratio_every stability.group_norms_every
stability.debug
checkpoint.every_steps checkpoint.background checkpoint.allow_change
report.html report.sinks
parallel.mode parallel.world_size parallel.rank parallel.local_rank parallel.device_ids parallel.replicate
parallel.shard parallel.tensor parallel.pipeline parallel.context
parallel.backend parallel.timeout_seconds parallel.max_retries parallel.grace_seconds
device
"""

REFUSED = {
    "model.max_memory": ["model.max_memory={0: 10GiB}"],
    "train.weights": ["train.weights=bf16"],
    "train.eval_every_steps": ["train.eval_every_steps=5"],
    "train.early_stopping_patience": ["data.eval_fraction=0.1", "train.early_stopping_patience=2"],
    "parallel.output_device": ["parallel.output_device=1"],
    "parallel.stages_per_process": ["parallel.stages_per_process=2"],
}

REPORTED_BY_THE_LOOP = ["train.warmup_steps"]
"""Needs the length of the run."""

NO_EFFECT = {
    "model.revision": ["model.path=/", "model.revision=main"],
    "method.rank": ["method.kind=full", "method.rank=64"],
    "method.alpha": ["method.kind=full", "method.alpha=64"],
    "method.dropout": ["method.kind=full", "method.dropout=0.1"],
    "method.target_modules": ["method.kind=full", "method.target_modules=[q_proj]"],
    "method.target_parameters": ["method.kind=full", "method.target_parameters=[experts.down_proj]"],
    "method.rslora": ["method.kind=full", "method.rslora=true"],
    "train.epochs": ["train.max_steps=3", "train.epochs=3"],
    "train.min_learning_rate_ratio": ["train.schedule=constant", "train.min_learning_rate_ratio=0.1"],
    "train.max_grad_norm": ["stability.clipping=none", "train.max_grad_norm=0.5"],
    "stability.clip_value": ["stability.clip_value=0.5"],
    "stability.clip_weight_ratio": ["stability.clip_weight_ratio=0.5"],
    "stability.clip_percentile": ["stability.clipping=zclip", "stability.clip_percentile=50"],
    "stability.clip_history": ["stability.clip_history=10"],
    "stability.clip_zscore": ["stability.clipping=adagc", "stability.clip_zscore=3"],
    "stability.clip_growth": ["stability.clipping=zclip", "stability.clip_growth=2"],
    "stability.clip_decay": ["stability.clipping=percentile", "stability.clip_decay=0.5"],
    "stability.clip_warmup_steps": ["stability.clipping=value", "stability.clip_warmup_steps=5"],
    "stability.spike_zscore": ["stability.on_spike=ignore", "stability.spike_zscore=3"],
    "stability.spike_warmup_steps": ["stability.on_spike=ignore", "stability.spike_warmup_steps=3"],
    "stability.rate_factor": ["stability.rate_factor=0.1"],
    "stability.max_skipped_steps": ["stability.max_skipped_steps=9"],
    "stability.max_skipped_total": ["stability.max_skipped_total=9"],
    "stability.rollback_steps": ["stability.rollback_steps=9"],
    "stability.max_rollbacks": ["stability.max_rollbacks=9"],
    "checkpoint.keep": ["checkpoint.keep=5"],
    "checkpoint.final": ["data.eval_fraction=0.1", "checkpoint.final=best"],
    "report.project": ["report.project=mine"],
    "parallel.auto_policy": ["parallel.mode=none", "parallel.auto_policy=simple"],
    "parallel.hybrid_strategy": ["parallel.hybrid_strategy=data_parallel"],
    "parallel.aggregation": ["parallel.aggregation=median"],
    "parallel.aggregation_weights": ["parallel.aggregation=weighted", "parallel.aggregation_weights=[1.0]"],
    "parallel.leave_out_nonfinite": ["parallel.leave_out_nonfinite=true"],
    "parallel.batch_shares": ["parallel.batch_shares=adaptive"],
    "parallel.check_every": ["parallel.check_every=7"],
    "parallel.find_unused_parameters": ["parallel.shard=2", "parallel.find_unused_parameters=true"],
    "parallel.gradient_as_bucket_view": ["parallel.gradient_as_bucket_view=false"],
    "parallel.broadcast_buffers": ["parallel.broadcast_buffers=false"],
    "parallel.static_graph": ["parallel.static_graph=false"],
    "parallel.sync_bn": ["parallel.sync_bn=false"],
    "parallel.bucket_cap_mb": ["parallel.tensor=2", "parallel.bucket_cap_mb=5"],
    "parallel.enable_multi_gpu_monitoring": ["parallel.enable_multi_gpu_monitoring=false"],
    "parallel.restart_on": ["parallel.max_retries=0", "parallel.restart_on=[hung]"],
    "parallel.memory_fraction": ["parallel.memory_fraction=0.5"],
    "parallel.min_world_size": ["parallel.min_world_size=1"],
    "parallel.strict": ["parallel.strict=true"],
}


def warnings(*settings: str, processes: int = 1) -> tuple[str, ...]:
    overrides = parse_overrides(["model.path=m", "data.path=d", f"parallel.world_size={processes}", *settings])
    return choose(load_config(None, overrides), machine()).warnings


def leaves() -> set[str]:
    keys = {".".join(key) for key in all_keys()}
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def test_every_field_is_in_one_of_the_lists() -> None:
    listed = [*ALWAYS_USED.split(), *REFUSED, *REPORTED_BY_THE_LOOP, *NO_EFFECT]
    assert sorted(listed) == sorted(leaves())


@pytest.mark.parametrize("key", NO_EFFECT)
def test_setting_without_effect_is_reported(key: str) -> None:
    settings = NO_EFFECT[key]
    processes = 2 if any(part.startswith(("parallel.shard", "parallel.tensor")) for part in settings) else 1
    reported = [message for message in warnings(*settings, processes=processes) if message.startswith(f"{key}=")]
    assert len(reported) == 1
    assert "has no effect: " in reported[0]


@pytest.mark.parametrize("key", REFUSED)
def test_inapplicable_setting_is_refused(key: str) -> None:
    with pytest.raises(PantheraError, match=key.rpartition(".")[2]):
        warnings(*REFUSED[key])


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["method.rank=64", "train.epochs=3", "train.min_learning_rate_ratio=0.1", "train.max_grad_norm=0.3"],
        ["stability.clipping=percentile", "stability.clip_history=10", "train.max_grad_norm=0.3"],
        ["stability.clipping=adagc", "stability.clip_growth=2", "stability.clip_decay=0.5"],
        ["stability.on_nonfinite=lower_rate", "stability.rate_factor=0.1", "stability.max_skipped_steps=9"],
        ["data.eval_fraction=0.1", "train.eval_every_steps=5", "checkpoint.final=best"],
        ["report.sinks=[wandb]", "report.project=mine"],
    ],
)
def test_used_settings_are_not_reported(settings: list[str]) -> None:
    assert warnings(*settings) == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["train.max_steps=10", "train.epochs=1"], "train.epochs=1.0 has no effect: train.max_steps=10"),
        (["checkpoint.keep=2"], "checkpoint.keep=2 has no effect: without checkpoint.every_steps"),
        (["method.kind=full", "method.rank=16"], "method.rank=16 has no effect: method.kind=full"),
    ],
)
def test_explicit_defaults_are_reported(settings: list[str], expected: str) -> None:
    (message,) = warnings(*settings)
    assert message.startswith(expected)


@pytest.mark.parametrize(
    "settings",
    [
        ["method.kind=full", "method.dropout=0"],
        ["checkpoint.final=last"],
        ["checkpoint.keep=2", "checkpoint.every_steps=5"],
        ["checkpoint.keep=2", "data.eval_fraction=0.1", "train.eval_every_steps=5"],  # the best ones are saved
    ],
)
def test_explicit_settings_that_change_nothing_are_not_reported(settings: list[str]) -> None:
    assert warnings(*settings) == ()


@pytest.mark.parametrize(("warmup", "total", "warns"), [(0, 1, False), (9, 10, False), (10, 10, True), (200, 10, True)])
def test_warmup_as_long_as_the_run_warns(warmup: int, total: int, warns: bool) -> None:
    message = long_warmup(TrainSettings(warmup_steps=warmup, learning_rate=1.0), total)
    assert (message is not None) == warns
    if warmup == 200:
        assert message is not None
        assert "reaches 0.05," in message


def test_multi_process_settings_are_used_by_several_processes() -> None:
    settings = ["parallel.aggregation=median", "parallel.check_every=7", "parallel.bucket_cap_mb=5"]
    assert warnings(*settings, processes=2) == ()


def test_stored_config_gives_no_warnings() -> None:
    """The configuration in a run folder lists every key."""
    plan = choose(validate(load_config(None, parse_overrides(["model.path=m", "data.path=d"])).to_dict()), machine())
    assert plan.warnings == ()

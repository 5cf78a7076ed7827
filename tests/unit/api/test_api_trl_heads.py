"""TRL's trainers use our output head where it has what they need: every logged metric is that of plain PEFT.

Plain PEFT runs TRL's own head, in this process as well: the patches leave models that are not ours to it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from pantheraml.hooks import trl as trl_hooks
from pantheraml.hooks.orpo import ORPO_HEAD
from pantheraml.hooks.registry import REGISTRY
from pantheraml.models.causal_lm import fast_model
from tests.unit.api.trl_runs import (
    SAMPLING,
    SETTINGS,
    Record,
    gradient_error,
    loaded,
    make_trainer,
    plain_base,
    plain_model,
    recorded,
    rows,
)
from tests.unit.api.trl_runs import fast_model as new_model

pytestmark = pytest.mark.usefixtures("restored_environment")

METRICS = 1e-5
"""Largest difference of a logged metric, relative to itself or to 1. 1.5e-6 was the largest."""
GRADIENTS = 1e-5
NOT_COMPARED = {"grad_norm", "epoch", "learning_rate", "step_time", "train_runtime", "train_loss", "total_flos"}
"""Times, and what does not come from the head; gradients are compared themselves."""


@pytest.fixture(scope="module")
def folder(wide_llama: Path) -> Path:
    return wide_llama


def metrics(run: Any) -> list[dict[str, float]]:
    steps = [entry for entry in run.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in NOT_COMPARED} for entry in steps]


def assert_same_metrics(kind: str, folder: Path, place: Path, **settings: Any) -> Any:
    """Train our model and plain PEFT, compare all metrics of all steps, and return our trainer."""
    fast = new_model(folder)
    plain = plain_model(folder, fast)
    settings = {"max_steps": 3, "gradient_checkpointing": False, **settings}
    ours, theirs = (
        make_trainer(kind, fast, folder, place, **settings),
        make_trainer(kind, plain, folder, place, **settings),
    )
    mine, other = recorded(ours), recorded(theirs)
    compare(ours, theirs, mine, other)
    return ours


def compare(ours: Any, theirs: Any, mine: Record, other: Record) -> None:
    assert gradient_error(mine, other) <= GRADIENTS
    actual, expected = metrics(ours), metrics(theirs)
    assert len(actual) == len(expected) == len(mine.gradients)
    for step, wanted in zip(actual, expected, strict=True):
        assert step.keys() == wanted.keys()
        for name, value in wanted.items():
            if name == "rewards/accuracies" and abs(wanted["rewards/margins"]) < METRICS:
                continue  # the policy is still the reference: a comparison of rounding errors
            if name.startswith("logits/") and "log_odds_ratio" in wanted:
                continue  # ORPO's mean includes padding, which attends to other padding here
            assert step[name] == pytest.approx(value, rel=METRICS, abs=METRICS), name


def uses_our_head(run: Any) -> bool:
    model = fast_model(run.model)
    assert model is not None
    return not model.has_foreign_head() and "fused" not in str(vars(model).get("forward"))


LOGGED = {
    "dpo": {"entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy", "rewards/margins", "logps/chosen"},
    "kto": {"entropy", "logits/chosen", "logits/rejected", "kl", "rewards/chosen", "logps/rejected"},
    "orpo": {"logits/chosen", "nll_loss", "log_odds_ratio", "rewards/margins"},
    "grpo": {"entropy", "kl", "clip_ratio/low_mean", "reward"},
    "rloo": {"entropy", "clip_ratio/high_max", "reward"},
}
CASES = {
    "dpo": ("dpo", {}),
    "dpo, part of the tokens": ("dpo", {"ld_alpha": 0.5, "loss_type": ["sigmoid", "sft"]}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "grpo": ("grpo", {}),
    "grpo, warm": ("grpo", {"temperature": 0.7}),
    "rloo, warm": ("rloo", {"temperature": 1.3}),
    "grpo, entropy mask": ("grpo", {"top_entropy_quantile": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_plain_peft(folder: Path, tmp_path: Path, name: str) -> None:
    kind, settings = CASES[name]
    run = assert_same_metrics(kind, folder, tmp_path, **settings)
    assert uses_our_head(run)
    assert metrics(run)[0].keys() >= LOGGED[kind]
    model = fast_model(run.model)
    assert model is not None
    assert model.score_temperature == settings.get("temperature", 1.0)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("dpo", {"use_weighting": True}, "the trainer needs log_sum_sq_probs"),
        ("grpo", {"entropy_coef": 0.1}, "the entropy bonus needs the gradient of the entropy"),
        ("grpo", {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
    ],
)
def test_what_our_head_lacks_is_left_to_trl(
    folder: Path, tmp_path: Path, kind: str, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="pantheraml"):
        run = assert_same_metrics(kind, folder, tmp_path, **settings)
    assert not uses_our_head(run)
    assert f"TRL's own fused head is used: {reason}" in caplog.text


def test_orpo_is_that_of_full_logits(folder: Path, tmp_path: Path) -> None:
    runs, records = [], []
    for patched in (True, False):
        fast = new_model(folder)
        if not patched:
            REGISTRY.revert(ORPO_HEAD)
        runs.append(make_trainer("orpo", fast, folder, tmp_path, max_steps=3))
        records.append(recorded(runs[-1]))
    trl_hooks.apply()
    assert gradient_error(*records) <= GRADIENTS
    for ours, theirs in zip(*map(metrics, runs), strict=True):
        assert ours == pytest.approx(theirs, rel=METRICS, abs=METRICS)


def test_orpo_computes_no_logits(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = new_model(folder)
    run = make_trainer("orpo", fast, folder, tmp_path, max_steps=1)

    def no_logits(*_: Any, **__: Any) -> Any:
        raise AssertionError("the output head was called")

    monkeypatch.setattr(fast.get_output_embeddings(), "forward", no_logits)
    with pytest.raises(AssertionError, match="the output head was called"):
        run.train()  # a head with a forward of its own may do anything
    monkeypatch.undo()
    fast.get_output_embeddings().register_forward_hook(no_logits)
    make_trainer("orpo", fast, folder, tmp_path, max_steps=1).train()


def test_a_trainer_removes_the_head_of_the_one_before(folder: Path, tmp_path: Path) -> None:
    fast = new_model(folder)
    plain = plain_model(folder, fast)
    settings = {"max_steps": 2, "gradient_checkpointing": False}
    for kind, changes in (("dpo", {"use_weighting": True}), ("rloo", {"temperature": 0.7}), ("dpo", {})):
        runs = [make_trainer(kind, model, folder, tmp_path, **settings, **changes) for model in (fast, plain)]
        compare(*runs, *map(recorded, runs))
        assert uses_our_head(runs[0]) == (changes.keys() != {"use_weighting"})
        if "ref" in plain.peft_config:  # TRL itself cannot add it again
            plain.delete_adapter("ref")


def test_the_reference_of_a_new_adapter_is_the_model_without_it(folder: Path, tmp_path: Path) -> None:
    fast = new_model(folder)
    for kind in ("dpo", "kto", "grpo", "rloo"):
        run = make_trainer(kind, fast, folder, tmp_path / kind)
        assert list(run.model.peft_config) == ["default"]
        assert run.model.active_adapter == "default"
        assert not any(".ref." in name for name, _ in run.model.named_parameters())


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
def test_the_reference_of_a_trained_adapter_is_its_copy(folder: Path, tmp_path: Path, kind: str) -> None:
    fast = new_model(folder)
    with torch.no_grad():
        for name, parameter in fast.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 20)
    plain = plain_model(folder, fast)
    settings = {"max_steps": 3, "gradient_checkpointing": True}
    runs = [make_trainer(kind, model, folder, tmp_path, **settings) for model in (fast, plain)]
    assert list(runs[0].model.peft_config) == ["default", "ref"]
    compare(*runs, *map(recorded, runs))


def test_each_trainer_of_a_trained_adapter_makes_its_own_reference(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As DPO after SFT after KTO, or a cell of a notebook that runs again."""
    fast = new_model(folder)
    for kind in ("sft", "dpo", "kto", "sft"):
        make_trainer(kind, fast, folder, tmp_path, max_steps=1).train()
    caplog.clear()
    run = make_trainer("dpo", fast, folder, tmp_path, max_steps=1)
    assert caplog.text.count("an earlier trainer's reference is removed") == 1
    adapters = dict(fast.named_parameters())
    copies = {name: value for name, value in adapters.items() if ".ref." in name}
    assert copies
    assert all(torch.equal(value, adapters[name.replace(".ref.", ".default.")]) for name, value in copies.items())
    run.train()
    assert run.state.log_history[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)


def test_an_adapter_that_the_script_calls_ref_is_kept(folder: Path, tmp_path: Path) -> None:
    fast = new_model(folder)
    fast.add_adapter("ref", fast.peft_config["default"])
    with pytest.raises(ValueError, match="already exists"):
        make_trainer("dpo", fast, folder, tmp_path)
    assert "ref" in fast.peft_config


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
def test_the_reference_of_a_full_fine_tune_has_its_scaled_rope(folder: Path, tmp_path: Path, kind: str) -> None:
    """TRL loads it from the folder, which does not know of the scaling."""
    model = loaded(folder, full_finetuning=True, max_seq_length=4096)
    assert model.rope is not None
    run = make_trainer(kind, model, folder, tmp_path, max_steps=1)
    run.train()
    assert run.ref_model is not None
    logged = run.state.log_history[0]
    assert logged["kl" if kind in SAMPLING else "rewards/chosen"] == pytest.approx(0, abs=1e-5)


def test_a_full_fine_tune_takes_arguments_of_older_versions(folder: Path, tmp_path: Path) -> None:
    args = DPOConfig(output_dir=str(tmp_path), **SETTINGS)
    model = loaded(folder, full_finetuning=True)
    run = DPOTrainer(
        model, args=args, beta=0.3, train_dataset=rows("dpo"), tokenizer=AutoTokenizer.from_pretrained(folder)
    )
    assert run.args.beta == 0.3


def test_a_reference_that_the_script_passes_keeps_its_rope(folder: Path, tmp_path: Path) -> None:
    model, reference = loaded(folder, full_finetuning=True, max_seq_length=4096), plain_base(folder)
    before = copy.deepcopy(reference.config.rope_parameters)
    args = DPOConfig(output_dir=str(tmp_path), **SETTINGS)
    data, tokenizer = rows("dpo"), AutoTokenizer.from_pretrained(folder)
    DPOTrainer(model, reference, args, train_dataset=data, processing_class=tokenizer)
    assert reference.config.rope_parameters == before


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
def test_padding_and_repeated_prompts_are_not_computed(folder: Path, tmp_path: Path, kind: str) -> None:
    fast = new_model(folder)
    run = make_trainer(kind, fast, folder, tmp_path, max_steps=1, gradient_checkpointing=False)
    seen: list[tuple[int, int]] = []

    def note(_model: Any, _args: Any, inputs: dict[str, Any]) -> None:
        if inputs.get("fused_lm_head"):
            handle = fast.get_base_model().model.norm.register_forward_pre_hook(
                lambda _, args: (seen.append((args[0].shape[:-1].numel(), int(inputs["attention_mask"].sum()))),
                                 handle.remove())[-1])  # fmt: skip

    fast.get_base_model().register_forward_pre_hook(note, with_kwargs=True)
    run.train()
    assert len(seen) >= 2, "policy and reference"
    assert all(computed <= tokens for computed, tokens in seen)
    assert any(computed < tokens for computed, tokens in seen) == (kind != "kto")


def test_patches_of_trainers_are_reverted() -> None:
    import trl.trainer.dpo_trainer as dpo
    import trl.trainer.grpo_trainer as grpo
    import trl.trainer.utils as trl_utils

    trl_hooks.apply()
    original = trl_utils.add_fused_lm_head
    assert all(module.add_fused_lm_head is not original for module in (dpo, grpo))
    patched = grpo.GRPOTrainer.__init__
    trl_hooks.revert()
    try:
        assert all(module.add_fused_lm_head is original for module in (dpo, grpo))
        assert grpo.GRPOTrainer.__init__ is not patched
    finally:
        trl_hooks.apply()

"""TRL's SFTTrainer over our model and over the plain one: the same numbers, step by step, to the end."""

from __future__ import annotations

import cProfile
import os
import pstats
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from pantheraml import FastLanguageModel
from pantheraml.base.env import child_environment
from pantheraml.models.causal_lm import TokenScoreOutput
from pantheraml.models.quantize.fp8 import FP8Linear
from tests import toy
from tests.e2e.conftest import COMMAND_SECONDS

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    place = tmp_path_factory.mktemp("trl") / "model"
    return toy.write_llama(place, initializer_range=0.2)


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def fast_model(folder: Path, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, device_map="cpu")
    return FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, **arguments)


def plain_model(folder: Path, like: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = like.peft_config["default"].target_modules
    plain = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
    set_peft_model_state_dict(plain, get_peft_model_state_dict(like))
    return plain


def trainer(
    model: Any, folder: Path, output: Path, *, rows: list[dict[str, Any]] | None = None, **settings: Any
) -> SFTTrainer:
    fixed = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_length": 128,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    rows = toy.arithmetic(72) if rows is None else rows
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(output), **{**fixed, **settings}),
        train_dataset=Dataset.from_list(rows[:64]),
        eval_dataset=Dataset.from_list(rows[64:]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


def history(run: SFTTrainer) -> dict[str, list[float]]:
    """What the trainer logged, without what depends on the clock."""
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    logged = run.state.log_history
    return {
        name: [entry[name] for entry in logged if name in entry]
        for name in (*names, *(f"eval_{name}" for name in names if name != "grad_norm"))
    }


def assert_same_run(ours: SFTTrainer, theirs: SFTTrainer, rel: float = 1e-4) -> None:
    ours.train()
    theirs.train()
    mine, other = history(ours), history(theirs)
    assert len(mine["loss"]) == STEPS
    assert len(mine["eval_loss"]) == 1
    for name, expected in other.items():
        assert mine[name] == pytest.approx(expected, rel=rel, abs=1e-6), name
    assert len(set(mine["loss"])) == STEPS, "a model that does not train would pass everything above"


@pytest.mark.seed("S4-005", "S2-081")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="defaults"),  # with gradient checkpointing, and the loss on completions alone
        pytest.param({"gradient_checkpointing": False}, id="no checkpointing"),
        pytest.param({"completion_only_loss": False}, id="loss on all tokens"),
        pytest.param({"loss_type": "dft"}, id="dft"),
        pytest.param({"packing": True, "eval_packing": True}, id="packed"),
        pytest.param({"padding_free": True, "max_length": None}, id="padding-free"),
    ],
)
def test_the_same_run_as_plain_peft(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    fast = fast_model(folder)
    plain = plain_model(folder, fast)
    assert_same_run(
        trainer(fast, folder, tmp_path / "fast", **settings), trainer(plain, folder, tmp_path / "plain", **settings)
    )


@pytest.mark.parametrize("mode", [True, "selective", "offload"])
def test_our_checkpointing_under_the_trainer(folder: Path, tmp_path: Path, mode: Any) -> None:
    fast = fast_model(folder, use_gradient_checkpointing=mode)
    plain = plain_model(folder, fast)
    assert_same_run(trainer(fast, folder, tmp_path / "fast"), trainer(plain, folder, tmp_path / "plain"))


def test_bf16_autocast(folder: Path, tmp_path: Path) -> None:
    fast = fast_model(folder)
    plain = plain_model(folder, fast)
    ours = trainer(fast, folder, tmp_path / "fast", bf16=True)
    theirs = trainer(plain, folder, tmp_path / "plain", bf16=True)
    ours.train()
    theirs.train()
    assert history(ours)["loss"] == pytest.approx(history(theirs)["loss"], rel=2e-2)
    assert {p.dtype for p in fast.parameters() if p.requires_grad} == {torch.float32}


def test_fp8_base_and_head(folder: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", load_in_fp8=True)
    fast = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16)
    assert isinstance(fast.get_output_embeddings(), FP8Linear)
    plain = plain_model(folder, fast)
    ours, theirs = (trainer(m, folder, tmp_path / str(i)) for i, m in enumerate((fast, plain)))
    ours.train()
    theirs.train()
    mine, other = history(ours), history(theirs)
    for name in ("loss", "entropy", "eval_loss", "eval_entropy"):
        assert mine[name] == pytest.approx(other[name], rel=0.03), name
    assert mine["eval_loss"][-1] < mine["loss"][0]


def test_full_fine_tuning(folder: Path, tmp_path: Path) -> None:
    fast, _ = FastLanguageModel.from_pretrained(str(folder), full_finetuning=True, device_map="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"learning_rate": 1e-3}
    assert_same_run(
        trainer(fast, folder, tmp_path / "fast", **settings),
        trainer(plain, folder, tmp_path / "plain", **settings),
        rel=1e-3,
    )


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "by TRL's default"])
def test_experts_auxiliary_loss(tmp_path: Path, asked: bool) -> None:
    """SFTTrainer adds it to its loss for every mixture of experts that has a coefficient for it."""
    place = toy.write_mixtral(tmp_path / "model", output_router_logits=asked)
    runs = []
    for name in ("fast", "plain"):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        if name == "fast":
            model, _ = FastLanguageModel.from_pretrained(str(place), full_finetuning=True, device_map="cpu")
        runs.append(trainer(model, place, tmp_path / name, learning_rate=1e-3))
    assert_same_run(*runs, rel=1e-3)
    logged = [[entry["aux_loss"] for entry in run.state.log_history if "aux_loss" in entry] for run in runs]
    assert len(logged[0]) == STEPS
    assert logged[0] == pytest.approx(logged[1], rel=1e-3)


def test_the_output_layer_is_never_run(folder: Path, tmp_path: Path) -> None:
    """Neither for training nor for evaluation: it would give full logits."""
    fast = fast_model(folder)

    def refuse(*_: Any) -> None:
        raise AssertionError("full logits")

    fast.get_output_embeddings().register_forward_hook(refuse)
    trainer(fast, folder, tmp_path / "run", max_steps=1, eval_steps=1).train()
    with pytest.raises(AssertionError, match="full logits"):
        fast(input_ids=torch.arange(2, 12)[None])


def test_whose_head_answers(folder: Path, tmp_path: Path) -> None:
    """Ours for our model, TRL's for others."""
    fast = fast_model(folder)
    plain = plain_model(folder, fast)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        trainer(fast, folder, tmp_path / "fast")
        assert type(fast(input_ids=ids, labels=ids, fused_lm_head=True)) is TokenScoreOutput
        trainer(plain, folder, tmp_path / "plain")
        assert type(plain(input_ids=ids, labels=ids, fused_lm_head=True)) is FusedCausalLMOutput


def test_packing_loses_and_mixes_nothing(folder: Path, tmp_path: Path) -> None:
    """The evaluation loss does not know whether rows were packed."""

    def loss(**settings: Any) -> float:
        run = trainer(fast_model(folder), folder, tmp_path / "run", **settings)
        return float(run.evaluate()["eval_loss"])

    # one batch, so that the mean over batches is the mean over tokens
    apart = loss(per_device_eval_batch_size=8)
    assert loss(per_device_eval_batch_size=8, packing=True) == pytest.approx(apart, rel=1e-5)


def test_checkpoint_resume_and_plain_peft(folder: Path, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(fast_model(folder), folder, tmp_path / "run", **settings)
    whole.train()
    resumed = trainer(fast_model(folder, random_state=1), folder, tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert history(resumed)["loss"] == pytest.approx(history(whole)["loss"], rel=1e-5)

    whole.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=ids).logits for model in (whole.model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_compute_metrics_gets_logits(folder: Path, tmp_path: Path) -> None:
    seen = []

    def measure(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {"rows": float(prediction.predictions.shape[0])}

    run = trainer(fast_model(folder), folder, tmp_path / "run")
    run.compute_metrics = measure
    with pytest.warns(FutureWarning, match="recomputed"):
        assert run.evaluate()["eval_rows"] == 8
    assert seen[0][2] == 320


def walks_by_name(model: Any, folder: Path, output: Path, steps: int) -> int:
    """How many modules torch's own walks through the model have passed in a run."""
    run = trainer(model, folder, output, max_steps=steps, eval_strategy="no", gradient_accumulation_steps=1)
    profile = cProfile.Profile()
    profile.runcall(run.train)
    calls = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return sum(count[1] for (_, _, name), count in calls.items() if name == "named_modules")


def test_no_step_walks_through_the_model_by_names(folder: Path, tmp_path: Path) -> None:
    """That takes torch several milliseconds each time, and the GPU may be waiting."""
    few, more = (walks_by_name(fast_model(folder), folder, tmp_path / "fast", steps) for steps in (2, 6))
    assert more == few
    plain = plain_model(folder, fast_model(folder))
    assert walks_by_name(plain, folder, tmp_path / "plain", 6) > more


def test_the_trainer_reads_the_loss_early(folder: Path, tmp_path: Path) -> None:
    """It asks whether the loss is NaN when the backward pass is queued, and must not wait for that."""
    run = trainer(fast_model(folder), folder, tmp_path / "run")
    step, answers = run.training_step, []

    def observed(*arguments: Any) -> Any:
        loss = step(*arguments)
        with torch._C.DisableTorchFunctionSubclass():
            kept = loss.data.clone()
            loss.data.fill_(torch.nan)  # what a look at the device would find
            answers.append(bool(torch.isnan(loss)))
        answers.append(bool(torch.isnan(loss)))
        with torch._C.DisableTorchFunctionSubclass():
            loss.data.copy_(kept)
        return loss

    run.training_step = observed
    run.train()
    assert answers == [True, False] * (2 * STEPS)


def test_a_loss_that_is_not_a_number_is_noticed(tmp_path: Path) -> None:
    """The trainer leaves it out of what it logs, as for any model."""
    poisoned = toy.write_poisoned_llama(tmp_path / "model")
    rows = [{"prompt": f"{n}{toy.RARE if n % 2 else '+'}2=", "completion": "3"} for n in range(72)]
    logged = []
    for name, model in (("fast", fast_model(poisoned)), ("plain", plain_model(poisoned, fast_model(poisoned)))):
        run = trainer(model, poisoned, tmp_path / name, rows=rows, eval_strategy="no", max_grad_norm=0)
        run.train()
        logged.append(history(run)["loss"])
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
    assert logged[0] == [0] * STEPS


def run_python(*arguments: str, cwd: Path) -> str:
    environment = child_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs(folder: Path, tmp_path: Path) -> None:
    data = toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(32))
    arguments = ["--model", str(folder), "--data", str(data), "--output", "out", "--max-steps", "2"]
    assert "adapter" in run_python(str(ROOT / "examples/finetune_with_trl.py"), *arguments, cwd=tmp_path)
    assert (tmp_path / "out/adapter_model.safetensors").is_file()


@pytest.mark.extended
def test_the_page_runs(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "my-model", max_position_embeddings=2048)
    toy.write_jsonl(tmp_path / "my-data.jsonl", toy.arithmetic(32))
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trl.md").read_text(), re.DOTALL)
    if not torch.cuda.is_available():  # TRL requires it
        code = code.replace("packing=True", "packing=True, use_cpu=True")
    run_python("-c", code, cwd=tmp_path)
    assert (tmp_path / "my-adapter/adapter_model.safetensors").is_file()

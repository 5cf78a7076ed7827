"""Steps and runs under the guard: bad steps are explained and survived, clean runs are unchanged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pantheraml.base.errors import NonFiniteError, TrainingError
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.guard.incident import culprit, investigate
from pantheraml.engine.guard.nan_origin import find_nan_operation
from pantheraml.engine.guard.norms import group_of
from pantheraml.engine.step.feed import Feed, StepBatches
from pantheraml.engine.step.step import Stepper
from pantheraml.models.loader import load_tokenizer
from pantheraml.parallel.process_group import World
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, merged, silent, train_here, values

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    toy.write_llama(folder / "model")
    toy.write_poisoned_llama(folder / "poisoned")
    rows = toy.arithmetic(40)
    rows[7]["prompt"] += toy.RARE
    toy.write_jsonl(folder / "data.jsonl", rows)
    return folder


def config_of(root: Path, *, model: str = "model", **changes: dict[str, Any]) -> TrainConfig:
    base = {
        "model": {"path": str(root / model)},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "packing": False, "cache_dir": str(root / "cache")},
        "method": {"kind": "lora", "rank": 4},
        "train": {"global_batch_size": 8, "max_steps": 5, "learning_rate": 5e-3},
    }
    return TrainConfig.model_validate(merged(base, changes))


def run_of(root: Path, name: str, **changes: Any) -> RunDir:
    config = config_of(root, **changes)
    return make_run(root / name, config, make_plan(config, micro=2))


def adapter(run: RunDir) -> dict[str, Tensor]:
    return load_file(run.path / "adapter" / "adapter_model.safetensors")


def dataset_of(config: TrainConfig) -> TokenDataset:
    return TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)


def poisoned_samples(config: TrainConfig) -> list[int]:
    """Samples that contain the rare token."""
    data, (token,) = dataset_of(config), load_tokenizer(config.model).encode(toy.RARE)
    return [index for index in range(len(data)) if token in data.sequence(index).input_ids]


def steps_of(config: TrainConfig, world: World = ALONE) -> Iterator[StepBatches]:
    with Feed(dataset_of(config), world, seed=0, global_batch=8, micro_batch=2, limit=None) as feed:
        for number in range(5):
            yield feed.step(number)


def stepper_of(config: TrainConfig) -> Stepper:
    plan = make_plan(config, micro=2)
    return Stepper(build_model(config, plan, ALONE, silent), config, ALONE, plan).setup()


# Bad steps ------------------------------------------------------------------------------------------------------------


def test_incident_explains_a_skipped_step(root: Path) -> None:
    run = run_of(root, "skipped", model="poisoned", stability={"on_nonfinite": "skip"})
    events = train_here(run)
    (bad,) = poisoned_samples(run.config())
    (verdict,) = [event for event in events if event["kind"] == "verdict"]
    (incident,) = [event for event in events if event["kind"] == "incident"]
    assert verdict["action"] == "skip"
    assert incident["step"] == verdict["step"]
    assert incident["samples"] == [bad]
    assert incident["module"].endswith("embed_tokens")
    assert incident["tensor"] == f"{incident['module']}.weight"
    row = json.loads((root / "data.jsonl").read_text().splitlines()[7])
    assert incident["finding"].endswith(
        f'rank 0, sample {bad}: data.jsonl line 8 "{row["prompt"]}{row["completion"]}<eos>"'
    )
    written = json.loads((run.path / incident["path"]).read_text())
    assert incident["path"] == f"incidents/step-{incident['step']}.json"
    assert written["persistent"]
    ((document,),) = [origin["documents"] for origin in written["origins"]]
    assert (document["file"], document["unit"], document["number"]) == (str(root / "data.jsonl"), "line", 8)
    (finding,) = written["findings"]
    assert finding["phase"] == "forward"
    assert finding["infinite"] > 0
    assert bad in written["samples"]
    assert written["identity"]["train.seed"] == 0
    assert all(weight.isfinite().all() for weight in adapter(run).values())
    assert values(events, "train.finished", "steps") == [5]


def test_incident_names_the_document_in_a_packed_sequence(root: Path) -> None:
    rows = toy.arithmetic(40)
    rows[7] = {"prompt": f"\x1b[31mlook{toy.RARE}", "completion": " x" * 40}
    (root / "files").mkdir()
    toy.write_jsonl(root / "files" / "a.jsonl", rows[:5])
    toy.write_jsonl(root / "files" / "b.jsonl", rows[5:])
    data = {"packing": True, "path": str(root / "files"), "seq_len": 128}
    run = run_of(root, "packed", model="poisoned", data=data, train={"global_batch_size": 4, "max_steps": 9})
    with pytest.raises(NonFiniteError) as err:
        train_here(run)
    (bad,) = poisoned_samples(run.config())
    said = rf'rank 0, sample {bad}: b\.jsonl line 3 "\\x1b\[31mlook~( x)+[ x]*\.\.\.", packed with (\d+) more; see '
    found = re.search(said, err.value.where or "")
    assert found, err.value.where
    (path,) = run.incidents.glob("*.json")
    (origin,) = json.loads(path.read_text())["origins"]
    count = len(dataset_of(run.config()).sequence(bad).document_lengths)
    assert (origin["sample"], origin["count"]) == (bad, count) == (bad, int(found[2]) + 1)
    first, *others = origin["documents"]
    assert first["suspect"]
    assert not any(other["suspect"] for other in others)
    for document in others:
        row = json.loads(Path(document["file"]).read_text().splitlines()[document["number"] - 1])
        assert f"{row['prompt']}{row['completion']}<eos>".startswith(document["text"].removesuffix("..."))


def test_incident_explains_a_stopped_run(root: Path) -> None:
    run = run_of(root, "stopped", model="poisoned")
    with pytest.raises(NonFiniteError, match="loss is not finite on rank 0") as err:
        train_here(run)
    (bad,) = poisoned_samples(run.config())
    assert re.search(
        rf"embed_tokens\.weight \(Embedding\), forward, rank 0, sample {bad}: data.jsonl line 8 ", err.value.where or ""
    )
    assert str(run.incidents / "step-") in (err.value.where or "")
    assert len(list(run.incidents.glob("*.json"))) == 1
    assert not (run.path / "adapter").exists()


def test_zeroing_nonfinite_values_keeps_the_step(root: Path) -> None:
    run = run_of(root, "zeroed", model="poisoned", stability={"on_nonfinite": "zero", "clipping": "adagc"})
    events = train_here(run)
    assert values(events, "verdict", "action") == ["zero"]
    assert all(weight.isfinite().all() for weight in adapter(run).values())


def test_detect_only_run_with_nonfinite_weights_fails(root: Path) -> None:
    run = run_of(root, "detected", model="poisoned", stability={"on_nonfinite": "detect", "clipping": "zclip"})
    with pytest.raises(NonFiniteError, match="weights are not finite"):
        train_here(run)
    assert len(list(run.incidents.glob("*.json"))) == 1, "consecutive bad steps have the same cause"
    assert not run.checkpoints.exists() or not any(run.checkpoints.glob("step-*"))
    assert not (run.path / "adapter").exists()


def test_nonfinite_weights_never_replace_a_good_checkpoint(root: Path) -> None:
    stability = {"on_nonfinite": "detect"}
    run = run_of(root, "kept", model="poisoned", stability=stability, checkpoint={"every_steps": 1, "keep": 1})
    with pytest.raises(NonFiniteError, match="weights are not finite") as err:
        train_here(run)
    assert err.value.exit_code == NonFiniteError.exit_code == 18
    good = run.last_checkpoint()
    (bad,) = values(raw_events(run.path), "verdict", "step")
    assert good == bad - 1 > 0
    saved = CheckpointStore(run.checkpoints).load(good).tensors.read_group("weights")
    assert all(weight.isfinite().all() for weight in saved.values())
    assert not (run.path / "adapter").exists()


def test_stop_on_spike_has_its_own_advice(root: Path) -> None:
    stability = {"on_spike": "stop", "spike_warmup_steps": 2, "spike_zscore": 1e-6, "clipping": "none"}
    run = run_of(root, "spike", stability=stability, train={"learning_rate": 0.5, "schedule": "constant"})
    with pytest.raises(TrainingError, match="standard deviations above") as err:
        train_here(run)
    assert not isinstance(err.value, NonFiniteError)
    assert "stability.on_spike=skip" in (err.value.fix or "")
    (incident,) = [event for event in raw_events(run.path) if event["kind"] == "incident"]
    written = json.loads((run.path / incident["path"]).read_text())
    assert written["verdict"]["anomaly"] == "spike"
    assert written["persistent"]
    assert "lora_" in incident["tensor"]
    assert (incident["rank"], sorted(incident["samples"])) == (0, sorted(written["samples"]))
    assert incident["finding"] in (err.value.where or "")


def test_lowered_rate_applies_to_the_steps(root: Path) -> None:
    stability = {"on_nonfinite": "lower_rate", "rate_factor": 0.25}
    run = run_of(root, "lowered", model="poisoned", stability=stability, train={"schedule": "constant"})
    events = train_here(run)
    (at,) = values(events, "verdict", "step")
    rates = values(events, "train.step", "learning_rate")
    assert rates == [5e-3] * (at - 1) + [0.25 * 5e-3] * (6 - at)


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


class _Between(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = _BadGradient.apply(value)
        return made


def test_nonfinite_gradient_is_found_in_backward(root: Path) -> None:
    config = config_of(root)
    stepper = stepper_of(config)
    layer = stepper.model.get_submodule("base_model.model.model.layers.1")
    layer.mlp = nn.Sequential(layer.get_submodule("mlp"), _Between())
    batches = next(steps_of(config))
    assert not stepper.backward(batches, stop_requested=False).numbers.finite
    found = culprit(investigate(stepper, batches))
    assert found is not None
    assert (found.phase, found.tensor) == ("backward", "gradient of the output")
    assert found.module == "base_model.model.model.layers.1.mlp.0.down_proj", (
        "the module whose output has the bad gradient"
    )
    assert found.micro_batch == 0


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_debug_names_the_nan_operation_and_its_line(root: Path, checkpointing: str) -> None:
    config = config_of(root, train={"activation_checkpointing": checkpointing})
    stepper = stepper_of(config)
    layer = stepper.model.get_submodule("base_model.model.model.layers.1")
    layer.mlp = nn.Sequential(layer.get_submodule("mlp"), _Between())
    found = find_nan_operation(stepper, next(steps_of(config)))
    assert found is not None
    assert "_BadGradientBackward" in found
    assert "_BadGradient.apply(value)" in found
    assert find_nan_operation(stepper_of(config), next(steps_of(config))) is None


def test_debug_logs_group_norms_in_every_step(root: Path) -> None:
    run = run_of(root, "debugged", model="poisoned", stability={"on_nonfinite": "skip", "debug": True})
    events = train_here(run)
    group_events = [event for event in events if event["kind"] == "train.groups"]
    assert [event["step"] for event in group_events] == [1, 2, 3, 4, 5]
    norms = values(events, "train.step", "grad_norm")
    for event, norm in zip(group_events, norms, strict=True):
        assert event["groups"].keys() == {"layers.0", "layers.1"}
        found = math.fsum(float(group["grad_norm"]) ** 2 for group in event["groups"].values()) ** 0.5
        assert found == pytest.approx(float(norm), rel=1e-6, nan_ok=True)
    (incident,) = run.incidents.glob("*.json")
    assert "operation" in json.loads(incident.read_text())


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.mlp.up_proj.weight", "layers.3"),
        ("base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight", "layers.11"),
        ("transformer.h.0.attn.c_attn.bias", "h.0"),
        ("lm_head.weight", "lm_head"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head"),
        ("model.embed_tokens.weight", "embed_tokens"),
    ],
)
def test_group_of_parameter_names(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize("checkpointing", ["selective", "full", "offload"])
def test_recomputed_layers_do_not_confuse_the_search(root: Path, checkpointing: str) -> None:
    config = config_of(root, model="poisoned", train={"activation_checkpointing": checkpointing})
    stepper = stepper_of(config)
    stepper.model.train()
    (bad,) = poisoned_samples(config)
    batches = next(step for step in steps_of(config) if bad in step.sample_ids)
    assert not stepper.backward(batches, stop_requested=False).numbers.finite
    found = culprit(investigate(stepper, batches))
    assert found is not None
    assert found.micro_batch == next(n for n, samples in enumerate(batches.own_samples) if bad in samples)
    assert found.samples == [bad]


@pytest.mark.parametrize("zero", [True, False])
def test_fp16_bad_step_that_is_applied_keeps_the_loss_scale(root: Path, zero: bool) -> None:
    """torch's scaler would skip the step and lower the scale only on ranks that found a bad value."""
    config = config_of(root)
    plan = make_plan(config, micro=2, precision="fp16")
    stepper = Stepper(build_model(config, plan, ALONE, silent), config, ALONE, plan).setup()
    stepper.scaler.scale(torch.ones(()))  # makes its tensors
    stepper.scaler.update(1.0)
    name, poisoned = stepper.parts[1]
    poisoned.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(0), math.nan))
    before = poisoned.detach().clone()
    report = stepper.backward(next(steps_of(config)), stop_requested=False)
    assert not math.isfinite(report.numbers.grad_norm)
    stepper.apply(report.numbers, 1e-2, zero_nonfinite=zero)
    assert stepper.scaler.get_scale() == 1.0
    assert not torch.equal(poisoned[1:], before[1:]), name
    assert bool(poisoned.isfinite().all()) == zero


def test_transient_and_persistent_faults_are_distinguished(root: Path) -> None:
    config = config_of(root)
    stepper = stepper_of(config)
    batches = next(steps_of(config))
    flip = stepper.parts[0][1].register_hook(lambda gradient: gradient * math.nan)
    assert not stepper.backward(batches, stop_requested=False).numbers.finite
    assert culprit(investigate(stepper, batches)) is not None
    flip.remove()
    assert investigate(stepper, batches) == []


def test_replay_changes_nothing(root: Path) -> None:
    config = config_of(root, method={"dropout": 0.5})
    stepper = stepper_of(config)
    stepper.model.train()
    batches = next(steps_of(config))
    stepper.backward(batches, stop_requested=False)
    gradients = {name: part.grad.clone() for name, part in stepper.parts if part.grad is not None}
    generator = torch.get_rng_state()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in stepper.model.modules())
    investigate(stepper, batches)
    assert gradients
    assert all(torch.equal(part.grad, gradients[name]) for name, part in stepper.parts if part.grad is not None)
    assert torch.equal(torch.get_rng_state(), generator)
    after = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in stepper.model.modules())
    assert after == hooks


# Clean runs -----------------------------------------------------------------------------------------------------------

OFF = {"clipping": "none", "on_spike": "ignore"}


LOOSE = {"max_grad_norm": 1e6}


@pytest.fixture(scope="module")
def bare(root: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and adapter of a run without the guard."""
    run = run_of(root, "bare", stability=OFF, train=LOOSE)
    return values(train_here(run), "train.step", "loss"), adapter(run)


@pytest.mark.parametrize(
    "stability",
    [
        {},
        {"update_ratio_every": 1, "on_spike": "skip", "group_norms_every": 1},
        {"clipping": "zclip", "clip_zscore": 1e6},
        {"clipping": "value", "clip_value": 1e6},
        {"clipping": "norm"},
        {"clipping": "adaptive", "clip_weight_ratio": 1e6},
        {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 1e6},
    ],
    ids=str,
)
def test_guard_does_not_change_a_clean_run(
    root: Path, bare: tuple[list[float], dict[str, Tensor]], stability: dict[str, Any]
) -> None:
    """All kinds of clipping but `percentile`, which always clips the largest norms."""
    guarded = run_of(root, f"guarded {sorted(stability.items())}", stability=stability, train=LOOSE)
    losses, theirs = bare
    assert values(train_here(guarded), "train.step", "loss") == losses
    ours = adapter(guarded)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("kind", ["percentile", "zclip", "adagc"])
def test_guard_state_resumes(root: Path, kind: str) -> None:
    stability = {
        "clipping": kind,
        "clip_warmup_steps": 2,
        "clip_percentile": 10,
        "clip_growth": 0.5,
        "clip_zscore": 0.1,
    }
    settings = {"schedule": "constant", "max_steps": 6}
    straight = run_of(root, f"straight {kind}", stability=stability, train=settings)
    expected = values(train_here(straight), "train.step", "loss")
    halves = run_of(root, f"halves {kind}", stability=stability, train={**settings, "max_steps": 3})
    train_here(halves)
    config = halves.config()
    halves.write_config(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 6})}))
    assert values(train_here(halves), "train.step", "loss") == expected
    assert all(torch.equal(value, adapter(straight)[key]) for key, value in adapter(halves).items())


def test_update_ratio_is_of_the_previous_step(root: Path) -> None:
    config = config_of(root, stability={"update_ratio_every": 2})
    stepper = stepper_of(config)
    ratios, expected = [], []
    for batches in steps_of(config):
        report = stepper.backward(batches, stop_requested=False)
        ratios.append(report.numbers.update_ratio)
        before = torch.cat([part.detach().flatten().double() for _, part in stepper.parts])
        stepper.apply(report.numbers, 1e-2)
        after = torch.cat([part.detach().flatten().double() for _, part in stepper.parts])
        expected.append(float((after - before).norm() / after.norm()))
    assert ratios == [None, None, pytest.approx(expected[1], rel=1e-5), None, pytest.approx(expected[3], rel=1e-5)]

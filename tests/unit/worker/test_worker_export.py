"""Export and generate use the base that the adapter was trained on, or say that it is another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.base.event_stream import EventWriter
from pantheraml.models import base_identity as trained_on
from pantheraml.models import hub
from pantheraml.models.base_identity import BaseIdentity, verified_base
from pantheraml.specs.config_file import validate
from pantheraml.specs.consent import Consent
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ExportRequest, GenerateRequest
from pantheraml.specs.train import ModelConfig
from pantheraml.worker.export import export_task
from pantheraml.worker.generate import generate_task
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, train_here


def trained_run(folder: Path, kind: str) -> RunDir:
    folder.mkdir()
    model, data = toy.write_llama(folder / "model"), toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(30))
    config = validate(
        {
            "model": {"path": str(model)},
            "data": {"path": str(data), "seq_len": 64, "cache_dir": str(folder / "cache")},
            "method": {"kind": kind, "rank": 4},
            "train": {"max_steps": 2, "global_batch_size": 4, "learning_rate": 0.05},
        }
    )
    run = make_run(folder / "run", config, make_plan(config))
    train_here(run)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {kind: trained_run(root / kind, kind).path.parent for kind in ("lora", "qlora", "full")}


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> RunDir:
    """A LoRA run of one's own, to spoil; its model stands beside it."""
    return own_copy(runs["lora"], tmp_path / "own")


def own_copy(folder: Path, place: Path) -> RunDir:
    shutil.copytree(folder, place)
    run = RunDir(place / "run")
    run.config_file.write_text(run.config_file.read_text().replace(str(folder), str(place)))
    return run


def export(run: RunDir, output: Path, base: Literal["trained", "plain"] = "trained") -> list[str]:
    """What was message."""
    task = output.with_name(f"{output.name}-task")
    task.mkdir()
    ExportRequest(run_dir=run.path, consent=Consent(), output=output, precision="fp32", base=base).write(task)
    with EventWriter(task) as emit:
        export_task(task, emit)
    return [event["message"] for event in raw_events(task) if event["kind"] == "notice"]


def generate(run: RunDir, task: Path, weights: Literal["trained", "base"] = "trained") -> list[str]:
    task.mkdir()
    GenerateRequest(
        run_dir=run.path, consent=Consent(), prompts=["1+1="], weights=weights, device="cpu", precision="fp32",
        max_new_tokens=2, temperature=0.0, seed=0, batch_size=1,
    ).write(task)  # fmt: skip
    with EventWriter(task) as emit:
        generate_task(task, emit)
    return [event["message"] for event in raw_events(task) if event["kind"] == "notice"]


def nudge(model: Path) -> None:
    """Other weights of the same shapes, as of a model that was trained on, or downloaded again."""
    weights = load_file(model / "model.safetensors")
    save_file({name: w * 1.5 for name, w in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})


def test_the_base_that_was_trained_on_is_used(run: RunDir, tmp_path: Path) -> None:
    known = BaseIdentity.read(run.adapter)
    assert known is not None
    assert known.commit is None
    assert export(run, tmp_path / "out") == []
    assert generate(run, tmp_path / "task") == []


def test_another_base_is_refused(run: RunDir, tmp_path: Path) -> None:
    nudge(run.path.parent / "model")
    with pytest.raises(ModelError, match="not the one the adapter was trained on: its weights differ"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for weights in ("trained", "base"):
        with pytest.raises(ModelError, match="its weights differ") as caught:
            generate(run, tmp_path / weights, weights)  # type: ignore[arg-type]
        assert "Restore the model" in str(caught.value)


def test_another_config_is_refused_and_named(run: RunDir, tmp_path: Path) -> None:
    file = run.path.parent / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 0.1}))
    with pytest.raises(ModelError, match=r"its config\.json differs"):
        export(run, tmp_path / "out")


def test_an_adapter_of_an_earlier_version_is_used_with_a_notice(run: RunDir, tmp_path: Path) -> None:
    (run.adapter / trained_on.FILE).unlink()
    (message,) = export(run, tmp_path / "out")
    assert "the base is not checked" in message
    (message,) = generate(run, tmp_path / "task")
    assert "the base is not checked" in message
    outside = '{"fingerprint": "", "config": "", "commit": "../../../../somebody/else"}'
    for damaged in ("{", "[]", '{"fingerprint": 1, "config": "", "commit": null}', outside):
        (run.adapter / trained_on.FILE).write_text(damaged)
        with pytest.raises(ModelError, match="is corrupted"):
            verified_base(run.config().model, run.adapter)


def test_a_base_that_changed_while_it_was_trained_on_is_not_written_down(run: RunDir) -> None:
    from pantheraml.worker.train import base_trained_on

    before = BaseIdentity.of(run.config().model)
    assert base_trained_on(run.config().model, before.fingerprint) == before
    nudge(run.path.parent / "model")
    assert base_trained_on(run.config().model, before.fingerprint) == BaseIdentity(before.fingerprint, "", None)


def test_of_a_hub_model_the_commit_of_then_is_used(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's `main` has moved on since."""
    first, second = "a" * 40, "b" * 40
    snapshots = tmp_path / "hub" / "models--owner--name" / "snapshots"
    shutil.copytree(run.path.parent / "model", snapshots / first)
    shutil.copytree(run.path.parent / "model", snapshots / second)
    nudge(snapshots / second)
    asked: list[str | None] = []

    def snapshot(name: str, revision: str | None, patterns: Any) -> Path:
        asked.append(revision)
        return snapshots / (revision or first)

    monkeypatch.setattr(hub, "_snapshot", snapshot)
    config = ModelConfig(path="owner/name")
    base = BaseIdentity.of(config)
    assert base.commit == first
    base.write(run.adapter)
    monkeypatch.setattr(hub, "_snapshot", lambda name, revision, patterns: snapshots / (revision or second))
    used, notice = verified_base(config, run.adapter)
    assert (used.revision, notice) == (first, None)
    nudge(snapshots / first)
    with pytest.raises(ModelError, match="its weights differ") as caught:
        verified_base(config, run.adapter)
    assert f"commit {first}" in str(caught.value)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_qlora_says_that_it_merged_over_4_bits_and_offers_the_plain_base(runs: dict[str, Path], tmp_path: Path) -> None:
    run = RunDir(runs["qlora"] / "run")
    (message,) = export(run, tmp_path / "over-nf4")
    assert message.startswith("the adapter is merged into the base's 4-bit weights (nf4)")
    assert "--base plain" in message
    assert export(run, tmp_path / "plain", "plain") == []
    plain, packed, base = (
        weights(path) for path in (tmp_path / "plain", tmp_path / "over-nf4", runs["qlora"] / "model")
    )
    layer = "model.layers.0.self_attn.q_proj"
    adapter, name = load_file(run.adapter / "adapter_model.safetensors"), f"{layer}.weight"
    down, up = (adapter[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    scale = run.config().method.alpha / run.config().method.rank
    torch.testing.assert_close(plain[name], base[name] + scale * up @ down)
    assert not torch.allclose(packed[name], plain[name])


def test_the_plain_base_is_for_4_bits_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="over 4-bit weights, and this one was not"):
        export(RunDir(runs["lora"] / "run"), tmp_path / "out", "plain")


def test_a_whole_model_needs_no_base(runs: dict[str, Path], tmp_path: Path) -> None:
    run = own_copy(runs["full"], tmp_path / "own")
    nudge(run.path.parent / "model")
    assert export(run, tmp_path / "out") == []

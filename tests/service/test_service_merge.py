"""A tuned model in one piece: the adapter merged into its base, as artifacts of the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pantheraml.base.errors import ServiceError
from pantheraml.cli.main import main
from pantheraml.client import Client, Submission
from tests import toy
from tests.service.conftest import Server

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.extended
def test_a_model_in_one_piece(own_server: Callable[..., Server], models: Path, tmp_path: Path) -> None:
    server = own_server("--cpu-slots", "1")
    data = toy.write_jsonl(tmp_path / "rows.jsonl", toy.arithmetic(8))
    with Client(server.url, retries=0) as client, server.http() as http:
        file = client.files.upload(data).id
        held = client.jobs.submit(Submission(model="tiny", training_file=file, hold=True)).id
        with pytest.raises(ServiceError, match="paused and has no model"):
            client.jobs.merge(held)
        settings = {"epochs": 2, "batch_size": 4, "learning_rate_multiplier": 50.0}
        job = client.jobs.submit(Submission(model="tiny", training_file=file, **settings)).id
        assert client.jobs.wait(job).state == "succeeded"
        path = f"/v1/fine_tuning/jobs/{job}/merge"
        assert http.get(path).json() == {"object": "fine_tuning.merge", "job": job, "status": "none", "error": None}
        command = ["jobs", "download", job, "--merged", "--output", str(tmp_path / "out"), "--url", server.url]
        assert main(command) == 0
        assert http.post(path, params={"wait": True}).json()["status"] == "merged", "it is there already"
        names = [artifact.name for artifact in client.jobs.artifacts(job)]
        assert "merged/config.json" in names
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["merged"]
        client.jobs.download(job, "adapter/adapter_model.safetensors", tmp_path / "adapter.safetensors")
        client.jobs.download(job, "adapter/adapter_config.json", tmp_path / "adapter.json")

        adapter, config = (
            load_file(tmp_path / "adapter.safetensors"),
            json.loads((tmp_path / "adapter.json").read_text()),
        )
        down, up = (adapter[f"base_model.model.{LAYER}.lora_{side}.weight"] for side in "AB")
        base = load_file(models / "tiny" / "model.safetensors")[f"{LAYER}.weight"]
        merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")[f"{LAYER}.weight"]
        assert not torch.allclose(merged, base), "something was learned"
        torch.testing.assert_close(merged, base + config["lora_alpha"] / config["r"] * up @ down)

        http.delete(f"/v1/models/{client.jobs.get(job).fine_tuned_model}").raise_for_status()
        assert not [artifact.name for artifact in client.jobs.artifacts(job) if "/" in artifact.name]
        assert http.post(path).json()["error"]["code"] == "no_model"
    assert not list((server.data / "cache").glob("merge-*"))


@pytest.mark.extended
def test_a_merge_that_fails_says_why_and_may_be_tried_again(
    own_server: Callable[..., Server], models: Path, tmp_path: Path
) -> None:
    """The base is not what the adapter was trained on any more; its owner puts it back."""
    base = tmp_path / "models" / "tiny"
    toy.write_llama(base)
    server = own_server("--cpu-slots", "1", models_dir=base.parent)
    data = toy.write_jsonl(tmp_path / "rows.jsonl", toy.arithmetic(4))
    with Client(server.url, retries=0) as client, server.http() as http:
        file = client.files.upload(data).id
        job = client.jobs.submit(Submission(model="tiny", training_file=file, epochs=1)).id
        assert client.jobs.wait(job).state == "succeeded"
        weights = base / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-64])
        with pytest.raises(ServiceError, match="could not be merged"):
            client.jobs.merge(job)
        told = http.get(f"/v1/fine_tuning/jobs/{job}/merge").json()
        assert told["status"] == "failed"
        assert str(tmp_path) not in told["error"], "folders of the machine are not shown"
        weights.write_bytes(whole)
        client.jobs.merge(job)
        assert "merged/model.safetensors" in [artifact.name for artifact in client.jobs.artifacts(job)]

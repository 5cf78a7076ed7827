"""N processes equal one: the same losses, gradient norms and weights, however the global batch is split."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tests import toy

from pantheraml.base.env import child_environment
from pantheraml.base.events import read_events
from pantheraml.data.prepare import prepare
from pantheraml.models.loader import load_tokenizer
from pantheraml.specs.plan import Plan
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig

HERE = Path(__file__).parent
TOLERANCE = 1e-5

# name -> what differs from the base configuration; the last number is the micro-batch of the distributed run
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "lora packed": ({}, 4),
    "lora packed accumulated": ({}, 1),
    "lora padded accumulated": ({"data": {"packing": False}}, 2),
    "full packed accumulated": ({"method": {"kind": "full"}}, 2),
    "full padded unclipped": (
        {"method": {"kind": "full"}, "data": {"packing": False}, "train": {"max_grad_norm": 0}},
        3,
    ),
    "dora packed checkpointed": ({"method": {"kind": "dora"}, "train": {"activation_checkpointing": "full"}}, 2),
    "qlora packed": ({"method": {"kind": "qlora"}}, 2),
    "one epoch with a short last batch": ({"train": {"max_steps": None, "epochs": 1.0}}, 2),
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: {**base.get(key, {}), **changes.get(key, {})} for key in base.keys() | changes.keys()}


def case_config(name: str, model: Path, data: Path, cache: Path) -> TrainConfig:
    base = {
        "model": {"path": str(model)},
        "data": {"path": str(data), "seq_len": 48, "cache_dir": str(cache), "eval_fraction": 0.2},
        "method": {"rank": 4},
        "train": {"global_batch_size": 7, "max_steps": 5, "learning_rate": 1e-2, "warmup_steps": 2},
    }
    return TrainConfig.model_validate(merged(base, CASES[name][0]))


def make_plan(config: TrainConfig, world: int, micro: int) -> Plan:
    return Plan(
        device="cpu",
        device_ids=(),
        mode="none" if world == 1 else "distributed",
        world_size=world,
        backend="gloo",
        precision="fp32",
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=micro,
        activation_checkpointing=config.train.activation_checkpointing,
        threads_per_process=1,
        predicted_memory_bytes=None,
        predicted_seconds=None,
        choices=(),
    )


def launch(folder: Path, runs: list[RunDir], world: int) -> None:
    listing = folder / "runs.json"
    listing.write_text(json.dumps([str(run.path) for run in runs]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(HERE / "rank_main.py"), str(listing)],
        env=child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def silent(kind: str, /, **fields: Any) -> None:
    pass


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, RunDir]]:
    """World size -> case -> finished run. World 1 runs each batch in one piece."""
    root = tmp_path_factory.mktemp("equality")
    model = toy.write_llama(root / "model")
    data = toy.write_jsonl(root / "data.jsonl", toy.arithmetic(150))
    found: dict[int, dict[str, RunDir]] = {}
    for world in (1, 2, 3):
        found[world] = {}
        for name in CASES:
            config = case_config(name, model, data, root / "cache")
            run = RunDir(root / f"world{world}" / name.replace(" ", "-"))
            run.create(resume=False, overwrite=False)
            prepared = prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent)
            places = {"train": str(prepared.train), "eval": str(prepared.eval), "format": prepared.format}
            run.data_file.write_text(json.dumps(places))
            run.write_config(config)
            run.write_plan(make_plan(config, world, CASES[name][1] if world > 1 else config.train.global_batch_size))
            found[world][name] = run
        launch(root / f"world{world}", list(found[world].values()), world)
    return found


def curve(run: RunDir, kind: str, field: str) -> list[float]:
    return [event[field] for event in read_events(run.path) if event["kind"] == kind]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_same_losses_gradients_and_weights(results: dict[int, dict[str, RunDir]], name: str, world: int) -> None:
    one, many = results[1][name], results[world][name]
    for kind, field in (("train.step", "loss"), ("train.step", "grad_norm"), ("eval.done", "loss")):
        expected = curve(one, kind, field)
        assert expected
        assert curve(many, kind, field) == pytest.approx(expected, rel=TOLERANCE), field
    assert curve(many, "train.step", "tokens") == curve(one, "train.step", "tokens")
    assert curve(one, "train.step", "loss")[-1] != curve(one, "train.step", "loss")[0]
    (file,) = list(one.trained().glob("*.safetensors"))
    first, second = load_file(file), load_file(many.trained() / file.name)
    assert first.keys() == second.keys()
    for key in first:
        scale = abs(first[key]).max()
        assert abs(first[key] - second[key]).max() <= 10 * TOLERANCE * scale, key


@pytest.mark.timeout(400)
def test_the_epoch_ends_with_every_sample_seen_once(results: dict[int, dict[str, RunDir]]) -> None:
    run = results[1]["one epoch with a short last batch"]
    ready = json.loads(run.data_file.read_text())
    from pantheraml.data.dataset import TokenDataset

    dataset = TokenDataset.open(Path(ready["train"]))
    assert len(dataset) % 7, "the case is meant to have a short last batch"
    import numpy as np

    total = int(dataset.target_tokens(np.arange(len(dataset))).sum())
    assert sum(curve(run, "train.step", "target_tokens")) == total

"""Auxiliary loss of mixtures of experts: that of transformers over the global batch, however it is split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.data.batch import collate
from pantheraml.data.dataset import TokenDataset
from pantheraml.data.prepare import prepare
from pantheraml.engine.step.feed import Feed
from pantheraml.engine.step.step import Stepper
from pantheraml.engine.trial import Trial, difference, trial
from pantheraml.models.loader import load_tokenizer
from pantheraml.models.router_loss import RouterLoss, RouterSums, find_router_loss
from pantheraml.parallel.layout import ALONE, Layout
from pantheraml.parallel.process_group import World
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests import toy
from tests.harness import make_plan, make_run, merged, silent, train_here, values

HERE = World(rank=0, size=1, device=torch.device("cpu"))
WRITERS = {"mixtral": toy.write_mixtral, "qwen3_moe": toy.write_qwen3_moe}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(60))
    for name, write in WRITERS.items():
        write(root / name)
        write(root / f"plain {name}", output_router_logits=False)
    return root


def config_of(root: Path, family: str, **changes: Any) -> TrainConfig:
    base = {
        "model": {"path": str(root / family)},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
        "method": {"kind": "full"},
        "train": {"global_batch_size": 6, "max_steps": 3, "learning_rate": 1e-2},
    }
    return TrainConfig.model_validate(merged(base, changes))


def dataset_of(config: TrainConfig) -> TokenDataset:
    return TokenDataset.open(prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent).train)


def tried(config: TrainConfig, *, micro: int | None = None) -> Trial:
    plan = make_plan(config, micro=micro)
    return trial(build_model(config, plan, HERE, silent), config, plan, HERE, dataset_of(config), steps=2)


def theirs(config: TrainConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient by transformers for the first global batch, padded and with an attention mask."""
    dataset = dataset_of(config)
    model = AutoModelForCausalLM.from_pretrained(config.model.path).train()
    with Feed(dataset, HERE, seed=0, global_batch=6, micro_batch=6, limit=None) as feed:
        sequences = [dataset.sequence(int(index)) for index in feed.samples(0)]
    batch = collate(sequences, pad_id=0, width=None)
    labels = torch.full_like(batch.targets, -100)
    labels[:, 1:] = batch.targets[:, :-1]
    outputs = model(input_ids=batch.input_ids, attention_mask=batch.mask(), labels=labels)
    outputs.loss.backward()
    return outputs.loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "plain mixtral"])
def test_aux_loss_and_gradient_match_transformers(root: Path, family: str) -> None:
    config = config_of(root, family, data={"packing": False})
    loss, gradient = theirs(config)
    for micro in (6, 2):
        found = tried(config, micro=micro)
        assert found.losses[0] == pytest.approx(loss, rel=1e-5)
        for name, expected in gradient.items():
            torch.testing.assert_close(found.gradient[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": {"packing": False}},
        {"train": {"activation_checkpointing": "full"}},
        {"train": {"activation_checkpointing": "selective"}, "method": {"kind": "lora", "rank": 4}},
    ],
    ids=["packed", "padded", "checkpointed", "lora selective"],
)
def test_aux_loss_is_independent_of_gradient_accumulation(root: Path, family: str, changes: dict[str, Any]) -> None:
    config = config_of(root, family, **changes)
    unchecked = merged(changes, {"train": {"activation_checkpointing": "none"}})
    expected = tried(config_of(root, family, **unchecked))
    for micro in (1, 4, 6):
        apart = difference(tried(config, micro=micro), expected)
        assert max(apart.loss, apart.gradient, apart.weights) <= 1e-5
    assert expected.losses[0] > tried(config_of(root, f"plain {family}", **unchecked)).losses[0] + 0.05


def test_routing_pass_and_training_pass_use_the_same_rng(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(root, "mixtral", method={"kind": "lora", "rank": 4, "dropout": 0.5})
    plan = make_plan(config, micro=2)
    stepper = Stepper(build_model(config, plan, HERE, silent), config, HERE, plan).setup()
    stepper.model.train()
    for _, parameter in stepper.parameters:
        torch.nn.init.normal_(parameter, std=0.3)  # adapters are initialized to zero output
    seen: list[RouterSums] = []

    def spy(self: RouterLoss, *args: Any) -> RouterSums:
        seen.append(sums(self, *args))
        return seen[-1]

    sums = RouterLoss.sums
    monkeypatch.setattr(RouterLoss, "sums", spy)
    with Feed(dataset_of(config), HERE, seed=0, global_batch=6, micro_batch=2, limit=None) as feed:
        stepper.backward(feed.step(0), stop_requested=False)
    assert len(seen) == 6
    for weighed, trained in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(weighed.probabilities, trained.probabilities)
    assert not torch.equal(seen[0].probabilities, seen[1].probabilities)


def test_aux_loss_is_logged_and_excluded_from_evaluation(root: Path, tmp_path: Path) -> None:
    runs_events = {}
    for family in ("mixtral", "plain mixtral"):
        config = config_of(root, family, data={"eval_fraction": 0.2}, train={"max_steps": 1, "learning_rate": 1e-9})
        run = make_run(tmp_path / family, config, make_plan(config, micro=4))
        runs_events[family] = train_here(run)
    (aux,) = values(runs_events["mixtral"], "train.step", "aux_loss")
    losses = {family: values(events, "train.step", "loss")[0] for family, events in runs_events.items()}
    assert losses["mixtral"] == pytest.approx(losses["plain mixtral"] + 0.1 * aux, rel=1e-6)
    assert values(runs_events["plain mixtral"], "train.step", "aux_loss") == [None]
    evaluated = [values(events, "eval.done", "loss")[-1] for events in runs_events.values()]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_unsupported_layouts_reject_the_aux_loss(root: Path, name: str) -> None:
    config = config_of(root, "mixtral")
    plan = make_plan(config)
    layout = Layout(ParallelDims(**{name: 2}), ALONE.coordinates, None)
    with pytest.raises(UnsupportedModelError, match=rf"parallel\.{name}=2") as caught:
        Stepper(build_model(config, plan, HERE, silent), config, replace(HERE, layout=layout), plan).setup()
    assert "output_router_logits" in str(caught.value.fix)


def test_unknown_aux_loss_is_rejected(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args: torch.tensor(3.0))
    model = AutoModelForCausalLM.from_pretrained(root / "mixtral")
    with pytest.raises(UnsupportedModelError, match="auxiliary loss"):
        find_router_loss(model)

"""One process with several devices, tested on a CPU: DataParallel replicas, device maps, full runs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.base.errors import ConfigError, OutOfMemoryError
from pantheraml.data.batch import Batch, collate
from pantheraml.data.documents import TokenSequence, as_ints
from pantheraml.engine.step.loss import LossModel
from pantheraml.engine.step.passes import DataParallelPasses, FullModelPasses, PeerSync
from pantheraml.models.attention import use_document_attention
from pantheraml.parallel.device_map import is_split
from pantheraml.specs.plan import LayerSplit
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here, values

CPU = torch.device("cpu")


def adapted() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.2))
    assert use_document_attention(model) is None
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def batches() -> list[Batch]:
    """Two batches of packed rows, with documents and targets spread unevenly."""
    draw = np.random.default_rng(0)
    rows = []
    for lengths in ((7, 2, 9), (11,), (3, 3, 3, 8), (5, 5)):
        ids = draw.integers(1, 64, size=sum(lengths)).tolist()
        labels = [-100 if draw.random() < 0.4 else token for token in ids]
        rows.append(TokenSequence(as_ints(ids), as_ints(labels), as_ints(lengths)))
    return [collate(rows[:3], pad_id=0, width=24), collate(rows[3:], pad_id=0, width=24)]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), name


def test_data_parallel_passes_match_a_single_model() -> None:
    one, other = adapted(), adapted()
    whole_model = LossModel(one)
    whole = FullModelPasses(whole_model, whole_model, PeerSync(), device=CPU, autocast=nullcontext)
    copies = DataParallelPasses(LossModel(other), (), device=CPU, autocast=nullcontext)
    assert copies.full_logits_reason is None
    assert float(copies.backward(batches(), 0.01)) == pytest.approx(float(whole.backward(batches(), 0.01)), rel=1e-6)
    assert_close(gradients(other), gradients(one))
    evaluated = copies.evaluate(batches()[0])
    assert float(evaluated) == pytest.approx(float(whole.evaluate(batches()[0])), rel=1e-6)
    assert not evaluated.requires_grad


def test_replicas_use_autocast() -> None:
    model = adapted()
    seen: list[torch.dtype] = []
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _layer, _args, out: seen.append(out.dtype))
    passes = DataParallelPasses(
        LossModel(model), (), device=CPU, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    seen.clear()
    passes.evaluate(batches()[0])
    assert seen == [torch.bfloat16]


def replica(module: nn.Module, tensors: dict[int, Tensor]) -> Any:
    """A replica as DataParallel creates it: plain tensors in place of parameters."""
    made = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else replica(child, tensors)
    for name, parameter in module._parameters.items():
        if parameter is None:
            made._parameters[name] = None
        else:
            setattr(made, name, tensors.setdefault(id(parameter), parameter.detach().clone().requires_grad_()))
    return made


def test_loss_replica_uses_only_its_own_weights() -> None:
    loss_model = LossModel(adapted())
    batch = batches()[0]
    expected = loss_model(batch.input_ids, batch.position_ids, batch.targets)
    tensors: dict[int, Tensor] = {}
    own = replica(loss_model, tensors)
    head = loss_model.model.get_base_model().lm_head.weight
    own(batch.input_ids, batch.position_ids, batch.targets).backward()
    assert tensors[id(head)].grad is not None, "the head of the replica, not of the original"
    assert all(tensor.grad is not None for tensor in tensors.values())
    assert all(parameter.grad is None for parameter in loss_model.parameters())
    with torch.no_grad():
        tensors[id(head)].mul_(2)
    other = own(batch.input_ids, batch.position_ids, batch.targets)
    assert abs(float(other.detach()) - float(expected.detach())) > 1


def test_device_mapped_model_needs_no_full_logits() -> None:
    one, other = adapted(), adapted()
    base = other.get_base_model()
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    dispatch_model(base, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)
    assert "forward" in vars(base.lm_head), "accelerate has added its hooks"
    loss_model = LossModel(other)
    assert loss_model.full_logits_reason is None
    batch = batches()[0]
    inputs = (batch.input_ids, batch.position_ids, batch.targets, batch.boundaries, batch.max_length)
    found, expected = loss_model(*inputs), LossModel(one)(*inputs)
    found.backward()
    expected.backward()
    assert torch.equal(found, expected)
    assert_close(gradients(other), gradients(one))
    base.lm_head.forward = lambda hidden: hidden  # a hook of someone else
    del base.lm_head._hf_hook
    assert LossModel(other).full_logits_reason is not None


def test_model_on_one_device_is_not_split() -> None:
    assert not is_split(adapted())


# Whole runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-process")
    toy.write_llama(folder / "model")
    toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(60))
    return folder


def run(root: Path, name: str, split: LayerSplit | None, kind: str) -> RunDir:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "cache_dir": str(root / "cache")},
            "method": {"kind": kind},
            "train": {"global_batch_size": 5, "max_steps": 3, "learning_rate": 5e-3},
        }
    )
    plan = make_plan(config, micro=2)
    return make_run(root / f"{name}-{kind}", config, plan.model_copy(update={"split": split}))


def trained(of: RunDir) -> dict[str, Tensor]:
    (file,) = of.trained().glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("kind", ["lora", "qlora", "full"])
def test_run_with_cpu_device_map_matches_plain_cpu(root: Path, kind: str) -> None:
    mapped = LayerSplit(device_map={"model": "cpu", "lm_head": "cpu"}, max_memory={"cpu": "1GB"})
    straight, there = run(root, "straight", None, kind), run(root, "mapped", mapped, kind)
    expected = values(train_here(straight), "train.step", "loss")
    assert values(train_here(there), "train.step", "loss") == expected
    ours, theirs = trained(there), trained(straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_run_that_cannot_be_placed_raises(root: Path) -> None:
    for split, error, words in (
        (LayerSplit(device_map={"": "cpu", "model.layer": "cpu"}, max_memory=None), ConfigError, r"have: model\.layer"),
        (LayerSplit(device_map={"": "cpu"}, max_memory={"cpu": "1KB"}), OutOfMemoryError, "device cpu"),
    ):
        with pytest.raises(error, match=words):
            train_here(run(root, f"refused-{error.__name__}", split, "lora"))


def test_loss_model_survives_shallow_and_deep_copy() -> None:
    """DataParallel copies modules shallowly, deepcopy deeply; the loss must survive both."""
    loss_model = LossModel(adapted())
    batch = batches()[0]
    again = copy.deepcopy(loss_model)
    assert torch.equal(
        again(batch.input_ids, batch.position_ids, batch.targets),
        loss_model(batch.input_ids, batch.position_ids, batch.targets),
    )

"""One process, several devices: a model split over host and GPU, and DataParallel replicas, match one device."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml import FastLanguageModel
from pantheraml.base.event_stream import EventWriter
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.models.fast import is_fused
from pantheraml.parallel.device_map import DataParallelLoss, is_split, place, split
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.plan import LayerSplit
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import train_rank
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, merged, train_here, values

LAYERS = 4


def llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, tie_word_embeddings=tied, initializer_range=0.1)
    return LlamaForCausalLM(config)


def adapted() -> Any:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.train()


def custom_map(prefix: str, *, tied: bool) -> dict[str, Any]:
    """The first half on the host, the second on the GPU."""
    layers = {f"{prefix}model.layers.{i}": "cpu" if i < LAYERS // 2 else "cuda:0" for i in range(LAYERS)}
    ends = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": 0, "lm_head": "cpu" if tied else 0}
    return {**layers, **{prefix + name: device for name, device in ends.items()}}


def step(model: Any, rows: Tensor) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss, gradients and weights of one optimizer step, on the host."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    grads = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return loss.item(), grads, {n: p.detach().cpu() for n, p in model.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= 5e-5 * tensor.norm() + 1e-9, name


@pytest.mark.parametrize("kind", ["full", "tied", "lora"])
def test_a_model_split_over_host_and_gpu_trains_as_on_one_device(kind: str) -> None:
    model = adapted() if kind == "lora" else llama(tied=kind == "tied").train()
    one = copy.deepcopy(model)
    rows = torch.randint(1, 320, (3, 17))
    custom = custom_map("base_model.model." if kind == "lora" else "", tied=kind == "tied")
    placement = place(model, custom, {0: torch.cuda.mem_get_info(0)[0]})
    parts = split(model, placement)
    assert {p.device.type for p in parts.parameters()} == {"cpu", "cuda"}, "nothing is offloaded, nothing on meta"
    loss, grads, weights = step(parts, rows)
    expected_loss, expected_grads, expected_weights = step(one, rows)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same(grads, expected_grads)
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_a_strategy_over_one_gpu_puts_the_model_there(strategy: str) -> None:
    model = llama()
    model = split(model, place(model, strategy, {0: torch.cuda.mem_get_info(0)[0]}))
    assert {p.device for p in model.parameters()} == {torch.device("cuda", 0)}


class SummedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("device_ids", [[0], [0, 0]])
def test_uneven_replicas_count_each_token_once(device_ids: list[int]) -> None:
    loss = SummedLoss().cuda()
    ids = torch.randint(1, 320, (3, 17), device="cuda")
    targets = ids.roll(-1, dims=1)
    targets[0, 2:] = -100  # so that replicas have different numbers of targets, too
    expected = loss(ids, targets)
    expected_grads = torch.autograd.grad(expected, list(loss.parameters()))
    actual = DataParallelLoss(loss, device_ids)(ids, targets)
    actual.backward()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, parameter), grad in zip(loss.named_parameters(), expected_grads, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - grad).norm() <= 5e-5 * grad.norm() + 1e-9, name


# Through the engine -------------------------------------------------------------------------------------------------

HOST_AND_GPU = {"": "cuda:0", "model.embed_tokens": "cpu", "model.layers.0": "cpu", "lm_head": "cpu"}
"""Hidden states come from the GPU and meet the head on the host, so that everything has to travel."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    toy.write_llama(folder / "model")
    toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(100))
    return folder


def engine_run(root: Path, name: str, *, micro: int, precision: str = "fp32", **changes: Any) -> RunDir:
    base = {
        "model": {"path": str(root / "model")},
        "data": {
            "path": str(root / "data.jsonl"),
            "eval_fraction": 0.2,
            "seq_len": 64,
            "cache_dir": str(root / "cache"),
        },
        "train": {"global_batch_size": 7, "max_steps": 4, "learning_rate": 5e-3, "schedule": "constant"},
    }
    config = TrainConfig.model_validate(merged(base, changes))
    return make_run(root / name, config, make_plan(config, micro=micro, device="cuda", precision=precision))


def with_split(run: RunDir, device_map: Any, max_memory: Any = None) -> RunDir:
    split = LayerSplit(device_map=device_map, max_memory=max_memory)
    run.write_plan(run.plan().model_copy(update={"split": split}))
    return run


def train_on_copies(run: RunDir, device_ids: tuple[int, ...]) -> list[dict[str, Any]]:
    with open_world(run.plan(), timeout_seconds=60) as world, EventWriter(run.path) as emit:
        shared = replace(world, replica_devices=device_ids)
        train_rank(run, run.config(), run.plan(), shared, emit, StopFlag(run.stop_file))
    return raw_events(run.path)


def trained(run: RunDir) -> dict[str, Tensor]:
    (file,) = run.trained().glob("*.safetensors")
    return load_file(file)


def assert_same_run(actual: tuple[RunDir, Any], expected: tuple[RunDir, Any], *, rel: float) -> None:
    for kind in ("train.step", "eval.done"):
        losses = values(expected[1], kind, "loss")
        assert losses, kind
        assert values(actual[1], kind, "loss") == pytest.approx(losses, rel=rel), kind
    ours, theirs = trained(actual[0]), trained(expected[0])
    assert ours.keys() == theirs.keys()
    distance = sum(float((ours[name] - theirs[name]).float().norm()) ** 2 for name in ours) ** 0.5
    norm = sum(float(theirs[name].float().norm()) ** 2 for name in ours) ** 0.5
    assert distance <= 10 * rel * norm


@pytest.mark.parametrize(
    ("kind", "optimizer", "checkpointing"),
    [
        ("lora", "adamw", "none"),
        ("lora", "adamw_bf16", "full"),
        ("qlora", "adamw", "none"),
        ("full", "adamw", "selective"),
    ],
)
def test_split_over_host_and_gpu_matches_gpu(root: Path, kind: str, optimizer: str, checkpointing: str) -> None:
    name = f"{kind}-{optimizer}"
    changes = {
        "method": {"kind": kind},
        "train": {"optimizer": optimizer, "activation_checkpointing": checkpointing},
    }
    one = engine_run(root, f"one-{name}", micro=3, **changes)
    parts = with_split(engine_run(root, f"parts-{name}", micro=3, **changes), HOST_AND_GPU, {"cuda:0": "1GB"})
    expected, actual = train_here(one), train_here(parts)
    # bf16 moments use stochastic rounding, which differs between host and GPU kernels; nf4 is quantized on either
    rel = 2e-2 if optimizer == "adamw_bf16" or kind == "qlora" else 1e-4
    assert_same_run((parts, actual), (one, expected), rel=rel)


def test_split_run_resumes(root: Path) -> None:
    straight = with_split(engine_run(root, "straight", micro=3), HOST_AND_GPU)
    expected = train_here(straight)
    halves = with_split(engine_run(root, "halves", micro=3, train={"max_steps": 2}), HOST_AND_GPU)
    train_here(halves)
    config = halves.config()
    halves.write_config(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 4})}))
    actual = train_here(halves)
    assert values(actual, "train.step", "loss")[-4:] == pytest.approx(values(expected, "train.step", "loss"), rel=1e-5)


@pytest.mark.seed("S1-085", "S1-086", "S4-001")
@pytest.mark.seed("S1-087", "S4-038", partly="replicas share a batch; their memory was not measured on several GPUs")
@pytest.mark.parametrize("device_ids", [(0,), (0, 0)])
@pytest.mark.parametrize(
    ("kind", "precision", "packing", "checkpointing"),
    [
        ("lora", "fp32", True, "none"),
        ("lora", "fp32", False, "full"),
        ("dora", "fp32", True, "none"),
        ("full", "fp32", True, "selective"),
        ("lora", "bf16", True, "none"),
        ("full", "bf16", True, "none"),
    ],
)
def test_data_parallel_replicas_match_one_device(
    root: Path, device_ids: tuple[int, ...], kind: str, precision: str, packing: bool, checkpointing: str
) -> None:
    """Batches of 3, 3 and 1 rows, so that replicas get uneven shares, and one gets none."""
    name = f"{kind}-{precision}-{packing}-{len(device_ids)}"
    changes = {
        "method": {"kind": kind},
        "data": {"packing": packing},
        "train": {"activation_checkpointing": checkpointing},
    }
    one = engine_run(root, f"alone-{name}", micro=3, precision=precision, **changes)
    copies = engine_run(root, f"copies-{name}", micro=3, precision=precision, **changes)
    expected, actual = train_here(one), train_on_copies(copies, device_ids)
    assert_same_run((copies, actual), (one, expected), rel=1e-4 if precision == "fp32" else 2e-2)


def test_copies_on_several_gpus(root: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    copies = engine_run(root, "on-several", micro=4)
    copies.write_plan(copies.plan().model_copy(update={"copies": True, "device_ids": (0, 1)}))
    one = engine_run(root, "on-one", micro=4)
    actual, expected = train_here(copies), train_here(one)
    assert_same_run((copies, actual), (one, expected), rel=1e-4)


# Through FastLanguageModel ------------------------------------------------------------------------------------------


def fast_step(root: Path, device_map: Any, rows: Tensor, *, full: bool) -> tuple[Any, float, dict[str, Tensor]]:
    model, _ = FastLanguageModel.from_pretrained(
        str(root / "model"), device_map=device_map, dtype="float32", full_finetuning=full
    )
    full_model: Any = model if full else FastLanguageModel.get_peft_model(model, r=4)
    out = full_model.train()(input_ids=rows, labels=rows)
    assert "logits" not in out, "the loss comes straight from the hidden states"
    assert out.loss.device == rows.device
    out.loss.backward()
    with torch.no_grad():
        assert full_model.eval()(input_ids=rows).logits.device == rows.device
    # A of a fresh adapter has no gradient
    grads = {n: p.grad.cpu() for n, p in full_model.named_parameters() if p.grad is not None and p.grad.norm() > 1e-6}
    return full_model, out.loss.item(), grads


@pytest.mark.seed("S0-032", "S2-035")
@pytest.mark.parametrize("full", [False, True])
def test_fast_models_split_over_host_and_gpu(root: Path, full: bool) -> None:
    rows = torch.arange(3 * 17).view(3, 17) % 320
    full_model, loss, grads = fast_step(root, HOST_AND_GPU, rows.cuda(), full=full)
    assert is_split(full_model)
    assert not any(is_fused(module) for module in full_model.modules())
    _, expected, expected_grads = fast_step(root, "cpu", rows, full=full)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() <= 2e-4 * grad.norm(), name


def test_unsloth_checkpointing_of_a_split_model_stays_on_its_devices(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(root / "model"), device_map=HOST_AND_GPU)
    model = FastLanguageModel.get_peft_model(model, use_gradient_checkpointing="unsloth")
    assert model.is_gradient_checkpointing
    assert "the offload to host memory is for models on one device" in caplog.text


@pytest.mark.seed("S2-034", "C4")
@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_a_strategy_without_multi_gpu_is_the_first_gpu(root: Path, strategy: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(root / "model"), device_map=strategy)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda", 0)}

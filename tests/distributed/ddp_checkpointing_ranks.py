"""Rank script of test_ddp_checkpointing: LoRA under DDP with every kind of activation checkpointing.

`engine FOLDER` trains in the engine's DDP wrapper, and writes the differences to one process without checkpointing;
`trl FOLDER MODEL` trains with TRL's SFTTrainer on all launched ranks, and writes the losses; then once more with the
guard, with a NaN gradient on the last rank in one step.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.trainer_utils import set_seed
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel
from pantheraml.base.env import process_rank
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.engine.step.loss import LossModel
from pantheraml.hooks.guard_callback import GuardCallback
from pantheraml.parallel import aggregate
from pantheraml.parallel.data import decide_static_graph, uses_reentrant_checkpointing, without_sync, wrap
from pantheraml.parallel.process_group import World
from pantheraml.specs.aggregation import Method
from tests import toy

STEPS = 4
LENGTH = 12
Prepare = Callable[[Any], None]


@dataclass(frozen=True)
class Settings:
    find_unused_parameters: bool = False
    bucket_cap_mb: float = 0.002
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True


def torch_checkpointing(model: Any, *, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # otherwise reentrant checkpointing sees frozen inputs and computes no gradient


# name -> checkpointing, micro-batches per rank, gradient aggregation
CASES: dict[str, tuple[Prepare, int, Method]] = {
    "reentrant": (partial(torch_checkpointing, reentrant=True), 1, "mean"),
    "reentrant accumulated": (partial(torch_checkpointing, reentrant=True), 3, "mean"),
    "reentrant median": (partial(torch_checkpointing, reentrant=True), 2, "median"),
    "not reentrant": (partial(torch_checkpointing, reentrant=False), 1, "mean"),
    "not reentrant accumulated": (partial(torch_checkpointing, reentrant=False), 3, "mean"),
    "full": (partial(apply_checkpointing, mode="full"), 2, "mean"),
    "selective": (partial(apply_checkpointing, mode="selective"), 2, "mean"),
    "offload": (partial(apply_checkpointing, mode="offload"), 2, "mean"),
}


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=97, num_key_value_heads=2))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, lora)


def loss_sum(module: nn.Module, index: int) -> Tensor:
    tokens = torch.randint(97, (1, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    loss: Tensor = module(tokens[:, :-1], torch.arange(LENGTH)[None], tokens[:, 1:])
    return loss


def trained(model: nn.Module, step: Callable[[int], None]) -> dict[str, Tensor]:
    """The adapter after some steps; `step` computes the gradients."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    for number in range(STEPS):
        step(number)
        assert all(p.grad is not None for p in parameters.values())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: p.detach() for name, p in parameters.items()}


def trained_alone(samples: int) -> dict[str, Tensor]:
    model = LossModel(make_model())

    def step(number: int) -> None:
        for index in range(samples):
            (loss_sum(model, number * samples + index) / (samples * LENGTH)).backward()

    return trained(model, step)


def trained_together(world: World, name: str, settings: Settings) -> tuple[dict[str, Tensor], bool, str]:
    """The adapter, and the decision on the static graph."""
    prepare, micro_batches, method = CASES[name]
    plain = make_model()
    prepare(plain)
    plain.train()
    model = LossModel(plain)
    decision = decide_static_graph(
        allowed=True,
        reentrant_checkpointing=uses_reentrant_checkpointing(model),
        unused_parameters=settings.find_unused_parameters,
        accumulates=micro_batches > 1,
        compiled=False,
        mixture_of_experts=False,
    )
    ddp = wrap(model, world, settings, static_graph=decision.value)
    finish = aggregate.attach(ddp, method)
    samples = world.size * micro_batches
    factor = world.size / (samples * LENGTH)

    def step(number: int) -> None:
        first = number * samples + world.rank * micro_batches
        for index in range(micro_batches):
            with nullcontext() if index == micro_batches - 1 else without_sync(ddp):
                (loss_sum(ddp, first + index) * factor).backward()
        finish(target_tokens=micro_batches * LENGTH, factor=factor)

    return trained(model, step), *decision


def run_engine(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    results: dict[str, Any] = {}
    for name, (_, micro_batches, _) in CASES.items():
        found, static, reason = trained_together(world, name, Settings())
        expected = trained_alone(world.size * micro_batches)
        assert found.keys() == expected.keys()
        furthest = torch.stack([(found[key] - expected[key]).norm() / expected[key].norm() for key in expected]).max()
        results[name] = {"difference": float(furthest), "static_graph": static, "reason": reason}
    try:  # the error that the static graph prevents
        trained_together(world, "reentrant", Settings(find_unused_parameters=True))
    except RuntimeError as err:
        results["error"] = str(err)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(results))
    leave_group()


def plain_model(folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def our_model(folder: Path, loading: Mapping[str, Any] = {}, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, device_map="cpu", **loading)
    return FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, **arguments)


REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}

# name -> the model, and the settings of its trainer
TRL_CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    # transformers sets find_unused_parameters for every PEFT model by default
    "reentrant": (plain_model, {**REENTRANT, "ddp_find_unused_parameters": False}),
    "not reentrant": (plain_model, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    "ours, asked for reentrant": (our_model, REENTRANT),
    "ours, selective": (partial(our_model, use_gradient_checkpointing="selective"), {}),
    "ours, fp8": (partial(our_model, loading={"load_in_fp8": True}), {}),
    "ours, nf4": (partial(our_model, loading={"load_in_4bit": True}), {}),
}

# name -> the guard, and the value that replaces a gradient
GUARDED: dict[str, tuple[dict[str, Any], float]] = {
    "lower_rate": ({"on_nonfinite": "lower_rate", "rate_factor": 0.5}, math.nan),
    "zero": ({"on_nonfinite": "zero"}, math.nan),
    "as with zero": ({}, 0.0),
}


def train_by_trl(
    model: Any, model_folder: Path, output: Path, settings: dict[str, Any], callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(output),
            max_steps=STEPS,
            per_device_train_batch_size=8 // process_rank().world_size,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=1e-2,
            max_length=64,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            **settings,
        ),
        train_dataset=Dataset.from_list(toy.arithmetic(64)),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        callbacks=list(callbacks),
    )
    trainer.train()
    logged = trainer.state.log_history
    found = {key: [entry[key] for entry in logged if key in entry] for key in ("loss", "grad_norm")}
    return {**found, "wrapped": type(trainer.model_wrapped).__name__}


def train_guarded(model_folder: Path, output: Path, guard: GuardCallback, bad: float) -> dict[str, Any]:
    """Verdicts and final weights of every rank. A gradient of the last rank is set to `bad`."""
    place, model = process_rank(), plain_model(model_folder)
    passes = [0]

    def spoil(gradient: Tensor) -> Tensor:
        passes[0] += 1
        return (
            torch.full_like(gradient, bad) if passes[0] == 3 else gradient
        )  # the first of two micro-batches in step 2

    if place.rank == place.world_size - 1:
        next(value for name, value in model.named_parameters() if "lora_B" in name).register_hook(spoil)
    settings = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    train_by_trl(model, model_folder, output, settings, [guard])
    weights = torch.cat([value.detach().flatten() for value in model.parameters() if value.requires_grad])
    own = {"verdicts": [(step, verdict.action) for step, verdict in guard.verdicts], "weights": weights.tolist()}
    everyone: list[Any] = [own] * place.world_size
    if place.world_size > 1:
        dist.all_gather_object(everyone, own)
    return {
        "verdicts": [found["verdicts"] for found in everyone],
        "weights": weights.tolist(),
        "alike": all(found["weights"] == own["weights"] for found in everyone),
        "rate_factor": guard.state()["attributes"]["learnt"]["policy"]["rate_factor"],
    }


def run_trl(folder: Path, model_folder: Path) -> None:
    results: dict[str, Any] = {}
    for name, (make, settings) in TRL_CASES.items():
        set_seed(0)
        results[name] = train_by_trl(make(model_folder), model_folder, folder / "trainer", settings)
    for name, (guard, bad) in GUARDED.items():
        set_seed(0)
        results[name] = train_guarded(model_folder, folder / "trainer", GuardCallback(**guard), bad)
    (folder / f"rank{process_rank().rank}.json").write_text(json.dumps(results))
    leave_group()


def leave_group() -> None:
    """Release the process group before DDP's reducer: if the reducer holds the last reference to a gloo group, it joins
    the group's threads while holding the GIL, one of them waits for the GIL to free a tensor, and the process deadlocks
    (seen in torch 2.13)."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    if sys.argv[1] == "engine":
        run_engine(Path(sys.argv[2]))
    else:
        run_trl(Path(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    main()

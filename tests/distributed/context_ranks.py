"""Rank script of test_context_parallel: every case in one process and context parallel, on four ranks.

Writes, for each case, the differences in each of a few steps, and the collectives of a step.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.data.batch import Batch, collate
from pantheraml.data.documents import NO_LOSS, TokenSequence
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.engine.parallelize import Traits, parallelize
from pantheraml.engine.step.loss import LossModel
from pantheraml.models.adapters import apply_method
from pantheraml.models.attention import use_context_parallel
from pantheraml.models.loader import load_model
from pantheraml.parallel.context import shard_sequence
from pantheraml.parallel.layout import Layout, make_layout
from pantheraml.parallel.process_group import World
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import Checkpointing, MethodConfig, ModelConfig

WORLD, STEPS, VOCABULARY, LAYERS = 4, 3, 320, 2

SPREAD = {"initializer_range": 0.1}  # wide enough for attention not to be a plain average
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, **SPREAD}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaConfig(**{**SIZES, **HEADS, **more}),
    "qwen3": lambda **more: Qwen3Config(**{**SIZES, **HEADS, "head_dim": 16, **more}),
    "mistral": lambda **more: MistralConfig(**{**SIZES, **HEADS, "sliding_window": 5, **more}),
    "gpt2": lambda **more: GPT2Config(
        **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, **SPREAD},
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **more},
    ),
}


class Collectives(TorchDispatchMode):
    """Counts collectives by name. (torch's CommDebugMode cannot handle modules that are recomputed in backward.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Case:
    family: str
    context: int
    method: Literal["full", "lora", "dora"] = "full"
    packed: bool = True
    quantize: Literal["nf4", "int8", "fp8"] | None = None
    dtype: torch.dtype = torch.float32
    checkpointing: Checkpointing = "none"
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's config."""


CASES = {
    "llama full packed x2": Case("llama", 2),
    "llama full packed x4": Case("llama", 4),
    "llama full padded x4": Case("llama", 4, packed=False),
    "llama lora padded x2": Case("llama", 2, "lora", packed=False),
    "llama lora packed x4 checkpointed": Case("llama", 4, "lora", checkpointing="full"),
    "llama lora packed x2 selectively checkpointed": Case("llama", 2, "lora", checkpointing="selective"),
    "llama dora packed x2": Case("llama", 2, "dora"),
    "llama full packed x4 float64": Case("llama", 4, dtype=torch.float64),
    "one key/value head x4": Case("llama", 4, changes={"num_key_value_heads": 1}),
    "three key/value heads x2": Case(
        "llama", 2, changes={"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    ),
    "two key/value heads of twelve x4": Case("llama", 4, changes={"num_attention_heads": 12, "hidden_size": 48}),
    "as many key/value heads x4": Case("llama", 4, changes={"num_key_value_heads": 4}),
    "qwen3 full packed x2": Case("qwen3", 2),
    "qwen3 lora packed x4": Case("qwen3", 4, "lora"),
    "mistral window full packed x2": Case("mistral", 2),
    "mistral window lora padded x4": Case("mistral", 4, "lora", packed=False),
    "gpt2 full packed x2": Case("gpt2", 2),
    "nf4 lora packed x2": Case("llama", 2, "lora", quantize="nf4"),
    "int8 lora packed x2": Case("llama", 2, "lora", quantize="int8"),
    "fp8 lora packed x4": Case("llama", 4, "lora", quantize="fp8"),
}

# name -> family, changes to its config, degree, words that the error must contain
REFUSALS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "heads": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}, 4, "2, 3, 6"),
    "dropout": ("llama", {"attention_dropout": 0.1}, 2, "attention_dropout"),
    "dropout of GPT-2": ("gpt2", {"attn_pdrop": 0.1}, 2, "attn_pdrop"),
    "rotary": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 2, "dynamic"),
}


def make_model(case: Case, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    if case.quantize is not None:
        where = ModelConfig(path=str(folder))
        model = load_model(where, dtype=case.dtype, device=torch.device("cpu"), quantize=case.quantize)
    else:
        model = AutoModelForCausalLM.from_config(FAMILIES[case.family](**case.changes), dtype=case.dtype)
    adapted = apply_method(model, MethodConfig(kind=case.method, rank=4), seed=1)
    with torch.no_grad():  # LoRA's B starts at zero, which would hide the gradient of A
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return adapted.train()


def make_batch(case: Case, generator: np.random.Generator) -> Batch:
    """Two rows: packed documents of uneven length, or one document each with the last quarter padding."""
    rows = [[9, 13, 3, 6], [1, 22]] if case.packed else [[21], [6]]
    sequences = []
    for lengths in rows:
        ids = generator.integers(1, VOCABULARY, sum(lengths), dtype=np.int32)
        labels = np.where(generator.random(sum(lengths)) < 0.7, ids, NO_LOSS).astype(np.int32)
        labels[np.cumsum([0, *lengths[:-1]])] = NO_LOSS
        sequences.append(TokenSequence(ids, labels, np.array(lengths, dtype=np.int32)))
    return collate(sequences, pad_id=0, width=None, parts=case.context)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(
        batch.input_ids, batch.position_ids, batch.targets, batch.boundaries, batch.max_length, batch.target_count
    )
    return loss


def own_part(batch: Batch, group: dist.ProcessGroup) -> Batch:
    cut = {name: shard_sequence(getattr(batch, name), group) for name in ("input_ids", "position_ids", "targets")}
    count = int((cut["targets"] != NO_LOSS).sum())
    return Batch(**cut, boundaries=batch.boundaries, max_length=batch.max_length, tokens=-1, target_count=count)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative difference of any tensor; tensors of pure rounding noise are relative to the largest tensor."""
    assert found.keys() == expected.keys()
    floor = 1e-6 * max(float(tensor.norm()) for tensor in expected.values())
    return max(float((found[name] - e).norm()) / max(float(e.norm()), floor) for name, e in expected.items())


def run_case(case: Case, folder: Path, layout: Layout) -> dict[str, Any]:
    whole = make_model(case, folder)
    parts = copy.deepcopy(whole)
    group = layout.group("context")
    use_context_parallel(parts, group)
    for model in (whole, parts):
        apply_checkpointing(model, case.checkpointing)
    one, many = LossModel(whole), LossModel(parts)
    # Not Adam, which amplifies gradients that are pure rounding noise, such as those of GPT-2's key biases.
    trained = [[p for p in model.parameters() if p.requires_grad] for model in (one, many)]
    optimizers = [torch.optim.SGD(parameters, lr=0.02, momentum=0.9) for parameters in trained]
    losses, grads, counts = [], [], []
    generator = np.random.default_rng(2)
    for _ in range(STEPS):
        batches = [make_batch(case, generator) for _ in range(layout.dims.data)]
        tokens = sum(batch.target_count for batch in batches)
        expected = sum((loss_of(one, batch) for batch in batches), torch.zeros(())) / tokens
        expected.backward()
        with Collectives() as forward:
            loss = loss_of(many, own_part(batches[layout.data_rank], group)) / tokens
        with Collectives() as backward:
            loss.backward()
        counts.append([dict(mode.counts) for mode in (forward, backward)])
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(abs(float(total) - expected.item()) / expected.item())
        for parameter in many.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        grads.append(largest_difference(gradients(many), gradients(one)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = [{n: p.detach() for n, p in m.named_parameters() if p.requires_grad} for m in (many, one)]
    return {"losses": losses, "grads": grads, "weights": largest_difference(*weights), "counts": counts}


def run_refusal(name: str, layouts: dict[int, Layout]) -> str | None:
    family, changes, degree, _ = REFUSALS[name]
    model = make_model(Case(family, degree, changes=changes), Path())
    try:
        use_context_parallel(model, layouts[degree].group("context"))
    except UnsupportedModelError as err:
        return str(err)
    return None


def rejected_with_tensor_parallel(rank: int) -> str | None:
    """Error of a run that would split 2 heads by both tensor and context parallel."""
    two_heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    layout = make_layout(ParallelDims(context=2, tensor=2), "cpu")
    world = World(rank, WORLD, torch.device("cpu"), layout=layout)
    try:
        parallelize(
            make_model(Case("llama", 2, changes=two_heads), Path()), world, MultiGPUConfig(), nullcontext, Traits()
        )
    except UnsupportedModelError as err:
        return str(err)
    return None


def unsharded_rows_difference(layout: Layout) -> float:
    """Difference of a call without documents, on a context parallel model, to the original model."""
    plain = make_model(Case("llama", 4), Path())
    cut = copy.deepcopy(plain)
    use_context_parallel(cut, layout.group("context"))
    ids = torch.arange(7)[None]  # a width not divisible by any degree
    with torch.no_grad():
        return float((cut(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max())


def mixing_rejected(layout: Layout) -> bool:
    """Whether a model that mixes tokens outside of attention is rejected, even if the first part is equal."""
    model: Any = make_model(Case("llama", 4), Path())

    def mix(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output + output.cumsum(dim=1)

    model.model.layers[0].mlp.register_forward_hook(mix)
    try:
        use_context_parallel(model, layout.group("context"))
    except UnsupportedModelError:
        return True
    return False


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layouts = {degree: make_layout(ParallelDims(replicate=WORLD // degree, context=degree), "cpu") for degree in (2, 4)}
    found: dict[str, Any] = {name: run_case(case, folder, layouts[case.context]) for name, case in CASES.items()}
    found["refusals"] = {name: run_refusal(name, layouts) for name in REFUSALS}
    found["rejected with tensor"] = rejected_with_tensor_parallel(dist.get_rank())
    found["unsharded rows"] = unsharded_rows_difference(layouts[4])
    found["mixing rejected"] = mixing_rejected(layouts[4])
    ranks: list[Any] = [None] * WORLD
    dist.all_gather_object(ranks, found)
    if dist.get_rank() == 0:
        target.write_text(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pantheraml.base.errors import OutOfMemoryError, UnsupportedModelError
from pantheraml.engine.memory import host_offload as host_memory
from pantheraml.engine.memory.checkpointing import MIN_INNER_DIM, apply_checkpointing
from pantheraml.engine.memory.host_offload import HostStore
from pantheraml.specs.train import Checkpointing

MODES: tuple[Checkpointing, ...] = ("selective", "full", "offload")
WIDTH, LENGTH, BATCH, LAYERS = MIN_INNER_DIM, 16, 2, 4
INPUT_BYTES = BATCH * LENGTH * WIDTH * 4


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
        **changes,
    )
    return LlamaForCausalLM(config).train()


def gpt2_with_dropout() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
    return GPT2LMHeadModel(config).train()


def llama_with_adapters() -> nn.Module:
    adapters = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(llama(), adapters)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def tokens() -> Tensor:
    return torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))


def loss_and_gradients(model: nn.Module, mode: Checkpointing) -> tuple[float, dict[str, Tensor]]:
    apply_checkpointing(model, mode)
    torch.manual_seed(7)
    losses = []
    for _ in range(2):  # two micro-batches into the same gradients
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        losses.append(loss.item())
    return sum(losses), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.seed("S0-100")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [llama, gpt2_with_dropout, llama_with_adapters])
def test_checkpointed_gradients_are_bit_equal(make: Any, mode: Checkpointing) -> None:
    plain_loss, plain = loss_and_gradients(make(), "none")
    loss, gradients = loss_and_gradients(make(), mode)
    assert loss == plain_loss
    assert gradients.keys() == plain.keys()
    assert plain
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)


def test_checkpointing_is_exact_under_bf16_autocast() -> None:
    results = []
    for mode in ("none", *MODES):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(loss_and_gradients(llama(), mode))
    for loss, gradients in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(gradients[name], value) for name, value in results[0][1].items())


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors created inside that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for leaf in _tensors(out):
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in given:
                self._storages[storage.data_ptr()] = (weakref.ref(storage), storage.nbytes())
        return out

    @property
    def bytes(self) -> int:
        return sum(size for storage, size in self._storages.values() if storage() is not None)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def kept_bytes(mode: Checkpointing) -> int:
    """Device memory held by the decoder's graph after a forward pass."""
    model = llama()
    apply_checkpointing(model, mode)
    with Alive() as alive:
        hidden = model.model(input_ids=tokens()).last_hidden_state
        held = alive.bytes
    hidden.sum().backward()
    return held


def test_each_mode_saves_fewer_activations() -> None:
    none, selective, full = (kept_bytes(mode) for mode in ("none", "selective", "full"))
    layers_inputs = LAYERS * INPUT_BYTES
    # A layer saves its input; the final norm and RoPE save a little more.
    assert layers_inputs <= full <= layers_inputs + 4 * INPUT_BYTES
    # Plus outputs of matmuls and attention: q 1, k and v 1/2 each, attention 1, o 1, gate and up 2 each, down 1.
    assert full + 8 * layers_inputs <= selective <= full + 10 * layers_inputs
    assert selective < 0.65 * none


@pytest.mark.seed("S4-162", partly="activations in host memory; no unified memory")
def test_offload_frees_device_memory_and_reuses_host_buffers() -> None:
    model = llama()
    apply_checkpointing(model, "offload")
    store: HostStore = model.model.layers[0]._gradient_checkpointing_func.args[0]
    for _ in range(3):
        hidden = model.model(input_ids=tokens()).last_hidden_state
        assert store.bytes == LAYERS * INPUT_BYTES
        hidden.sum().backward()
        assert store.bytes == LAYERS * INPUT_BYTES
    inputs: list[weakref.ref[Any]] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    hidden = model.model(input_ids=tokens()).last_hidden_state
    hook.remove()
    assert inputs[0]() is None
    hidden.sum().backward()


def test_host_buffers_do_not_accumulate() -> None:
    model = llama()
    apply_checkpointing(model, "offload")
    store: HostStore = model.model.layers[0]._gradient_checkpointing_func.args[0]
    for length in (4, 16, 8, 2, 12):
        model.model(input_ids=tokens()[:, :length])  # no backward: the graph is freed here
    assert store.bytes == LAYERS * INPUT_BYTES


def test_too_little_host_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "RESERVE", 1.0)
    model = llama()
    apply_checkpointing(model, "offload")
    with pytest.raises(OutOfMemoryError, match="Not enough host memory"):
        model(input_ids=tokens())


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_layers_run_normally(mode: Checkpointing) -> None:
    model = llama()
    apply_checkpointing(model, mode)
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(input_ids=tokens())
    model.eval()
    model(input_ids=tokens())
    model.generate(tokens(), max_new_tokens=2, do_sample=False, use_cache=True, pad_token_id=0)
    assert len(calls) == 4
    model.train()
    model(input_ids=tokens()).logits.sum().backward()
    assert len(calls) >= 5


def test_checkpointing_can_be_disabled_again() -> None:
    model = llama()
    assert apply_checkpointing(model, "full") == LAYERS
    assert model.is_gradient_checkpointing
    assert apply_checkpointing(model, "none") == LAYERS
    assert not model.is_gradient_checkpointing


def test_a_model_without_decoder_layers_says_so() -> None:
    assert apply_checkpointing(nn.Linear(2, 2), "none") == 0
    with pytest.raises(UnsupportedModelError, match="has none"):
        apply_checkpointing(nn.Linear(2, 2), "full")

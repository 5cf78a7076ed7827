"""Device map placement from sizes alone: models are on the meta device and no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.base.errors import ConfigError, DeviceError, OutOfMemoryError
from pantheraml.parallel.device_map import (
    DataParallelLoss,
    _without_overlap,
    bytes_on,
    named_devices,
    place,
    place_in_group,
    split,
)

LAYERS = 8
LAYER = 4 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)
"""Bytes of one decoder layer."""
EMBEDDING = 4 * 320 * 32


def llama(*, tied: bool = False, device: str = "meta") -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=LAYERS, tie_word_embeddings=tied))


def size(model: nn.Module) -> int:
    return bytes_on(model, {"": 0})[0]


def layers_on(placement: dict[str, Any]) -> list[Any]:
    """The device of each decoder layer."""
    return [next(d for n, d in placement.items() if f"model.layers.{i}".startswith(n)) for i in range(LAYERS)]


def test_bytes_per_device() -> None:
    model = llama()
    rest = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 1, "model.rotary_emb": 0}
    placement = {**{f"model.layers.{i}": int(i >= 3) for i in range(LAYERS)}, **rest}
    tables = 2 * 4 * 4  # of the rotary embedding
    assert bytes_on(model, placement) == {0: EMBEDDING + 3 * LAYER + tables, 1: 5 * LAYER + 4 * 32 + EMBEDDING}


@pytest.mark.seed("S0-002", "S0-059", "S0-060", "S0-011")
@pytest.mark.parametrize("strategy", ["auto", "balanced"])
def test_balanced_gives_every_device_its_share(strategy: str) -> None:
    model = llama()
    placement = place(model, strategy, {0: 10**9, 1: 10**9})
    first, second = bytes_on(model, placement).values()
    assert abs(first - second) <= 2 * LAYER
    assert layers_on(placement) == sorted(layers_on(placement))


@pytest.mark.seed("S0-061", "C4")
def test_sequential_fills_one_device_after_another() -> None:
    model = llama()
    placement = place(model, "sequential", {0: EMBEDDING + 5 * LAYER, 1: 10**9, 2: 10**9})
    # beside its layers the first device keeps room for the largest one
    largest = max(LAYER, EMBEDDING)
    assert layers_on(placement).count(0) == (5 * LAYER - largest) // LAYER
    assert set(placement.values()) == {0, 1}


@pytest.mark.seed("C4", "S2-034", "S2-061")
@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_with_one_device_every_strategy_means_that_device(strategy: str) -> None:
    assert place(llama(), strategy, {3: 10**9}) == {"": 3}
    assert place(llama(), strategy, {"cpu": 10**9}) == {"": "cpu"}


@pytest.mark.seed("S2-036")
@pytest.mark.parametrize(("name", "expected"), [("cuda:1", 1), (1, 1), (torch.device("cuda", 0), 0), ("cuda", 0)])
def test_one_device_by_name(name: Any, expected: int) -> None:
    assert place(llama(), name, {0: 10**9, 1: 10**9}) == {"": expected}


def test_no_layer_is_divided() -> None:
    model = llama()
    for room in range(EMBEDDING + LAYER, EMBEDDING + 9 * LAYER, LAYER // 3):
        placement = place(model, "sequential", {0: room, 1: 10**9})
        assert all(name.count(".") <= 2 for name in placement)
        used = bytes_on(model, placement)
        assert used.get(0, 0) <= room


@pytest.mark.seed("S0-062")
def test_memory_limits_bound_what_goes_where() -> None:
    model = llama()
    limit = EMBEDDING + 4 * LAYER
    placement = place(model, "sequential", {0: 10**9, 1: 10**9, 2: 10**9}, {0: limit, "cuda:2": "1GiB"})
    assert set(placement.values()) == {0, 2}, "a device that max_memory does not name is not used"
    assert bytes_on(model, placement)[0] <= limit


def test_limits_do_not_add_memory() -> None:
    with pytest.raises(OutOfMemoryError):
        place(llama(), "sequential", {0: 10}, {0: "80GB"})


def test_explicit_device_is_used_although_max_memory_omits_it() -> None:
    assert place(llama(), "cuda:1", {0: 10**9, 1: 10**9}, {0: "1GB"}) == {"": 1}
    with pytest.raises(OutOfMemoryError):
        place(llama(), "cuda:0", {0: 10**9, 1: 10**9}, {0: "1KB"})


def test_uneven_devices_are_filled_in_order_where_balance_is_not_possible() -> None:
    model = llama()
    devices: dict[Any, int] = {0: size(model), 1: 3 * LAYER}
    placement = place(model, "auto", devices)
    assert all(used <= devices[device] for device, used in bytes_on(model, placement).items())
    with pytest.raises(OutOfMemoryError) as caught:
        place(model, "balanced", devices)
    assert "device_map=auto" in str(caught.value.fix)


@pytest.mark.seed("S2-059", "S2-079")
@pytest.mark.parametrize("strategy", ["auto", "sequential"])
def test_model_that_does_not_fit_is_rejected_with_the_shortfall(strategy: str) -> None:
    model = llama()
    half = size(model) // 4
    with pytest.raises(OutOfMemoryError, match=r"0\.\d\d\d GB of the model's 0\.\d\d\d GB") as caught:
        place(model, strategy, {0: half, 1: half, "cpu": 10**12})
    lacking = float(str(caught.value).split()[0])
    assert size(model) - 2 * half <= lacking * 1e9 + 1e6
    with pytest.raises(OutOfMemoryError, match="too much"):
        place(model, "cuda:0", {0: half})


def test_tied_weights_stay_together() -> None:
    model = llama(tied=True)
    model.tie_weights()
    placement = place(model, "balanced", {0: 10**9, 1: 10**9})
    assert placement["lm_head"] == placement["model.embed_tokens"]
    custom = {"model": 0, "lm_head": 1}
    with pytest.raises(ConfigError, match="tied weights"):
        place(model, custom, {0: 10**9, 1: 10**9})


def test_custom_map_is_used_unchanged() -> None:
    custom = {"model.embed_tokens": "cpu", "model.layers": torch.device("cuda", 1), "model.norm": 1, "lm_head": "cuda"}
    expected = {"model.embed_tokens": "cpu", "model.layers": 1, "model.norm": 1, "lm_head": 0}
    assert place(llama(), custom, {0: 10**9, 1: 10**9}) == expected


@pytest.mark.parametrize(
    ("custom", "error", "words"),
    [
        ({"model": 0}, ConfigError, "no device for lm_head.weight"),
        ({"": 0, "model.layer": 0}, ConfigError, "does not have: model.layer"),
        ({"": 0, "lm_head": 7}, DeviceError, "7 is not among the devices in use: 0, 1"),
        ({"": 0, "lm_head": "disk"}, ConfigError, "'disk' is not a valid device"),
        ({"": 0, "model.layers.3.mlp": 1}, ConfigError, r"splits model\.layers\.3"),
        ("fastest", ConfigError, "'fastest' is not a valid device or device_map strategy"),
        ("cuda:5", DeviceError, "cuda:5"),
    ],
)
def test_invalid_device_maps_are_rejected(custom: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        place(llama(), custom, {0: 10**9, 1: 10**9})


def test_a_custom_map_must_fit() -> None:
    with pytest.raises(OutOfMemoryError, match="device 1"):
        place(llama(), {"": 0, "lm_head": 1}, {0: 10**9, 1: EMBEDDING - 1})
    assert place(llama(), {"": 0, "lm_head": 1}, {0: 10**9, 1: EMBEDDING}) == {"": 0, "lm_head": 1}


def test_invalid_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="'ten' is not a size"):
        place(llama(), "auto", {0: 10**9}, {0: "ten"})
    with pytest.raises(DeviceError):
        place(llama(), "auto", {})


def test_adapted_models_are_placed_under_their_own_names() -> None:
    adapted = get_peft_model(llama(device="cpu"), LoraConfig(r=2, target_modules=["q_proj"]))
    placement = place(adapted, "balanced", {0: 10**9, 1: 10**9})
    assert set(placement.values()) == {0, 1}
    assert all(name.startswith("base_model.model.") and name.count(".") <= 4 for name in placement)


@pytest.mark.seed("C5", "S2-023")
@pytest.mark.parametrize("device_map", [None, "auto", "balanced", "sequential", "cuda", "cuda:1", 1, {"": 1}])
def test_rank_of_a_group_gets_its_own_device(device_map: Any) -> None:
    assert place_in_group(device_map, 1) == {"": 1}


@pytest.mark.seed("C5")
@pytest.mark.parametrize("device_map", ["cuda:0", "cpu", {"": 0}, {"model": 0, "lm_head": 1}])
def test_map_of_other_devices_in_a_group_is_rejected(device_map: Any) -> None:
    with pytest.raises(ConfigError, match="the one device of this rank"):
        place_in_group(device_map, 1)


def test_a_split_over_one_device_is_a_move() -> None:
    model = llama(device="cpu").to(torch.float64)
    ids = torch.arange(6)[None]
    expected = model(input_ids=ids).logits
    assert torch.equal(split(model, {"": "cpu"})(input_ids=ids).logits, expected)


class SummedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(rows).flatten(0, 1), targets.flatten(), reduction="sum")


def test_data_parallel_without_gpus_is_the_loss_itself() -> None:
    torch.manual_seed(0)
    loss = SummedLoss()
    rows, targets = torch.rand(3, 7, 4), torch.randint(0, 5, (3, 7)).where(torch.rand(3, 7) < 0.5, -100)
    expected = loss(rows, targets)
    found = DataParallelLoss(loss, device_ids=[])(rows, targets)
    assert found.shape == ()
    assert torch.equal(found, expected)
    found.backward()
    assert torch.equal(loss.layer.weight.grad, torch.autograd.grad(expected, loss.layer.weight)[0])


def test_nested_device_map_becomes_disjoint() -> None:
    model = llama()
    nested = {"": 0, "model": 1, "model.layers.2": 0, "lm_head": "cpu"}
    flat = _without_overlap(model, nested)
    assert not any(name.startswith(f"{other}.") for name in flat for other in flat)
    assert bytes_on(model, flat) == bytes_on(model, nested)
    assert {flat[f"model.layers.{i}"] for i in range(LAYERS) if i != 2} == {1}
    assert (flat["model.layers.2"], flat["model.embed_tokens"], flat["lm_head"]) == (0, 1, "cpu")


def test_modules_without_checkpoint_tensors_need_no_device() -> None:
    custom: dict[str, Any] = {"model.embed_tokens": 1, "model.layers": 0, "model.norm": 0, "lm_head": 0}
    assert _without_overlap(llama(), custom) == {**custom, "model.rotary_emb": 1}


class WeightBesideChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = SummedLoss()
        self.inner.scale = nn.Parameter(torch.ones(1))


def test_module_with_own_weights_is_not_split() -> None:
    with pytest.raises(ConfigError, match="splits inner"):
        _without_overlap(WeightBesideChild(), {"": 0, "inner.layer": 1})


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [("auto", []), ("cuda", ["cuda:0"]), ({"a": "cpu", "b": 1, "c": "cuda:0"}, ["cuda:0", "cuda:1", "cpu"])],
)
def test_named_devices(device_map: Any, expected: list[str]) -> None:
    assert named_devices(device_map, {0: 1, 1: 1}) == [torch.device(name) for name in expected]

from __future__ import annotations

import torch
from torch import nn

from pantheraml.engine.adamw8bit import SMALLEST, AdamW8bit, code_table, decode, encode
from pantheraml.engine.optim import build_optimizer, clip, load_optimizer_tensors, optimizer_tensors, total_norm
from pantheraml.specs.train import TrainSettings


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 8))


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 96, generator=generator), torch.randn(64, 8, generator=generator)
    losses = []
    for _ in range(steps):
        loss = (module(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_weight_decay_spares_biases_and_norms() -> None:
    module = model()
    optimizer = build_optimizer(named(module), TrainSettings(weight_decay=0.1))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in module.parameters() if p.ndim == 2}
    assert all(group["betas"] == (0.9, 0.999) for group in optimizer.param_groups)


def test_state_survives_a_checkpoint_bit_for_bit() -> None:
    for kind in ("adamw", "adamw8bit"):
        settings = TrainSettings.model_validate({"optimizer": kind, "learning_rate": 1e-2})
        straight = model()
        optimizer = build_optimizer(named(straight), settings)
        train(straight, optimizer, 5)
        saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, named(straight)).items()}
        resumed = model(seed=9)
        resumed.load_state_dict(straight.state_dict())
        again = build_optimizer(named(resumed), settings)
        load_optimizer_tensors(again, named(resumed), saved)
        assert train(straight, optimizer, 5) == train(resumed, again, 5), kind


def test_codes_keep_small_values_apart_from_zero() -> None:
    for signed in (True, False):
        table = code_table(signed=signed)
        assert len(table) <= 256
        assert torch.equal(table, table.unique())
        values = torch.logspace(-4, 0, 1000)
        codes, scale = encode(values, table)
        back = decode(codes, scale, table, values.shape)
        # Blocks span less than two decades here: every value within 30 %, those near the top within 2 %.
        assert ((back - values).abs() / values).max() < 0.3
        assert ((back - values).abs() / values)[-100:].max() < 0.02


def test_8bit_adam_learns_like_32bit_adam_with_a_quarter_of_the_state() -> None:
    settings = {"learning_rate": 3e-3}
    exact, small = model(), model()
    optimizer = build_optimizer(named(small), TrainSettings.model_validate({**settings, "optimizer": "adamw8bit"}))
    assert isinstance(optimizer, AdamW8bit)
    reference = train(exact, build_optimizer(named(exact), TrainSettings.model_validate(settings)), 150)
    ours = train(small, optimizer, 150)
    assert ours[-1] < 0.2 * ours[0]
    assert abs(ours[-1] - reference[-1]) < 0.02 * ours[0]
    large = small[0].weight
    assert large.numel() >= SMALLEST
    state = sum(t.numel() * t.element_size() for t in optimizer.state[large].values())
    assert state < 0.27 * (2 * 4 * large.numel())


def test_clipping_scales_to_the_limit_and_zero_means_none() -> None:
    module = model()
    module(torch.ones(2, 96)).square().sum().backward()
    before = total_norm(named(module))
    clip(named(module), before, 0.0)
    assert total_norm(named(module)) == before
    clip(named(module), before, 0.5)
    torch.testing.assert_close(total_norm(named(module)), torch.tensor(0.5), rtol=1e-4, atol=0)

"""pantheraml.stability: your own loop is guarded like a run; every setting has its effect or is rejected."""

from __future__ import annotations

import copy
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pantheraml.base.errors import ConfigError, NonFiniteError, TrainingError
from pantheraml.specs.own_loop_configs import stability_of
from pantheraml.specs.train import StabilityConfig
from pantheraml.stability import (
    GradientClippingConfig,
    NaNHandlingConfig,
    NumericalStabilityManager,
    PerformanceOptimizationConfig,
    PyTorchDebuggingConfig,
    create_training_wrapper,
)

PAGE = Path(__file__).parents[2] / "docs/stability.md"


class Loop:
    """A training loop without a wrapper."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self._batches = torch.Generator().manual_seed(1)

    def loss(self, factor: float = 1.0) -> Tensor:
        inputs = torch.randn(16, 4, generator=self._batches)
        loss: Tensor = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean() * factor
        return loss

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def run(self, wrapper: NumericalStabilityManager, steps: int, growth: float = 1.0) -> None:
        for step in range(steps):
            wrapper(self.model, self.loss(growth**step), self.optimizer)


def clipping(kind: str, **settings: Any) -> NumericalStabilityManager:
    return create_training_wrapper(GradientClippingConfig.model_validate({"clipping": kind, **settings}))


def bad_steps(**settings: Any) -> NumericalStabilityManager:
    return create_training_wrapper(nan_config=NaNHandlingConfig(**settings))


@pytest.mark.seed("S1-080")
def test_a_call_matches_a_plain_torch_step() -> None:
    ours, theirs = Loop(), Loop()
    wrapper = create_training_wrapper(GradientClippingConfig(max_grad_norm=0.5))
    for step in range(4):
        loss = theirs.loss()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.5)
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
        result = wrapper(ours.model, ours.loss(), ours.optimizer)
        assert (result.step, result.action, result.anomaly) == (step + 1, "step", None)
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert result.grad_norm > 0.5, "there is something to clip"
    torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=1e-6, atol=1e-7)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_gradients_accumulate() -> None:
    ours, theirs = Loop(), Loop()
    for loop in (ours, theirs):
        (loop.loss() / 2).backward()
    create_training_wrapper(GradientClippingConfig(clipping="none"))(ours.model, ours.loss() / 2, ours.optimizer)
    (theirs.loss() / 2).backward()
    theirs.optimizer.step()
    torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=1e-6, atol=1e-7)


def test_gradients_outside_the_optimizer_are_cleared() -> None:
    loop = Loop()
    part = torch.optim.SGD(loop.model[2].parameters(), lr=0.1)
    wrapper = create_training_wrapper()
    norms = [wrapper(loop.model, loop.model(torch.ones(2, 4)).mean() * 0.1, part).grad_norm for _ in range(3)]
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    assert norms == pytest.approx([norms[0]] * 3, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "settings", "largest"),
    [
        ("value", {"clip_value": 1e-3}, 1e-3),
        ("norm", {"max_grad_norm": 1e-3}, 1e-3),
        ("global_norm", {"max_grad_norm": 1e-3}, 1e-3),
        ("adaptive", {"clip_weight_ratio": 1e-4}, 1e-3),
    ],
)
def test_clipping_bounds_the_update(kind: str, settings: dict[str, Any], largest: float) -> None:
    loop = Loop(learning_rate=1.0)
    before = loop.weights()
    loop.run(clipping(kind, **settings), 1)
    update = (loop.weights() - before).abs().max()
    assert 0 < update <= largest * 1.001


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("percentile", {"clip_percentile": 1}, {"clip_percentile": 100}),
        ("percentile", {"clip_history": 2}, {"clip_history": 100}),
        ("zclip", {"clip_zscore": 1e-3}, {"clip_zscore": 10}),
        ("zclip", {"clip_zscore": 1.0, "clip_decay": 0.1}, {"clip_zscore": 1.0, "clip_decay": 0.9}),
        ("adagc", {"clip_growth": 0.5}, {"clip_growth": 2.0}),
        ("adagc", {"clip_warmup_steps": 2}, {"clip_warmup_steps": 25}),
    ],
)
def test_adaptive_clipping_settings_have_effect(kind: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    loops = []
    for settings in (first, second):
        loops.append(Loop())
        loops[-1].run(clipping(kind, **{"max_grad_norm": 0, "clip_warmup_steps": 2, **settings}), 6, growth=1.5)
    assert not torch.equal(loops[0].weights(), loops[1].weights())


def test_a_bad_step_is_skipped() -> None:
    loop, undisturbed = Loop(), Loop()
    wrapper = bad_steps(on_nonfinite="skip")
    loop.run(wrapper, 2)
    before = loop.weights()
    result = wrapper(loop.model, loop.loss(math.nan), loop.optimizer)
    assert (result.action, result.anomaly, result.tensor) == ("skip", "nonfinite", "0.weight")
    assert result.cause == "the loss is not finite on rank 0"
    assert torch.equal(loop.weights(), before)
    undisturbed.run(bad_steps(), 2)
    undisturbed.loss()
    for each, guard in ((loop, wrapper), (undisturbed, bad_steps())):
        each.run(guard, 1)
    assert torch.equal(loop.weights(), undisturbed.weights())
    stats = wrapper.get_multi_gpu_status()["training_stats"]
    assert (stats["steps"], stats["skipped_steps"]) == (4, 1)


def test_stop_raises_before_the_optimizer_step() -> None:
    loop = Loop()
    before = loop.weights()
    with pytest.raises(NonFiniteError, match="stopped at step 1") as caught:
        bad_steps()(loop.model, loop.loss(math.inf), loop.optimizer)
    assert caught.value.where == "the gradient of 0.weight"
    assert torch.equal(loop.weights(), before)
    assert all(parameter.grad is None for parameter in loop.model.parameters())


def test_nonfinite_values_are_zeroed() -> None:
    loop = Loop()
    wrapper = bad_steps(on_nonfinite="zero")
    bias = loop.model[2].bias
    bias.register_hook(lambda gradient: gradient * math.nan)
    before = bias.detach().clone()
    result = wrapper(loop.model, loop.loss(), loop.optimizer)
    assert (result.action, result.tensor) == ("zero", "2.bias")
    assert torch.equal(bias, before)
    assert loop.weights().isfinite().all()
    assert not torch.equal(loop.weights(), Loop().weights()), "the others take their step"


def test_detect_reports_and_takes_the_step() -> None:
    loop = Loop()
    result = bad_steps(on_nonfinite="detect")(loop.model, loop.loss(math.nan), loop.optimizer)
    assert (result.action, result.anomaly) == ("step", "nonfinite")
    assert loop.weights().isnan().all()


def test_lowered_learning_rate_leaves_the_schedule_alone() -> None:
    loop, other = Loop(), Loop()
    wrapper = create_training_wrapper(
        GradientClippingConfig(clipping="none"), NaNHandlingConfig(on_nonfinite="lower_rate", rate_factor=0.25)
    )
    assert wrapper(loop.model, loop.loss(math.nan), loop.optimizer).action == "skip"
    assert wrapper(loop.model, loop.loss(), loop.optimizer).rate_factor == 0.25
    assert loop.optimizer.param_groups[0]["lr"] == 0.1
    other.loss()
    other.loss().backward()
    for group in other.optimizer.param_groups:
        group["lr"] = 0.025
    other.optimizer.step()
    torch.testing.assert_close(loop.weights(), other.weights(), rtol=1e-6, atol=1e-7)


def test_spikes_and_their_threshold() -> None:
    for zscore, warmup, on_spike, expected in (
        (6.0, 4, "skip", ("skip", "spike")),
        (6.0, 4, "ignore", ("step", None)),
        (1e9, 4, "skip", ("step", None)),
        (6.0, 20, "skip", ("step", None)),
    ):
        loop = Loop(learning_rate=1e-3)
        wrapper = bad_steps(on_spike=on_spike, spike_zscore=zscore, spike_warmup_steps=warmup)
        loop.run(wrapper, 4)
        result = wrapper(loop.model, loop.loss() + 1000.0, loop.optimizer)
        assert (result.action, result.anomaly) == expected


def test_gradient_spike_names_the_tensor() -> None:
    loop = Loop(learning_rate=1e-3)
    wrapper = bad_steps(on_spike="stop", spike_warmup_steps=100)
    loop.run(wrapper, 6)
    with pytest.raises(TrainingError, match="times its mean") as caught:
        wrapper(loop.model, loop.loss(1000.0), loop.optimizer)
    assert caught.value.where is not None


@pytest.mark.parametrize("settings", [{"max_skipped_steps": 2}, {"max_skipped_total": 2}])
def test_skips_are_limited(settings: dict[str, int]) -> None:
    loop = Loop()
    wrapper = bad_steps(on_nonfinite="skip", **settings)
    in_a_row = "max_skipped_steps" in settings
    for _ in range(2):
        wrapper(loop.model, loop.loss(math.nan), loop.optimizer)
        if not in_a_row:
            loop.run(wrapper, 1)
    with pytest.raises(NonFiniteError, match="in a row" if in_a_row else "in total"):
        wrapper(loop.model, loop.loss(math.nan), loop.optimizer)


def test_group_norms_and_update_ratio_intervals() -> None:
    loop = Loop()
    wrapper = create_training_wrapper(debug_config=PyTorchDebuggingConfig(group_norms_every=2, update_ratio_every=3))
    results = []
    for _ in range(6):
        before = loop.weights()
        results.append(wrapper(loop.model, loop.loss(), loop.optimizer))
        if results[-1].update_ratio is not None:
            ratio = (loop.weights() - before).norm() / loop.weights().norm()
            assert results[-1].update_ratio == pytest.approx(float(ratio), rel=1e-5)
    assert [result.groups is not None for result in results] == [False, True] * 3
    assert [result.update_ratio is not None for result in results] == [False, False, True] * 2
    groups = results[1].groups
    assert groups is not None
    squares = sum(norms["grad_norm"] ** 2 for norms in groups.values())
    assert squares == pytest.approx(results[1].grad_norm ** 2, rel=1e-6)


def test_debugging_names_the_operation() -> None:
    loop = Loop()
    wrapper = create_training_wrapper(None, NaNHandlingConfig(on_nonfinite="skip"), PyTorchDebuggingConfig(debug=True))
    assert wrapper(loop.model, loop.loss(), loop.optimizer).groups is not None
    zero = loop.loss() * 0
    result = wrapper(loop.model, zero.sqrt() + loop.loss(), loop.optimizer)
    assert result.operation is not None
    assert "MulBackward0" in result.operation or "SqrtBackward0" in result.operation
    loop.run(wrapper, 1)
    assert loop.weights().isfinite().all()
    with pytest.raises(NonFiniteError) as caught:
        create_training_wrapper(debug_config=PyTorchDebuggingConfig(debug=True))(
            loop.model, (loop.loss() * 0).sqrt(), loop.optimizer
        )
    assert "Backward0" in caught.value.__notes__[0]


def test_debugging_under_reentrant_checkpointing_warns(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    wrapper = create_training_wrapper(None, NaNHandlingConfig(on_nonfinite="skip"), PyTorchDebuggingConfig(debug=True))
    hidden = loop.model[0](torch.ones(2, 4))
    loss = checkpoint(lambda value: loop.model[1:](value) * math.nan, hidden, use_reentrant=True).sum()
    with caplog.at_level(logging.WARNING, logger="pantheraml"):
        assert wrapper(loop.model, loss, loop.optimizer).operation is None
    assert "reentrant" in caplog.text


@pytest.mark.parametrize("kind", ["zclip", "adagc"])
def test_learned_statistics_resume(kind: str) -> None:
    settings = {"clip_warmup_steps": 2, "clip_zscore": 1e-3, "clip_growth": 0.5}
    straight = Loop()
    wrapper = clipping(kind, **settings)
    straight.run(wrapper, 3)
    state, resumed = copy.deepcopy(wrapper.state_dict()), copy.deepcopy(straight)
    resumed._batches = torch.Generator().set_state(straight._batches.get_state())
    straight.run(wrapper, 3)
    again = clipping(kind, **settings)
    again.load_state_dict(state)
    assert again.state_dict() == state
    resumed.run(again, 3)
    assert torch.equal(resumed.weights(), straight.weights())
    assert again.state_dict() == wrapper.state_dict()


def test_invalid_steps_raise() -> None:
    loop = Loop()
    wrapper = create_training_wrapper()
    loss = loop.loss()
    loss.backward()
    loop.optimizer.zero_grad()
    with pytest.raises(ConfigError, match="already called"):
        wrapper(loop.model, loss, loop.optimizer)
    with pytest.raises(ConfigError, match="does not depend"):
        wrapper(loop.model, loop.loss().detach(), loop.optimizer)
    with pytest.raises(ConfigError, match="2 values"):
        wrapper(loop.model, torch.stack([loop.loss(), loop.loss()]), loop.optimizer)
    with pytest.raises(ConfigError, match="set of trainable parameters"):
        wrapper(Loop().model, loop.loss(), loop.optimizer)
    loop.model[0].bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="set of trainable parameters"):
        wrapper(loop.model, loop.loss(), loop.optimizer)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        create_training_wrapper()(nn.Identity(), loop.loss(), loop.optimizer)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        create_training_wrapper()(loop.model.requires_grad_(False), loop.loss(), loop.optimizer)
    compiled = Loop().model
    compiled.compile()
    with pytest.raises(ConfigError, match="compiled"):
        create_training_wrapper(debug_config=PyTorchDebuggingConfig(debug=True))(compiled, loss, loop.optimizer)


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        (GradientClippingConfig, {"max_norm": 1.0}, "no field `max_norm`"),
        (GradientClippingConfig, {"clipping": "layers"}, "`clipping` = 'layers'"),
        (NaNHandlingConfig, {"on_nonfinite": "roll_back"}, "`pantheraml train`"),
        (NaNHandlingConfig, {"on_spike": "roll_back"}, "`pantheraml train`"),
        (NaNHandlingConfig, {"rollback_steps": 3}, "no field `rollback_steps`"),
        (PyTorchDebuggingConfig, {"group_norms_every": -1}, "`group_norms_every` = -1"),
        (PerformanceOptimizationConfig, {"multi_gpu_mode": "tensor"}, "`multi_gpu_mode` = 'tensor'"),
        (PerformanceOptimizationConfig, {"multi_gpu_backend": "mpi"}, "`multi_gpu_backend` = 'mpi'"),
        (PerformanceOptimizationConfig, {"enable_compile": True}, "no field `enable_compile`"),
    ],
)
def test_unknown_settings_are_rejected(section: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        section(**fields)
    assert "docs/configuration.md" in str(caught.value)
    assert str(caught.value).count("fix:") == 1
    made = section()
    before = made.model_dump()
    with pytest.raises(ConfigError, match=re.escape(message)):
        setattr(made, *next(iter(fields.items())))
    assert made.model_dump() == before


def test_settings_match_a_run() -> None:
    assert stability_of(GradientClippingConfig(), NaNHandlingConfig(), PyTorchDebuggingConfig()) == StabilityConfig()
    sections = (GradientClippingConfig, NaNHandlingConfig, PyTorchDebuggingConfig)
    covered = {name for section in sections for name in section.model_fields}
    assert set(StabilityConfig.model_fields) - covered == {"rollback_steps", "max_rollbacks"}


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    assert names["result"].action == "step"
    assert names["skipped"] == 1

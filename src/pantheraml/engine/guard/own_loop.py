"""The guard for training loops that are not the engine's: people's own code, or a trainer that asks a callback.

It judges the gradients that are there, clips them, and drops those of a step that is not to be taken. It cannot run a
step again. Every process must hold the whole model; with peers, one small exchange makes all decide alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pantheraml.base.errors import ConfigError, NonFiniteError, TrainingError
from pantheraml.engine import optim
from pantheraml.engine.guard.norms import Spread
from pantheraml.engine.guard.state import Guard
from pantheraml.engine.guard.verdict import StepNumbers, Verdict
from pantheraml.parallel.process_group import World
from pantheraml.specs.train import StabilityConfig


class OwnLoopGuard(Guard):
    """Of one model. What is learnt is saved and loaded as that of a run."""

    def __init__(self, config: StabilityConfig, max_grad_norm: float, model: nn.Module, world: World) -> None:
        """`world`: the peers that hold a copy of `model`, to judge together with."""
        self.parameters, self._world = trained_parameters(model), world
        if not self.parameters:
            raise ConfigError("No parameter of the model is trained.", todo="Set requires_grad on some.")
        if any(isinstance(parameter, DTensor) for _, parameter in self.parameters):
            raise ConfigError(
                "Outside of `pantheraml train` the guard is for models that every process holds whole.",
                todo="Train without FSDP and tensor parallelism, or with `pantheraml train`, whose guard knows them.",
            )
        self._spread = Spread(self.parameters, self.parameters, world.layout)
        super().__init__(config, max_grad_norm, self._spread)

    def judge(self, loss: Tensor | None, *, spoilt: Tensor | None = None) -> tuple[StepNumbers, Verdict]:
        """On the gradients that are there now; `loss` is this process's, None where nobody tells it. `spoilt` tells
        whether they held values that are not finite, where they do not any more. A collective."""
        share = self._share()
        if spoilt is not None:
            share = torch.where(spoilt.to(share.device), torch.nan, share)
        own = torch.zeros_like(share) if loss is None else loss.detach().to(share).reshape(())
        losses, shares = zip(*self._world.gather(torch.stack([own, share]).tolist()).tolist(), strict=True)
        numbers = StepNumbers(
            loss_sums=list(losses),
            grad_norm=math.sqrt(sum(shares)),
            target_tokens=self._world.size,  # the loss is the mean over processes
            stop_requested=False,
        )
        return numbers, self.policy.decide(numbers, loss_scale=None)

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        """Have the next step see clipped gradients; those that are not finite have no norm to go by, and stay."""
        if math.isfinite(norm):
            self.clipping.clip(optimizer, norm)
        else:
            optim.clip(optimizer, self.parameters, norm, 0.0)

    def zero_nonfinite(self) -> float:
        """Make gradient values that are not finite 0; the norm of what is left. A collective."""
        for gradient in self._spread.gradients():
            if gradient is not None:
                torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)
        return float(self._world.gather([float(self._share())]).sum().sqrt())

    def drop_gradients(self) -> None:
        """An optimizer leaves parameters alone that have none."""
        for _, parameter in self.parameters:
            parameter.grad = None

    def _share(self) -> Tensor:
        return self._spread.share(self._spread.gradients())


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def stopped(step: int, verdict: Verdict, *, settings: str) -> TrainingError:
    """What to raise for a verdict to stop; `settings`: what on_nonfinite and on_spike are given to."""
    kind = NonFiniteError if verdict.anomaly == "nonfinite" else TrainingError
    return kind(
        f"Training stopped at step {step}: {verdict.cause}.",
        todo=f"Lower the learning rate, or give {settings} on_nonfinite='skip' or on_spike='skip'. The weights are"
        " those before that step.",
    )

"""Learning rate of a run that leaves it `auto`, and whether adapters are large enough, with reasons. Pure functions.

The rule is that of tinker-cookbook's `hyperparam_utils`, fitted to sweeps over Llama and Qwen models from 1B up, with
Adam and LoRA's scale at alpha=32: 5e-5 * m * (2000 / hidden size)^p, where m is 10 for adapters and 1 for full
fine-tunes. The best rate hardly depends on the rank, as long as the scale is alpha/rank.
"""

from __future__ import annotations

from pantheraml.specs.plan import Choice
from pantheraml.specs.train import FIXED_LEARNING_RATE, TrainConfig

BASE_RATE, BASE_WIDTH = 5e-5, 2000.0
ADAPTER_FACTOR = 10.0
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
"""Exponent by prefix of `model_type`."""
SMALLEST_WIDTH, SMALLEST_WITH_ADAPTERS = 1024, 256
"""Narrower models are outside the sweeps. With adapters, a Llama of width 256 learned three tasks 6 to 17 % worse at
the usual rate than at the best of ten, which is near what the rule gives (benchmarks/auto_defaults.py, size=cpu)."""
SHORT_RUN, SHORT_RUN_FACTOR = 100, 1.5
"""Runs of fewer steps than this take a higher rate."""
RANKS = (16, 32, 64, 128, 256)
"""Ranks that are recommended."""


def learning_rate_choice(config: TrainConfig, model_type: str | None, hidden: int | None, steps: int | None) -> Choice:
    """Choose train.learning_rate. `hidden`: hidden size of the model; None: not known. `steps`: length of the run."""
    requested = config.train.learning_rate
    if requested != "auto":
        return Choice(name="train.learning_rate", value=requested, reason="set in the configuration", automatic=False)
    value, reason = _automatic(config, model_type or "", hidden, steps)
    return Choice(name="train.learning_rate", value=value, reason=reason, automatic=True)


def _automatic(config: TrainConfig, model_type: str, hidden: int | None, steps: int | None) -> tuple[float, str]:
    if hidden is None:
        return FIXED_LEARNING_RATE, "the usual rate; the hidden size of the model is not known"
    adapter = config.method.kind != "full"
    smallest = SMALLEST_WITH_ADAPTERS if adapter else SMALLEST_WIDTH
    if hidden < smallest:
        return FIXED_LEARNING_RATE, (
            f"the usual rate; a hidden size of {hidden} is below {smallest}, where no rule is calibrated"
        )
    if adapter and config.method.rslora:
        return FIXED_LEARNING_RATE, "the usual rate; the rule by hidden size does not hold for method.rslora"
    family = next((name for name in EXPONENTS if model_type.startswith(name)), None)
    rate = BASE_RATE * (ADAPTER_FACTOR if adapter else 1.0) * (BASE_WIDTH / hidden) ** EXPONENTS[family or "llama"]
    reason = f"by hidden size {hidden} and family, {'adapters' if adapter else 'full fine-tune'} (tinker-cookbook)"
    if family is None:
        reason += f"; not calibrated for {model_type or 'this family'}, Llama's exponent is used"
    if steps is not None and steps < SHORT_RUN:
        rate *= SHORT_RUN_FACTOR
        reason += f"; x {SHORT_RUN_FACTOR} for fewer than {SHORT_RUN} steps"
    return float(f"{rate:.2g}"), reason


def rank_choice(config: TrainConfig, parameters: int, tokens: float) -> Choice | None:
    """The rank of adapters, and whether their parameters cover the tokens that they are trained on. None: no adapters.

    `parameters`: of all adapters. `tokens`: different ones with a loss. Adapters with fewer parameters than that fall
    behind a full fine-tune; the rank itself is not changed, as memory and what an adapter is merged with depend on it.
    """
    if config.method.kind == "full" or not parameters:
        return None
    reason = f"{_count(parameters)} adapter parameters for about {_count(tokens)} trained tokens"
    if parameters < tokens:
        enough = (rank for rank in RANKS if rank / config.method.rank * parameters >= tokens)
        rank = next(enough, None)
        reason += f": method.rank={rank} would cover them" if rank is not None else _TOO_MANY
    return Choice(name="method.rank", value=config.method.rank, reason=reason, automatic=False)


_TOO_MANY = f": more than adapters of rank {RANKS[-1]} hold, so method.kind=full may learn more"


def _count(number: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,.0f}"

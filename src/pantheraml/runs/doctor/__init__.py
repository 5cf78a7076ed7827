"""`pantheraml doctor`: does this host train? Checks of installation and hardware, an all-reduce, and a real run.

Nothing here imports torch: what needs it runs in worker processes, as it does in a run, so that a broken torch or
driver is a line in the result and not the end of the doctor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from pantheraml.base import env
from pantheraml.base.errors import ConfigError
from pantheraml.devices.probe import probe
from pantheraml.runs.doctor.hardware import check_hardware
from pantheraml.runs.doctor.installation import check_installation
from pantheraml.runs.doctor.trial import check_ranks, check_torch, check_training
from pantheraml.specs.diagnosis import Check, skipped


def examine(doing: Callable[[str], AbstractContextManager[object]]) -> Iterator[Check]:
    """Yield the result of each check as it ends; `doing(text)` is entered while one runs.

    ConfigError for a rank of torchrun, accelerate or srun: the doctor starts processes of its own.
    """
    if env.launched_rank() is not None:
        raise ConfigError(
            "`pantheraml doctor` examines a host by itself, but a launcher started this process as a rank.",
            fix="Run it once per host, without torchrun, accelerate launch or srun.",
        )
    yield from check_installation()
    with doing("looking at the hardware"):
        checks = check_hardware()
    yield from checks
    with doing("importing torch"):
        torch = check_torch(len(probe().gpus))
    yield torch
    if torch.status == "failed":
        yield from (skipped(name, "not tried: torch does not work") for name in ("collective", "training"))
        return
    with doing("starting processes that exchange tensors"):
        ranks = check_ranks()
    yield ranks
    with doing("training a tiny model"):
        training = check_training()
    yield training

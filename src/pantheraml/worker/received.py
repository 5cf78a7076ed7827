"""The run folder of a request: it may be somebody else's, or its base may not be what it was."""

from __future__ import annotations

from pantheraml.base.events import Emit
from pantheraml.models.trained_on import own_base
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ReceivedRequest
from pantheraml.specs.train import TrainConfig


def received(request: ReceivedRequest, emit: Emit) -> tuple[RunDir, TrainConfig]:
    """The run and its configuration, with the base that its adapter was trained on; ModelError if that has changed."""
    run = RunDir(request.run_dir)
    config = run.received_config(request.consent)
    if not run.adapter.is_dir():
        return run, config
    model, unknown = own_base(config.model, run.adapter)
    if unknown is not None:
        emit("notice", message=unknown)
    return run, config.model_copy(update={"model": model})

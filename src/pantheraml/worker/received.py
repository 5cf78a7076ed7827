"""Load the run of a request, which may come from someone else, and check that its base model is unchanged."""

from __future__ import annotations

from pantheraml.base.events import Emit, Notice
from pantheraml.models.base_identity import verified_base
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ReceivedRequest
from pantheraml.specs.train import TrainConfig


def load_received_run(request: ReceivedRequest, emit: Emit) -> tuple[RunDir, TrainConfig]:
    """Return the run and its config, with the base its adapter was trained on; ModelError if that has changed."""
    run = RunDir(request.run_dir)
    config = run.received_config(request.consent)
    if not run.adapter.is_dir():
        return run, config
    model, unknown = verified_base(config.model, run.adapter)
    if unknown is not None:
        emit(Notice(message=unknown))
    return run, config.model_copy(update={"model": model})

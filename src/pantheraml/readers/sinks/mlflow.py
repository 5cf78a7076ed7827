"""MLflow: logs to the server in MLFLOW_TRACKING_URI, or to files under RUN_DIR/mlflow.

Only the client package (`mlflow-skinny`) is needed. It writes no SQLite, and rejects its own file store unless an
environment variable allows it; those files can be read by, or imported into, any MLflow (`mlflow migrate-filestore`).
"""

from __future__ import annotations

import json
from typing import Any

from pantheraml.base.env import set_for_this_process
from pantheraml.base.errors import ConfigError
from pantheraml.readers.sinks.sink import Backend, RunIdentity, register, require

FOLDER = "mlflow"

_STATUS = {"succeeded": "FINISHED", "stopped": "KILLED"}


class MLflow:
    def __init__(self, identity: RunIdentity) -> None:
        mlflow = require("mlflow", extra="mlflow")
        self._entities = require("mlflow.entities", extra="mlflow")
        if mlflow.is_tracking_uri_set():
            uri = mlflow.get_tracking_uri()
        else:
            set_for_this_process("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (identity.run_dir.resolve() / FOLDER).as_uri()
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._run_id = identity.recorded_id("mlflow") or self._create(identity)
            self._client.update_run(self._run_id, status="RUNNING")
        except mlflow.exceptions.MlflowException as err:
            raise ConfigError(
                f"MLflow could not start a run: {err}",
                where=f"report.sinks, tracking URI {uri}",
                fix="Check MLFLOW_TRACKING_URI and that the server is reachable.",
            ) from err
        identity.record_id("mlflow", self._run_id)

    def _create(self, identity: RunIdentity) -> str:
        experiment = self._client.get_experiment_by_name(identity.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(identity.project)
        run_id: str = self._client.create_run(experiment_id, run_name=identity.name).info.run_id
        params = [self._entities.Param(name, _text(value)) for name, value in identity.config.items()]
        self._client.log_batch(run_id, params=params)
        return run_id

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        at = int(seconds * 1000)
        batch = [self._entities.Metric(name, value, at, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def finish(self, status: str) -> None:
        self._client.set_tag(self._run_id, "pantheraml.status", status)
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@register("mlflow")
def _open(identity: RunIdentity) -> Backend:
    return MLflow(identity)

"""trackio: a local dashboard (`trackio show`), or the Space or server in its own environment variables."""

from __future__ import annotations

import contextlib
import contextvars
import io
import uuid

from pantheraml.base.errors import ConfigError
from pantheraml.readers.sinks.sink import Backend, RunIdentity, register, require


class Trackio:
    def __init__(self, identity: RunIdentity) -> None:
        trackio = require("trackio", extra="trackio")
        self._levels = trackio.AlertLevel
        # trackio identifies a run by name only, so ours is unique and recorded for a resume.
        run_id = identity.recorded_id("trackio") or f"{identity.name}-{uuid.uuid4().hex[:6]}"
        try:
            with _quiet():
                # In its own context: at exit, trackio finishes "the current run" of this context again.
                self._run = contextvars.copy_context().run(
                    trackio.init, identity.project, name=run_id, config=identity.config, resume="allow", embed=False,
                    auto_log_gpu=False, auto_log_cpu=False,
                )  # fmt: skip
        except (ValueError, OSError) as err:
            raise ConfigError(
                f"trackio could not start a run: {err}",
                where="report.sinks",
                fix="Correct report.project, or remove trackio from report.sinks.",
            ) from err
        identity.record_id("trackio", run_id)

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        del seconds  # trackio uses its own timestamps
        self._run.log(dict(metrics), step=step)

    def finish(self, status: str) -> None:
        with _quiet():
            self._run.alert(f"run {status}", level=self._levels.INFO if status == "succeeded" else self._levels.WARN)
            self._run.finish()


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Suppress trackio's output to stdout, which is reserved for results."""
    return contextlib.redirect_stdout(io.StringIO())


@register("trackio")
def _open(identity: RunIdentity) -> Backend:
    return Trackio(identity)

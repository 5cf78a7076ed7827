"""trackio: a local dashboard (`trackio show`), or a Space or server that its own environment variables name."""

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
        # Names are trackio's only handle on a run, so ours is unique and written down for a resume.
        known_as = identity.remembered("trackio") or f"{identity.name}-{uuid.uuid4().hex[:6]}"
        try:
            with _quiet():
                # In a context of its own: trackio finishes "the current run" of this context once more at exit.
                self._run = contextvars.copy_context().run(
                    trackio.init, identity.project, name=known_as, config=identity.config, resume="allow", embed=False,
                    auto_log_gpu=False, auto_log_cpu=False,
                )  # fmt: skip
        except (ValueError, OSError) as err:
            raise ConfigError(f"trackio did not open a run: {err}", where="report.sinks") from err
        identity.remember("trackio", known_as)

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        del seconds  # trackio stamps what it receives with its own clock
        self._run.log(dict(metrics), step=step)

    def finish(self, status: str) -> None:
        with _quiet():
            self._run.alert(f"run {status}", level=self._levels.INFO if status == "succeeded" else self._levels.WARN)
            self._run.finish()


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """trackio greets on stdout, which belongs to the command's result."""
    return contextlib.redirect_stdout(io.StringIO())


@register("trackio")
def _open(identity: RunIdentity) -> Backend:
    return Trackio(identity)

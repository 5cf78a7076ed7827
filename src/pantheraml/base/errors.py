"""The exception tree of PantheraML, with exit codes.

    PantheraError                     1   base class; never raised itself
    ├── ConfigError                   2   invalid key, value or combination in the configuration or on the command line
    ├── DataError                     3   unreadable data file or invalid row
    ├── ModelError                    4   model, tokenizer or adapter that cannot be found or loaded
    │   └── UnsupportedModelError    14   the model is valid but does not support the requested option
    ├── DeviceError                   5   device missing, or without the requested capability
    │   └── OutOfMemoryError         15   the device ran out of memory
    │       └── PassTooLargeError    25   a rank ran out of memory; a smaller micro-batch may fit
    ├── LaunchError                   6   worker processes could not start, or failed to rendezvous
    ├── CheckpointError               7   the checkpoint is unusable, or does not match this run
    │   ├── StorageError             17   disk full, read-only or gone
    │   └── DamagedCheckpointError   27   checkpoint truncated, incomplete or modified
    ├── TrainingError                 8   training failed
    │   ├── NonFiniteError           18   NaN or infinity in the loss or a gradient
    │   ├── DriftError               28   replicas that should hold the same weights differ
    │   ├── EqualityError            38   several processes gave a different result than one (`verify`)
    │   └── HangError                48   a rank made no progress
    ├── RunDirectoryError             9   output folder in use or not empty, or no run in it
    ├── MissingExtraError            10   a required optional dependency is not installed
    ├── InstallationError            11   Python, a package or the driver is missing or too old (`doctor`)
    ├── ServiceError                 12   the service (`serve`) refused a request
    │   └── ServiceUnavailableError  22   the service does not answer, or not now
    ├── WorkerError                  70   unexpected exception in a process (a bug)
    │   └── WorkerKilledError        71   a process was killed (host out of memory, crash in native code)
    └── InterruptedRunError         130   stopped by Ctrl-C; the message says what was saved
        └── PreemptedError          143   stopped by SIGTERM or SIGUSR1 (schedulers); the message says what was saved

An error states what happened, where, and the fix. The command line prints these and exits with the code above;
`--debug` adds the traceback. Workers send their error to the parent as an event, so the user sees the same message
whichever process failed.
"""

from __future__ import annotations

from typing import ClassVar

from pantheraml.base.text import printable


class PantheraError(Exception):
    """Base class: what happened (`what`), where (`where`), and what to do about it (`fix`)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        """Return the message for a terminal, with control characters from data files or models escaped."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return printable("\n".join(lines))


class ConfigError(PantheraError):
    exit_code = 2


class DataError(PantheraError):
    exit_code = 3


class ModelError(PantheraError):
    exit_code = 4


class UnsupportedModelError(ModelError):
    exit_code = 14


class DeviceError(PantheraError):
    exit_code = 5


class OutOfMemoryError(DeviceError):
    exit_code = 15


class PassTooLargeError(OutOfMemoryError):
    exit_code = 25


class LaunchError(PantheraError):
    exit_code = 6


class CheckpointError(PantheraError):
    exit_code = 7


class StorageError(CheckpointError):
    exit_code = 17


class DamagedCheckpointError(CheckpointError):
    exit_code = 27


class TrainingError(PantheraError):
    exit_code = 8


class NonFiniteError(TrainingError):
    exit_code = 18


class DriftError(TrainingError):
    exit_code = 28


class EqualityError(TrainingError):
    exit_code = 38


class HangError(TrainingError):
    exit_code = 48


class RunDirectoryError(PantheraError):
    exit_code = 9


class MissingExtraError(PantheraError):
    exit_code = 10


class InstallationError(PantheraError):
    exit_code = 11


class ServiceError(PantheraError):
    """`status`, `code` and `param` of the response; None: no response, or not in it."""

    exit_code = 12

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.status, self.code, self.param, self.request_id = status, code, param, request_id


class ServiceUnavailableError(ServiceError):
    exit_code = 22


class WorkerError(PantheraError):
    exit_code = 70


class WorkerKilledError(WorkerError):
    exit_code = 71


class InterruptedRunError(PantheraError):
    exit_code = 130


class PreemptedError(InterruptedRunError):
    exit_code = 143


def error_classes() -> dict[str, type[PantheraError]]:
    """Map name -> class for the whole tree, so that errors can be sent between processes by name."""
    classes: dict[str, type[PantheraError]] = {}
    pending: list[type[PantheraError]] = [PantheraError]
    while pending:
        cls = pending.pop()
        classes[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return classes

"""Every error that PantheraML raises on purpose.

    PantheraError                     1   the root; never raised itself
    ├── ConfigError                   2   a key, a value or a combination in the configuration or on the command line
    ├── DataError                     3   a data file or a row in it
    ├── ModelError                    4   a model or tokenizer folder, a hub name, an adapter
    │   └── UnsupportedModelError    14   the model is fine, but it cannot do what was asked
    ├── DeviceError                   5   a device that is not there or cannot do what was asked
    │   └── OutOfMemoryError         15   the device is there but too small
    │       └── PassTooLargeError    25   one of several processes ran out of memory; fewer sequences at a time may fit
    ├── LaunchError                   6   worker processes that could not start or meet
    ├── CheckpointError               7   a checkpoint that is damaged, or does not fit this run
    │   ├── StorageError             17   the disk: full, read-only, gone
    │   └── DamagedCheckpointError   27   a checkpoint that is not what was written: torn, cut short, changed
    ├── TrainingError                 8   the training itself
    │   ├── NonFiniteError           18   NaN or infinity in loss or gradient
    │   ├── DriftError               28   ranks that should hold the same weights do not
    │   ├── EqualityError            38   several processes came to another result than one (`verify`)
    │   └── HangError                48   a rank did not get on, and the others waited for it in vain
    ├── RunDirectoryError             9   an output folder that holds something else, or a run that is not there
    ├── MissingExtraError            10   an optional dependency that was asked for is not installed
    ├── WorkerError                  70   a process met something nobody foresaw (a bug)
    │   └── WorkerKilledError        71   a process was killed (the kernel out of memory, a crash in native code)
    └── InterruptedRunError         130   stopped by Ctrl-C; the text says what was saved
        └── PreemptedError          143   stopped by SIGTERM or SIGUSR1, as schedulers send them; likewise

An error says what happened, where, and what to do next. The command line prints just that and exits with the number
above; `--debug` adds the traceback. Worker processes send their error to the parent as an event, so the same text
reaches the user whichever process failed.
"""

from __future__ import annotations

from typing import ClassVar

from pantheraml.base.text import printable


class PantheraError(Exception):
    """What happened (`what`), where (`where`), and what to do next (`todo`)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, todo: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.todo = todo

    def __str__(self) -> str:
        """For people: what a data file or a model put into it does not reach their terminal as a command."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.todo:
            lines.append(f"  to do: {self.todo}")
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


class WorkerError(PantheraError):
    exit_code = 70


class WorkerKilledError(WorkerError):
    exit_code = 71


class InterruptedRunError(PantheraError):
    exit_code = 130


class PreemptedError(InterruptedRunError):
    exit_code = 143


def error_classes() -> dict[str, type[PantheraError]]:
    """Name -> class for the whole tree, so that an error can cross a process border by name."""
    found: dict[str, type[PantheraError]] = {}
    todo: list[type[PantheraError]] = [PantheraError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found

"""Logging: one logger tree, `pantheraml`.

A program (the command line, a worker) calls `start`. In a script, our loader calls `start_for_scripts`, which prints
automatic choices unless the script configures logging itself. Importing the package changes nothing.
"""

from __future__ import annotations

import logging
import sys

from pantheraml.base import env
from pantheraml.base.errors import ConfigError
from pantheraml.base.text import printable

_ROOT = "pantheraml"
_LEVELS = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}  # fmt: skip


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _ScriptHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr, until the script adds a handler to Python's root logger: records reach that one anyway."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def get(name: str) -> logging.Logger:
    return logging.getLogger(name)


def get_manager() -> logging.Logger:
    """Return the logger `multi_gpu_manager`, a name that people know, as a branch of our tree with its own level."""
    logger = logging.getLogger("multi_gpu_manager")
    logger.parent = logging.getLogger(_ROOT)
    return logger


def start(*, debug: bool = False) -> None:
    """Log the package's messages to stderr; called once by a program, never by the library."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger(_ROOT)
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)


def start_for_scripts() -> None:
    """Log to stderr in rank 0 of a script, from the level that PANTHERAML_LOG names, or else from info.

    Nothing is changed if the script has configured logging: a handler or a level of the logger `pantheraml`, or a
    handler of the root logger. A library may have added that handler (Unsloth does), so PANTHERAML_LOG sets the level
    even then. Ranks other than 0 would repeat the same lines, and log errors only.
    """
    level = _LEVELS["info"] if env.log_level() is None else _level(str(env.log_level()))
    logger, shown_by_root = logging.getLogger(_ROOT), bool(logging.getLogger().handlers)
    if logger.handlers or logger.level != logging.NOTSET or (shown_by_root and env.log_level() is None):
        return
    if env.process_rank().rank > 0 or shown_by_root:
        logger.setLevel(level if env.process_rank().rank == 0 else max(level, logging.ERROR))
        return
    handler = _ScriptHandler(sys.stderr)
    handler.setFormatter(_Printable("pantheraml %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)


def _level(name: str) -> int:
    if name.lower() not in _LEVELS:
        raise ConfigError(f"PANTHERAML_LOG={name!r} is not a log level.", fix=f"Use one of {', '.join(_LEVELS)}.")
    return _LEVELS[name.lower()]

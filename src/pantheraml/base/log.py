"""Logging: one logger tree, `pantheraml`, silent until a program calls `start`."""

from __future__ import annotations

import logging
import sys

from pantheraml.base.text import printable


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def get(name: str) -> logging.Logger:
    return logging.getLogger(name)


def start(*, debug: bool = False) -> None:
    """Log the package's messages to stderr; called once by a program, never by the library."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("pantheraml")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)

"""Readers that print a run's events to the terminal."""

from __future__ import annotations

from pantheraml.readers.follow import Reader
from pantheraml.readers.progress import ProgressBar


def progress(title: str, *, quiet: bool = False) -> list[Reader]:
    """Return a progress bar with a title; no reader if `quiet` (for --json)."""
    return [] if quiet else [ProgressBar(title)]

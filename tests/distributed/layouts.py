"""The layouts of ranks that go through many cases: one of each kind, however many cases it has."""

from __future__ import annotations

import functools

from pantheraml.parallel.layout import make_layout

layout_of = functools.cache(make_layout)
"""Threads of a process group live as long as its process, and hundreds of them keep the cores from the others."""

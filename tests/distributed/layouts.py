"""Cached layouts for rank scripts with many cases: one per kind."""

from __future__ import annotations

import functools

from pantheraml.parallel.layout import make_layout

layout_of = functools.cache(make_layout)
"""The threads of a process group live as long as the process, and hundreds of them would take up the cores."""

"""`python -m pantheraml.worker.entry NAME ...`: run module NAME of this folder, with the arguments after it."""

from __future__ import annotations

import importlib
import sys

from pantheraml.base.imports import quick_imports

if __name__ == "__main__":
    name = sys.argv.pop(1)
    with quick_imports():
        module = importlib.import_module(f"pantheraml.worker.entry.{name}")
    sys.exit(module.main())

"""Imports without garbage collections, and what stays as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch  # noqa: F401 - imported before: nothing may be frozen

from pantheraml.base.imports import quick_imports


def test_collections_pause_while_importing() -> None:
    frozen = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen, "garbage may hold tensors"


def test_collections_go_on_after_a_failed_import() -> None:
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import pantheraml.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_collections_stay_off_where_they_were_off() -> None:
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_name_of_the_package_is_imported_once_and_left_out_of_collections() -> None:
    code = (
        "import gc, pantheraml\n"
        "assert gc.get_freeze_count() == 0\n"
        "pantheraml.MultiGPUConfig, pantheraml.AggregationMethod\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 1000, gc.get_freeze_count()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

"""The registry of patches: revertible in any order, in any import order, for known versions only."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import ConfigError, MissingExtraError
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.hooks.registry import PatchRegistry

Library = Any


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package `somelib` 2.5 with `somelib.parts.answer`, not imported yet."""
    package, metadata = tmp_path / "somelib", tmp_path / "somelib-2.5.dist-info"
    package.mkdir()
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somelib\nVersion: 2.5\n")
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("def answer():\n    return 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "somelib.parts"
    assert sys.meta_path == finders, "a finder was left behind"
    for name in [name for name in sys.modules if name.partition(".")[0] == "somelib"]:
        del sys.modules[name]


def patch(word: str = "ours", **changes: str) -> LibraryPatch:
    def make(original: Callable[[], str]) -> Callable[[], str]:
        def answer() -> str:
            return f"{word}({original()})"

        answer.__module__ = original.__module__
        return answer

    fields = {"library": "somelib", "versions": ">=2,<3", "module": "somelib.parts", "name": "answer", "fallback": "-"}
    return LibraryPatch(**{**fields, **changes}, make=make)  # type: ignore[arg-type]


@pytest.mark.seed("S3-022", "C7", "C26")
def test_a_patch_waits_for_the_import(library: str) -> None:
    registry, subject = PatchRegistry(), patch()
    registry.apply_on_import(subject)
    registry.apply_on_import(subject)
    assert library not in sys.modules
    assert registry.waiting == ("somelib.parts.answer",)
    module: Library = importlib.import_module(library)
    assert module.answer() == "ours(theirs)"
    assert (registry.waiting, registry.applied) == ((), (subject,))
    assert "return 'theirs'" in inspect.getsource(module)
    registry.revert(subject)
    assert module.answer() == "theirs"


@pytest.mark.seed("S3-022")
def test_a_patch_of_an_imported_module_is_immediate_and_idempotent(library: str) -> None:
    module: Library = importlib.import_module(library)
    registry, subject = PatchRegistry(), patch()
    registry.apply_on_import(subject)
    registry.apply_on_import(subject)
    assert module.answer() == "ours(theirs)"
    assert registry.applied == (subject,)
    registry.revert(subject)
    registry.revert(subject)
    assert module.answer() == "theirs"


def test_reverted_before_the_import(library: str) -> None:
    registry, subject = PatchRegistry(), patch()
    registry.apply_on_import(subject)
    registry.revert(subject)
    module: Library = importlib.import_module(library)
    assert module.answer() == "theirs"


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_two_patches_of_one_name_are_reverted_in_any_order(library: str, first: str) -> None:
    module: Library = importlib.import_module(library)
    registry, inner, outer = PatchRegistry(), patch("inner"), patch("outer")
    assert registry.apply(inner)
    assert registry.apply(outer)
    assert module.answer() == "outer(inner(theirs))"
    registry.revert(inner if first == "inner" else outer)
    assert module.answer() == ("outer(theirs)" if first == "inner" else "inner(theirs)")
    registry.revert(outer if first == "inner" else inner)
    assert module.answer() == "theirs"


def test_unsupported_version_names_the_way_out(library: str) -> None:
    registry = PatchRegistry()
    with pytest.raises(ConfigError, match=r"somelib 2\.5 is not supported here") as caught:
        registry.apply_on_import(patch(versions=">=3,<4", fallback="it works without"))
    assert "pip install 'somelib>=3,<4'" in str(caught.value.fix)
    assert "it works without" in str(caught.value.fix)
    with pytest.raises(MissingExtraError, match="no_such_library is not installed"):
        registry.apply_on_import(patch(library="no_such_library"))
    assert (registry.waiting, registry.applied) == ((), ())

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import trl.trainer.sft_trainer as sft
from torch import nn

from pantheraml.base.errors import ConfigError
from pantheraml.hooks import trl
from pantheraml.hooks.replacement import Replacement


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    trl.revert()
    yield
    trl.revert()


def replacement(**changes: str) -> Replacement:
    fields = {"library": "trl", "versions": ">=1", "module": "trl.trainer.sft_trainer", "name": "pad", "otherwise": "-"}
    return Replacement(**{**fields, **changes}, make=lambda original: lambda *args: ("ours", original))  # type: ignore[arg-type]


def test_applied_once_and_reverted() -> None:
    original, subject = sft.pad, replacement()
    assert subject.apply()
    once = sft.pad
    assert once() == ("ours", original)
    assert subject.apply()
    assert sft.pad is once
    subject.revert()
    assert sft.pad is original
    subject.revert()
    assert sft.pad is original


def test_an_unknown_version_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    original = sft.pad
    with caplog.at_level("INFO", logger="pantheraml"):
        assert not replacement(versions="<1", otherwise="it is slower").apply()
    assert sft.pad is original
    assert "it is slower" in caplog.text


def test_a_missing_library_is_no_error() -> None:
    assert not replacement(library="no_such_library").apply()


def test_someone_else_was_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None: ...

    theirs.__module__ = "another.library"
    monkeypatch.setattr(sft, "pad", theirs)
    with pytest.raises(ConfigError, match="by another"):
        replacement().apply()
    assert sft.pad is theirs


def test_someone_else_came_after_us() -> None:
    original, subject = sft.pad, replacement()
    subject.apply()
    sft.pad = types.FunctionType(original.__code__, original.__globals__)
    try:
        with pytest.raises(ConfigError, match="already replaced"):
            subject.apply()
    finally:
        sft.pad = original


def test_trl_gives_its_head_to_models_that_are_not_ours() -> None:
    assert trl.SFT_HEAD.apply()

    class Config:
        def get_text_config(self) -> Config:
            return self

    model = nn.Linear(1, 1)
    model.config = Config()  # type: ignore[assignment]
    sft.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    assert "forward" in vars(model)

from __future__ import annotations

import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import trl.trainer.sft_trainer as sft
from torch import nn

from pantheraml.base.errors import ConfigError
from pantheraml.hooks import trl
from pantheraml.hooks.library_patch import LibraryPatch


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    trl.revert()
    yield
    trl.revert()


def make_patch(**changes: str) -> LibraryPatch:
    fields = {"library": "trl", "versions": ">=1", "module": "trl.trainer.sft_trainer", "name": "pad", "fallback": "-"}
    return LibraryPatch(**{**fields, **changes}, make=lambda original: lambda *args: ("ours", original))  # type: ignore[arg-type]


@pytest.mark.seed("C7")
def test_applied_once_and_reverted() -> None:
    original, subject = sft.pad, make_patch()
    assert subject.apply()
    once = sft.pad
    assert once() == ("ours", original)
    assert subject.apply()
    assert sft.pad is once
    subject.revert()
    assert sft.pad is original
    subject.revert()
    assert sft.pad is original


@pytest.mark.seed("C19")
def test_an_unknown_version_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    original = sft.pad
    with caplog.at_level("INFO", logger="pantheraml"):
        assert not make_patch(versions="<1", fallback="it is slower").apply()
    assert sft.pad is original
    assert "it is slower" in caplog.text


def test_a_patch_that_other_versions_do_not_need_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pantheraml"):
        assert not make_patch(versions="<1", fallback="").apply()
    assert not caplog.records


def test_a_missing_library_is_no_error() -> None:
    assert not make_patch(library="no_such_library").apply()


def test_patched_before_us_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None: ...

    theirs.__module__ = "another.library"
    monkeypatch.setattr(sft, "pad", theirs)
    with pytest.raises(ConfigError, match="by another"):
        make_patch().apply()
    assert sft.pad is theirs


def test_optional_patch_is_skipped_if_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def theirs(self: object, examples: object) -> None: ...

    theirs.__module__ = "another.library"
    monkeypatch.setattr(sft.DataCollatorForLanguageModeling, "torch_call", theirs)
    with caplog.at_level("INFO", logger="pantheraml"):
        assert not trl.COLLATOR.apply()
    assert sft.DataCollatorForLanguageModeling.torch_call is theirs
    assert "sft_trainer.DataCollatorForLanguageModeling.torch_call was already patched by another" in caplog.text


def test_patched_after_us_raises() -> None:
    original, subject = sft.pad, make_patch()
    subject.apply()
    sft.pad = types.FunctionType(original.__code__, original.__globals__)
    try:
        with pytest.raises(ConfigError, match="already patched"):
            subject.apply()
    finally:
        sft.pad = original


def test_trl_patches_other_models() -> None:
    assert trl.SFT_HEAD.apply()

    class Config:
        def get_text_config(self) -> Config:
            return self

    model = nn.Linear(1, 1)
    model.config = Config()  # type: ignore[assignment]
    sft.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    assert "forward" in vars(model)


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_collator_gives_the_same_tensors(padding_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [[5, 6, 7], [8, 9], [1]]
    plain = [{"input_ids": row, "labels": [-100, *row[1:]], "seq_lengths": [len(row)]} for row in ids]
    without_labels = [{"input_ids": row, "seq_lengths": [len(row)]} for row in ids]
    arrays = [{"input_ids": np.array(row), "seq_lengths": [len(row)]} for row in ids]
    collator = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)
    expected = [collator(examples) for examples in (plain, without_labels, arrays)]
    assert trl.COLLATOR.apply()
    seen = set()
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values: seen.add(type(values)) or make(values))
    collator([{"input_ids": row} for row in ids])
    assert padding_free or seen == {np.ndarray}
    actual = [collator(examples) for examples in (plain, without_labels, arrays)]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, theirs_value in theirs.items():
            torch.testing.assert_close(ours[name], theirs_value, rtol=0, atol=0)
    assert plain[0]["input_ids"] == [5, 6, 7], "the dataset's examples are unchanged"

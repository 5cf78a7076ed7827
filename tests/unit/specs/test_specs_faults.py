"""Fault injection: the environment variable, and the key of earlier versions."""

from __future__ import annotations

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.specs.config_file import validate
from pantheraml.specs.faults import Fault, fail_at, planned_faults

REST = {"model": {"path": "m"}, "data": {"path": "d"}}


def test_fault_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    text = fail_at(1, 5, "bit_flip")
    assert text == "1:5:bit_flip"
    monkeypatch.setenv("PANTHERAML_FAULTS", f"{text},0:2:nan")
    assert planned_faults() == [Fault(rank=1, step=5, kind="bit_flip"), Fault(rank=0, step=2, kind="nan")]


@pytest.mark.parametrize("text", ["1", "1:0:kill", "1:5:melt", "1:5", "-1:5:kill", "1:5:kill ", "a:5:kill"])
def test_invalid_faults_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_FAULTS", text)
    with pytest.raises(ConfigError, match=r"PANTHERAML_FAULTS has .*no fault"):
        planned_faults()


def test_no_faults_without_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANTHERAML_FAULTS", raising=False)
    assert planned_faults() == []
    monkeypatch.setenv("PANTHERAML_FAULTS", "")
    assert planned_faults() == []


def test_faults_are_no_key_of_a_configuration() -> None:
    assert "faults" not in validate({**REST, "faults": []}).to_dict(), "as in run folders of earlier versions"
    with pytest.raises(ConfigError, match="tests set PANTHERAML_FAULTS"):
        validate({**REST, "faults": ["1:5:kill"]})

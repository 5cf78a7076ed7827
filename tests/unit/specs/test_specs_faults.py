"""Fault injection: parsing, and the switch that enables it."""

from __future__ import annotations

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.specs.config_file import validate
from pantheraml.specs.faults import Fault, check_allowed, fail_at

REST = {"model": {"path": "m"}, "data": {"path": "d"}}


def test_fault_round_trip() -> None:
    text = fail_at(1, 5, "bit_flip")
    assert text == "1:5:bit_flip"
    assert Fault.parse(text) == Fault(rank=1, step=5, kind="bit_flip")
    assert validate({**REST, "faults": [text]}).faults == [text]


@pytest.mark.parametrize("text", ["1:0:kill", "1:5:melt", "1:5", "-1:5:kill", "1:5:kill ", "a:5:kill"])
def test_invalid_faults_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="faults"):
        validate({**REST, "faults": [text]})


def test_faults_need_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANTHERAML_FAULTS", raising=False)
    check_allowed([])
    with pytest.raises(ConfigError, match="for tests of PantheraML itself"):
        check_allowed(["1:5:kill"])
    monkeypatch.setenv("PANTHERAML_FAULTS", "0")
    with pytest.raises(ConfigError):
        check_allowed(["1:5:kill"])
    monkeypatch.setenv("PANTHERAML_FAULTS", "1")
    check_allowed(["1:5:kill"])

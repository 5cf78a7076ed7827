"""The switch for several GPUs: its two names, the environment, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from pantheraml import FastLanguageModel
from pantheraml.api.loading_options import wants_multi_gpu
from pantheraml.base.errors import ConfigError, LaunchError
from pantheraml.multigpu import enable_multi_gpu, launch, launch_distributed_training


@pytest.mark.seed("C6", "S2-004", "S2-029", "S2-033", "S2-082")
@pytest.mark.parametrize(
    ("enable", "use", "variable", "on"),
    [
        (None, None, None, False),
        (None, None, "1", True),
        (True, None, None, True),
        (None, True, "0", True),
        (False, None, "1", False),
        (True, True, None, True),
    ],
)
def test_who_decides(
    monkeypatch: pytest.MonkeyPatch, enable: bool | None, use: bool | None, variable: str | None, on: bool
) -> None:
    monkeypatch.delenv("UNSLOTH_ENABLE_MULTIGPU", raising=False)
    monkeypatch.delenv("PANTHERAML_ENABLE_MULTIGPU", raising=False)
    if variable is not None:
        monkeypatch.setenv("UNSLOTH_ENABLE_MULTIGPU", variable)
    assert wants_multi_gpu(enable, use) is on


@pytest.mark.seed("C6", "S0-105")
def test_two_names_that_disagree() -> None:
    with pytest.raises(ConfigError, match="are aliases"):
        FastLanguageModel.from_pretrained("nowhere", enable_multi_gpu=True, use_multi_gpu=False)


def test_no_such_number() -> None:
    with pytest.raises(ConfigError, match="0 is not a valid number of processes"):
        enable_multi_gpu(0)


def test_a_rank_launches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    enable_multi_gpu(2)
    with pytest.raises(LaunchError, match="already a rank"):
        launch(print, nproc=2)


def test_a_rank_that_lost_its_place_does_not_start_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_RELAUNCHED", "1")
    with pytest.raises(LaunchError, match="missing from the environment"):
        enable_multi_gpu(2)


def test_what_is_no_function() -> None:
    for call in (lambda: launch(5, nproc=2), lambda: launch_distributed_training(world_size=2, train_func=None)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"(5|None) is not a function"):
            call()


def test_a_function_that_cannot_be_sent() -> None:
    with pytest.raises(LaunchError, match="cannot be sent to other processes"):
        launch(lambda: None, nproc=2)

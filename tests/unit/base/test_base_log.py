"""What reaches the terminal. In processes of their own: pytest configures logging in this one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pantheraml.base.env import child_environment

START = "import logging; from pantheraml.base import log; logger = log.get('pantheraml.part')\n"
MESSAGES = "logger.debug('steps'); logger.info('a choice'); logger.warning('a warning'); logger.error('an error')\n"


def stderr(code: str, **variables: str | None) -> str:
    environment = child_environment(**{"PANTHERAML_LOG": None, "RANK": None, **variables})
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


def logged(code: str, **variables: str | None) -> list[str]:
    return stderr(f"{code}\n{MESSAGES}", **variables).splitlines()


@pytest.mark.seed("S3-045", "S3-073")
def test_a_script_sees_choices_once() -> None:
    lines = ["pantheraml INFO: a choice", "pantheraml WARNING: a warning", "pantheraml ERROR: an error"]
    assert logged("log.start_for_scripts(); log.start_for_scripts()") == lines


@pytest.mark.parametrize(
    ("level", "count"), [("debug", 4), ("INFO", 3), ("warning", 2), ("error", 1), ("off", 0), ("", 3)]
)
def test_the_level_of_the_environment(level: str, count: int) -> None:
    assert len(logged("log.start_for_scripts()", PANTHERAML_LOG=level)) == count


def test_an_unknown_level_lists_the_known() -> None:
    assert "debug, info, warning, error, off" in stderr("log.start_for_scripts()", PANTHERAML_LOG="loud")


def test_control_characters_are_escaped() -> None:
    assert "\x1b" not in stderr("log.start_for_scripts(); logger.info('\\x1b[2J')")


WARNINGS = ["WARNING:pantheraml.part:a warning", "ERROR:pantheraml.part:an error"]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("logging.basicConfig()", WARNINGS),
        ("logging.basicConfig(level='INFO')", ["INFO:pantheraml.part:a choice", *WARNINGS]),
        ("logging.getLogger('pantheraml').setLevel('ERROR')", ["an error"]),
        ("logging.getLogger('pantheraml').addHandler(logging.NullHandler())", []),
    ],
)
def test_what_the_script_configured_is_kept(code: str, lines: list[str]) -> None:
    assert logged(f"{code}; log.start_for_scripts()") == lines


def test_the_environment_sets_the_level_of_another_handler_s_lines() -> None:
    """As of Unsloth, which configures logging when it is imported."""
    root = "logging.basicConfig(level='WARNING'); log.start_for_scripts()"
    assert logged(root, PANTHERAML_LOG="info") == ["INFO:pantheraml.part:a choice", *WARNINGS]
    assert logged(root, PANTHERAML_LOG="error") == WARNINGS[1:]
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}
    assert logged(root, PANTHERAML_LOG="info", **ranks) == WARNINGS[1:]


def test_what_the_script_configures_later_counts() -> None:
    lines = ["INFO:pantheraml.part:a choice", *WARNINGS]
    assert logged("log.start_for_scripts(); logging.basicConfig()") == lines, "once each"
    later = "log.start_for_scripts(); logging.getLogger('pantheraml').setLevel('ERROR')"
    assert logged(later) == ["pantheraml ERROR: an error"]


@pytest.mark.seed("S3-045")
def test_ranks_other_than_0_log_errors_only() -> None:
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert logged("log.start_for_scripts()", RANK="1", **ranks) == ["an error"]
    assert len(logged("log.start_for_scripts()", RANK="0", **{**ranks, "LOCAL_RANK": "0"})) == 3


def test_a_program_s_own_log_is_kept() -> None:
    lines = logged("log.start(debug=True); log.start_for_scripts()")
    assert len(lines) == 4
    assert "DEBUG pantheraml.part: steps" in lines[0]

"""Functions that a model has written: time limit, imports, and what they can reach."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from pantheraml import check_python_modules, create_locked_down_function, execute_with_time_limit
from pantheraml.base.errors import ConfigError, DataError


def test_time_limit_ends_a_loop_that_catches_errors() -> None:
    @execute_with_time_limit(0.2)
    def stubborn() -> None:
        for _ in range(2):
            try:
                while True:
                    pass
            except TimeoutError:
                continue
        while True:
            pass

    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"stubborn took more than 0\.2 seconds"):
        stubborn()
    assert time.monotonic() - started < 5
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(timer, abs=5)


def test_time_limit_returns_the_value_and_needs_the_main_thread() -> None:
    double = execute_with_time_limit(5)(lambda value: 2 * value)
    assert double(4) == 8
    errors: list[BaseException] = []

    def call() -> None:
        try:
            double(4)
        except ConfigError as err:
            errors.append(err)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(errors) == 1
    with pytest.raises(ConfigError):
        execute_with_time_limit(0)


@pytest.mark.parametrize(
    ("code", "ok", "key", "value"),
    [
        ("def f():\n import math\n from typing import Any", True, "stdlib", ["math", "typing"]),
        ("from numpy import matmul", False, "non_stdlib", ["numpy"]),
        ("import os.path, torch.nn", False, "non_stdlib", ["torch"]),
        ("from . import x", False, "relative_imports", 1),
    ],
)
def test_modules(code: str, ok: bool, key: str, value: Any) -> None:
    found, info = check_python_modules(code)
    assert (found, info[key]) == (ok, value)


def test_code_that_is_not_python() -> None:
    ok, info = check_python_modules("def a")
    assert not ok
    assert "error" in info
    with pytest.raises(DataError):
        create_locked_down_function("def a")


def test_locked_down_function() -> None:
    add = create_locked_down_function("def add(a, b=1):\n    import math\n    return math.floor(a) + max(b, 0)")
    assert add(2.5) == 3
    reach = {
        "def f(): return pytest": NameError, "def f(): return open('/dev/null')": NameError,
        "def f():\n import os\n return os": ImportError, "def f(): import torch": ImportError,
        "def f(): return eval('1')": NameError,
    }  # fmt: skip
    for code, error in reach.items():
        with pytest.raises(error):
            create_locked_down_function(code)()


@pytest.mark.parametrize(
    "code", ["x = 1", "def f(): pass\nprint('ran')", "def f(): pass\ndef g(): pass", "@list\ndef f(): pass",
             "def f(a=print('ran')): pass"],
)  # fmt: skip
def test_nothing_runs_before_the_call(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError):
        create_locked_down_function(code)
    assert capsys.readouterr().out == ""

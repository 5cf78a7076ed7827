"""Run functions that a model has written, for rewards in RL: checked imports, few builtins, a time limit.

These keep mistakes of a model from stopping a run. They are no security boundary: code that means to can escape
Python's namespaces, so run untrusted code in a container.
"""

from __future__ import annotations

import ast
import builtins
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from pantheraml.base.errors import ConfigError, DataError

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

_REPEAT_SECONDS = 0.1
"""After the limit, the error is raised again at this interval: generated code may catch it."""
_REFUSED_BUILTINS = frozenset({
    "open", "input", "exec", "eval", "compile", "breakpoint", "exit", "quit", "help", "globals", "vars", "memoryview",
})  # fmt: skip
_REFUSED_MODULES = frozenset({
    "os", "sys", "io", "subprocess", "shutil", "socket", "ctypes", "importlib", "builtins", "pathlib", "threading",
    "multiprocessing", "signal", "pickle", "tempfile", "asyncio", "http", "urllib", "ftplib", "smtplib", "gc",
    "webbrowser", "inspect", "code", "runpy", "site", "posix", "pty", "fcntl", "resource", "mmap", "glob", "dbm",
    "shelve", "sqlite3",
})  # fmt: skip


def execute_with_time_limit(
    seconds: float,
) -> Callable[[Callable[Arguments, Value]], Callable[Arguments, Value]]:
    """Decorate a function: TimeoutError once it has run for `seconds`.

    Python code is interrupted, a call into compiled code only when it returns. Works in the main thread, on POSIX.
    """
    if seconds <= 0:
        raise ConfigError(f"execute_with_time_limit got {seconds:g} seconds.", fix="Use a positive number.")

    def decorate(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
        @functools.wraps(function)
        def limited(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
            with _time_limit(seconds, function.__name__):
                return function(*args, **kwargs)

        return limited

    return decorate


@contextmanager
def _time_limit(seconds: float, name: str) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "execute_with_time_limit uses a signal, which needs the main thread of a POSIX process.",
            fix="Call the function from the main thread.",
        )

    def expire(*_: Any) -> None:
        raise TimeoutError(f"{name} took more than {seconds:g} seconds.")

    handler = signal.signal(signal.SIGALRM, expire)
    started = time.monotonic()
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer:  # a timer of the caller, which kept running
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - started), 1e-3), interval)


def check_python_modules(code: str) -> tuple[bool, dict[str, Any]]:
    """Return whether the code imports nothing outside the standard library, and what it imports.

    The second value has `stdlib` and `non_stdlib` (names) and `relative_imports` (a count); code that cannot be parsed
    gives False and {"error": ...}.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        return False, {"error": f"{type(err).__name__}: {err}"}
    imported, relative = set[str](), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            relative += 1
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    others = sorted(imported - sys.stdlib_module_names)
    known = sorted(imported & sys.stdlib_module_names)
    return not others and not relative, {"stdlib": known, "non_stdlib": others, "relative_imports": relative}


def create_locked_down_function(code: str) -> Callable[..., Any]:
    """Return the only function that `code` defines, without access to this process's variables.

    It has builtins apart from those that read files or run code, and standard modules apart from those that reach the
    system. DataError if the code does not define exactly one function, by itself.
    """
    try:
        tree = ast.parse(code)
        compiled: CodeType = compile(tree, "<generated>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise DataError(
            f"The generated code is not Python: {err}",
            fix="Catch this error in the reward function, and score such code as wrong.",
        ) from err
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1 or len(tree.body) != 1 or functions[0].decorator_list:
        raise DataError(
            "The generated code must be one function and nothing else.",
            fix="Pass the source of a single undecorated def, without imports or statements around it.",
        )
    defaults = [*functions[0].args.defaults, *filter(None, functions[0].args.kw_defaults)]
    if not all(isinstance(value, ast.Constant | ast.UnaryOp) for value in defaults):
        raise DataError(
            "The default values of the generated function must be constants.",
            fix="Use numbers, strings, True, False or None as default values.",
        )
    allowed = {name: value for name, value in vars(builtins).items() if name not in _REFUSED_BUILTINS}
    scope: dict[str, Any] = {"__builtins__": {**allowed, "__import__": _import_standard}, "__name__": "generated"}
    exec(compiled, scope)  # defines the function, and runs nothing else
    function: Callable[..., Any] = scope[functions[0].name]
    return function


def _import_standard(name: str, *arguments: Any, **options: Any) -> Any:
    root = name.partition(".")[0]
    if root in _REFUSED_MODULES or root not in sys.stdlib_module_names:
        raise ImportError(f"generated code may not import {name}")
    return __import__(name, *arguments, **options)

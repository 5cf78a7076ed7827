from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pantheraml.base.errors as errors


def classes() -> dict[str, type[errors.PantheraError]]:
    """Those of the module: other parts, if they were imported, add some of their own with the same codes."""
    return {name: cls for name, cls in errors.error_classes().items() if cls.__module__ == errors.__name__}


def test_exit_codes_are_unique() -> None:
    codes = [cls.exit_code for cls in classes().values()]
    assert len(codes) == len(set(codes))
    assert 0 not in codes
    assert all(code < 256 for code in codes)


def test_docstring_tree_matches_classes() -> None:
    for name, cls in classes().items():
        lines = [line for line in (errors.__doc__ or "").splitlines() if f" {name} " in f"{line} "]
        assert len(lines) == 1, name
        assert f" {cls.exit_code} " in lines[0], name


def test_message_has_what_where_and_fix() -> None:
    text = str(errors.DataError("The file is empty.", where="a.jsonl", fix="Give another one."))
    assert text == "The file is empty.\n  where: a.jsonl\n  fix: Give another one."


def raised(source: str) -> Iterator[tuple[ast.Call, str]]:
    """Every error of ours that `source` creates to raise it, and its text."""
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in classes():
            yield call, ast.unparse(call)


def test_every_error_says_how_to_fix_it() -> None:
    """Apart from flags out of their range, whose message is the fix, and from a stop that the user asked for."""
    package = Path(errors.__file__).parents[1]
    missing = [
        f"{path.relative_to(package)}:{call.lineno}: {text}"
        for path in sorted(package.rglob("*.py"))
        if "service" not in path.parts
        for call, text in raised(path.read_text())
        if not {"fix", None} & {keyword.arg for keyword in call.keywords}
        and " must be " not in text
        and not text.startswith("InterruptedRunError")
    ]
    assert missing == []


def test_docs_list_every_exit_code() -> None:
    page = (Path(__file__).parents[3] / "docs/faults.md").read_text()
    listed = [int(code) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in row.split(",")]
    assert sorted(listed) == sorted([0, *(cls.exit_code for cls in classes().values())])

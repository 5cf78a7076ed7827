from __future__ import annotations

import re
from pathlib import Path

import pantheraml.base.errors as errors


def test_every_class_has_its_own_exit_code() -> None:
    codes = [cls.exit_code for cls in errors.error_classes().values()]
    assert len(codes) == len(set(codes))
    assert 0 not in codes
    assert all(code < 256 for code in codes)


def test_the_tree_at_the_top_of_the_file_is_the_tree() -> None:
    for name, cls in errors.error_classes().items():
        lines = [line for line in (errors.__doc__ or "").splitlines() if f" {name} " in f"{line} "]
        assert len(lines) == 1, name
        assert f" {cls.exit_code} " in lines[0], name


def test_text_says_what_where_and_what_to_do() -> None:
    text = str(errors.DataError("The file is empty.", where="a.jsonl", todo="Give another one."))
    assert text == "The file is empty.\n  where: a.jsonl\n  to do: Give another one."


def test_the_page_lists_every_exit_code() -> None:
    page = (Path(__file__).parents[3] / "docs/faults.md").read_text()
    listed = [int(code) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in row.split(",")]
    assert sorted(listed) == sorted([0, *(cls.exit_code for cls in errors.error_classes().values())])

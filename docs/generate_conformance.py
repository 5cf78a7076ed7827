"""Write docs/conformance.md from docs/promises.txt and the `seed` markers of the tests.

A promise is done if a test is marked with it: `@pytest.mark.seed("S0-001", "S1-008")`, and partly if the marker says
`partly="what is missing"`. Nobody writes a state by hand. tests/conftest.py fails a marked test that is skipped in
`make test`, so that green tests mean that what the page says was run; those of tests/gpu run on a GPU host.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMISES = ROOT / "docs/promises.txt"
PAGE = ROOT / "docs/conformance.md"
SHOWN = 2
"""Tests that a row names; `grep` finds the others by the item."""
STATES = {
    "done": "a test shows it, and runs without a GPU",
    "done on a GPU": "a test shows it that needs a GPU (`make gpu-test`)",
    "partly": "a test shows a part; the row says what is missing",
    "not yet": "no test shows it",
    "refused": "rejected by design; the row says why",
}
HEAD = """# Conformance

Made by `python docs/generate_conformance.py` from `docs/promises.txt` and the markers of tests; do not edit.

Five documents specify PantheraML: multi-GPU support for a training library (S0), a framework for numerical stability
(S1), multi-GPU training through a variable or an argument (S2), a package of hooks (S3) and a service (S4). They make
600 promises, disagree on 28 points (C), and contain 58 code blocks (S1:92 is the block at line 92 of S1). Names are
those of the documents, in the single package `pantheraml`; file names in the documents stand for what the files do.

**Nothing here has ever run on several GPUs.** Several ranks are tested on CPUs, and one GPU on its own.
"""


@dataclass
class Promise:
    item: str
    text: str
    refused: str | None
    tests: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        if self.refused is not None:
            return "refused"
        if not self.tests:
            return "not yet"
        if self.missing:
            return "partly"
        return "done" if any(not test.startswith("tests/gpu/") for test in self.tests) else "done on a GPU"


@dataclass(frozen=True)
class Mark:
    items: tuple[str, ...]
    test: str
    partly: str | None


def read_promises() -> dict[str, list[Promise]]:
    """Return the promises by heading."""
    sections: dict[str, list[Promise]] = {}
    heading = ""
    for line in PROMISES.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
            sections[heading] = []
        elif heading and line:
            item, text, *rest = line.split(" | ")
            refused = rest[0].removeprefix("refused: ") if rest else None
            if len(rest) > 1 or (rest and refused == rest[0]):
                raise ValueError(f"promises.txt: {line!r} is not `item | promise | refused: reason`")
            sections[heading].append(Promise(item, text, refused))
    return sections


def read_marks() -> list[Mark]:
    """Return the `seed` markers of all tests, without importing them."""
    marks = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.seed" in source:
            tree = ast.parse(source)
            found = list(_marks_of(path.relative_to(ROOT).as_posix(), tree))
            if len(found) != sum(_is_marker(node) for node in ast.walk(tree)):
                raise ValueError(f"{path}: write seed markers as decorators of test functions, with literal items")
            marks += found
    return marks


def _is_marker(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.seed"


def _marks_of(path: str, tree: ast.Module) -> Iterator[Mark]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and _is_marker(decorator.func):
                named = {word.arg: ast.literal_eval(word.value) for word in decorator.keywords}
                items: list[str] = []
                for argument in decorator.args:
                    starred = isinstance(argument, ast.Starred)
                    value = ast.literal_eval(argument.value if isinstance(argument, ast.Starred) else argument)
                    items += value if starred else [value]
                yield Mark(tuple(items), f"{path}::{node.name}", named.pop("partly", None))


def load() -> dict[str, list[Promise]]:
    """Return the promises with their tests; ValueError for markers that name no promise, or contradict each other."""
    sections = read_promises()
    known = {promise.item: promise for promises in sections.values() for promise in promises}
    whole: set[str] = set()
    for mark in read_marks():
        for item in mark.items:
            if item not in known:
                raise ValueError(f"{mark.test}: {item} is not in docs/promises.txt")
            promise = known[item]
            if promise.refused is not None:
                raise ValueError(f"{mark.test}: {item} is refused in docs/promises.txt")
            if mark.test not in promise.tests:
                promise.tests.append(mark.test)
            if mark.partly is None:
                whole.add(item)
            elif mark.partly not in promise.missing:
                promise.missing.append(mark.partly)
    for item in whole:
        if known[item].missing:
            raise ValueError(f"{item} is marked as done by one test and as partly by another: {known[item].tests}")
    return sections


def corrections() -> dict[str, str]:
    """Return what is changed in code blocks, beyond their imports."""
    spec = importlib.util.spec_from_file_location("seed_blocks", ROOT / "tests/seed_blocks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {block: "; ".join(reason for _, _, reason in edits) for block, edits in module.EDITS.items()}


def render() -> str:
    sections, changed = load(), corrections()
    counted = Counter(promise.state for promises in sections.values() for promise in promises)
    lines = [HEAD, "| state | rows | meaning |", "|---|---|---|"]
    lines += [f"| {state} | {counted[state]} | {meaning} |" for state, meaning in STATES.items()]
    for heading, promises in sections.items():
        lines += ["", f"## {heading}", "", "| item | promise | state | tests |", "|---|---|---|---|"]
        lines += [_row(promise, changed.get(promise.item)) for promise in promises]
    return "\n".join(lines) + "\n"


def _row(promise: Promise, changed: str | None) -> str:
    state = promise.state
    if state == "partly":
        state += ": " + "; ".join(promise.missing)
    elif state == "refused":
        state += f": {promise.refused}"
    if changed and promise.tests:
        state += f" (changed in it: {changed})"
    shown = [f"`{test.rpartition('/')[2].replace('.py', '')}`" for test in promise.tests[:SHOWN]]
    if len(promise.tests) > SHOWN:
        shown.append(f"{len(promise.tests) - SHOWN} more")
    return f"| {promise.item} | {promise.text} | {state} | {', '.join(shown) or '–'} |"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

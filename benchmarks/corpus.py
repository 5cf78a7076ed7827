"""Real text that is available on every host: docstrings and source code of Python and its packages.

Two domains without overlap: prose (docstrings of installed packages) to pretrain a small model, and code (source of the
standard library) to fine-tune it. The order of files depends only on their names, so the same installation gives the
same bytes; size and hash tell whether two results used the same text.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROSE_PACKAGES = ("torch", "transformers", "numpy", "peft")
NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
SHORTEST_DOCSTRING = 200
"""Minimum length in characters; shorter ones mostly repeat a name."""
PIECE = 1500
"""Approximate length of a document in characters: source files are split at line ends, so that none is truncated."""
HELD_OUT = 20
"""One document in this many is held out for evaluation."""


@dataclass(frozen=True)
class Domain:
    """Written files, and size and hash of their content."""

    train: Path
    evaluation: Path
    bytes: int
    sha256: str


def write_prose(folder: Path, limit_bytes: int) -> Domain:
    return _write(folder, "prose", docstrings(_package_files()), limit_bytes)


def write_code(folder: Path, limit_bytes: int) -> Domain:
    return _write(folder, "code", _pieces(library_files()), limit_bytes)


def texts(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def _write(folder: Path, name: str, documents: Iterable[str], limit_bytes: int) -> Domain:
    return write_rows(folder, name, ({"text": document} for document in documents), limit_bytes)


def write_rows(folder: Path, name: str, rows: Iterable[dict[str, str]], limit_bytes: int) -> Domain:
    """Write each distinct row once, since packages contain duplicates."""
    domain, seen, size = hashlib.sha256(), set(), 0
    train, evaluation = folder / f"{name}-train.jsonl", folder / f"{name}-eval.jsonl"
    with open(train, "w", encoding="utf-8") as training, open(evaluation, "w", encoding="utf-8") as held_out:
        for row in rows:
            data = "\n\n".join(row.values()).encode()
            digest = hashlib.sha256(data).digest()
            if digest in seen:
                continue
            seen.add(digest)
            target = held_out if int.from_bytes(digest[:4]) % HELD_OUT == 0 else training
            target.write(json.dumps(row) + "\n")
            domain.update(data)
            size += len(data)
            if size >= limit_bytes:
                break
    return Domain(train, evaluation, size, domain.hexdigest())


def _package_files() -> list[Path]:
    roots = []
    for name in PROSE_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"the corpus needs the package {name}, which is not installed")
        roots.append(Path(spec.origin).parent)
    return _shuffled((path, path.relative_to(root.parent)) for root in roots for path in root.rglob("*.py"))


def library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = ((path, path.relative_to(root)) for path in root.rglob("*.py"))
    return _shuffled((path, name) for path, name in files if not NOT_CODE & set(name.parts))


def _shuffled(files: Iterable[tuple[Path, Path]]) -> list[Path]:
    """Shuffle deterministically, independent of where packages are installed."""
    return [path for path, _ in sorted(files, key=lambda each: hashlib.sha256(each[1].as_posix().encode()).digest())]


def docstrings(files: Iterable[Path]) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in files:
        source = path.read_text(encoding="utf-8", errors="ignore")
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in third-party code
            try:
                tree = ast.parse(source)
            except SyntaxError:  # templates, and files for other Python versions
                continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text is not None and len(text) >= SHORTEST_DOCSTRING:
                yield text


def _pieces(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        piece = ""
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True):
            piece += line
            if len(piece) >= PIECE:
                yield piece
                piece = ""
        if piece.strip():
            yield piece

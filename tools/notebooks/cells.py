"""Notebook files: which are distinct, and the Python in their cells.

Shell commands and magics are removed; cells of another language (`%%bash`, `%%file`, `%%writefile`) and
cells that install packages without output (`%%capture`) are dropped.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

COPY_PREFIXES = ("AMD-", "Kaggle-", "HuggingFace Course-")
_OTHER_LANGUAGE = re.compile(r"^%%(bash|sh|script|file|writefile|html|javascript)\b", re.MULTILINE)
_INSTALL = re.compile(r"^%%capture\b[\s\S]*\bpip install\b", re.MULTILINE)
"""A cell that chooses packages and installs them, without output."""
_SHELL = re.compile(r"^(?P<indent>\s*)(?:[!%].*|(?P<target>[\w, ]+?)\s*=\s*[!%].*)$")


@dataclass(frozen=True)
class Notebook:
    name: str
    cells: tuple[str, ...]
    """The code cells as written."""
    copies: int = 1
    """Files with this name (apart from the prefix), or with the same code."""

    @property
    def code(self) -> str:
        return "\n".join(self.cells)


def distinct_notebooks(folder: Path) -> list[Notebook]:
    """Return one notebook for each name without its prefix, and one for each code; sorted by name."""
    by_name: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.ipynb")):
        name = path.stem
        for prefix in COPY_PREFIXES:
            name = name.removeprefix(prefix)
        by_name.setdefault(name, []).append(path)
    by_code: dict[str, Notebook] = {}
    for name, paths in sorted(by_name.items()):
        original = min(paths, key=lambda path: (path.stem != name, path.stem))
        cells = read_cells(original)
        same = by_code.get(_fingerprint(cells))
        kept = name if same is None else same.name
        copies = len(paths) + (0 if same is None else same.copies)
        by_code[_fingerprint(cells)] = Notebook(kept, cells, copies)
    return sorted(by_code.values(), key=lambda notebook: notebook.name.lower())


def read_cells(path: Path) -> tuple[str, ...]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return tuple("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")


def python_of(cell: str) -> str:
    """Return the Python of a cell: without magics and shell commands, which become `pass`."""
    if _OTHER_LANGUAGE.search(cell) or _INSTALL.search(cell):
        return ""
    lines: list[str] = []
    continued = False
    for line in cell.splitlines():
        if continued:  # of a shell command
            continued = line.rstrip().endswith("\\")
            continue
        match = _SHELL.match(line)
        if match and not _is_python(cell, line):
            continued = line.rstrip().endswith("\\")
            value = f"{match['target'].strip()} = []" if match["target"] else "pass"
            lines.append(f"{match['indent']}{value}")
        else:
            lines.append(line)
    return "\n".join(lines)


def _is_python(cell: str, line: str) -> bool:
    """Whether a line that starts like a magic continues an expression: `a \\` and then `% b`, or text in quotes."""
    stripped = line.strip()
    if not stripped.startswith(("%", "!")):
        return True
    try:
        ast.parse(cell)
    except SyntaxError:
        return stripped.startswith("% ") or (stripped.startswith("!") and len(stripped) < 3)
    return True


def _fingerprint(cells: tuple[str, ...]) -> str:
    """Hash the code, apart from comments, white space and cells that install packages."""
    kept = [cell for cell in cells if not re.search(r"pip install|%%capture|\bapt\b", cell)]
    text = re.sub(r"\s+", "", "".join(re.sub(r"#.*", "", cell) for cell in kept))
    return hashlib.sha256(text.encode()).hexdigest()

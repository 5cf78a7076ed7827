"""Every name of the product documents is found by `grep` in docs/."""

from __future__ import annotations

import re
from pathlib import Path

from tests.seed_blocks import read_blocks

ROOT = Path(__file__).parents[2]
MADE_FROM_TESTS = "conformance.md"


def names_of_the_documents() -> set[str]:
    """Names in code of S0 to S3, in blocks and in promises, without the variables of the blocks."""
    blocks = "\n".join(code for block, code in read_blocks().items() if not block.startswith("S4"))
    promises = (ROOT / "docs/promises.txt").read_text(encoding="utf-8")
    quoted = " ".join(re.findall(r"`([^`]+)`", "\n".join(re.findall(r"(?m)^S[0-3]-.*$", promises))))
    variables = set(re.findall(r"(?m)(?:^|for) *(\w+) (?:=|in) ", blocks))
    return set(re.findall(r"[A-Za-z_]\w{3,}", f"{blocks} {quoted}")) - variables


def is_ours(name: str, source: str) -> bool:
    """Whether the package has a class, function, field or key of this name; plain words are not names."""
    is_a_name = "_" in name or re.search("[a-z][A-Z]", name) is not None
    defined = rf'(?m)(\b(def|class) {name}\b|^\s+{name}:|^{name} = |"{name}"[:,\]])'
    return is_a_name and re.search(defined, source) is not None


def test_every_name_of_the_documents_is_in_docs() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    docs = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md") if path.name != MADE_FROM_TESTS
    )
    ours = {name for name in names_of_the_documents() if is_ours(name, source)}
    assert {"PerformanceOptimizer", "system_percent", "PantheraMLDistributedTrainer", "max_memory"} <= ours
    assert sorted(name for name in ours if not re.search(rf"\b{name}\b", docs)) == []

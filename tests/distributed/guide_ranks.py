"""Rank script of test_inference: `guide_ranks FOLDER HEADING` runs the block below that heading of the guide there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs/Multi-GPU-Guide.md"


def main() -> None:
    folder, heading = sys.argv[1:]
    os.chdir(folder)
    (code,) = re.findall(rf"(?s)^## {heading}\n(?:(?!^## ).)*?```python\n(.*?)```", GUIDE.read_text(), re.MULTILINE)
    exec(compile(code, GUIDE.name, "exec"), {})


if __name__ == "__main__":
    main()

"""Is everything installed that the examples need, and does this host train? Run it first.

python examples/verify_installation.py

The second half is `pantheraml doctor`, which also prints JSON (`--json`). The exit code is 0 if nothing failed.
"""

from __future__ import annotations

import sys

from pantheraml.base.errors import PantheraError
from pantheraml.cli.main import main as pantheraml_command

NAMES = ("FastLanguageModel", "PantheraMLDistributedTrainer", "MultiGPUTrainer", "enable_multi_gpu", "unsloth_train")


def missing_names() -> list[str]:
    """Import what scripts import from the package; return what does not work, and why."""
    import pantheraml

    problems = []
    for name in NAMES:
        try:
            getattr(pantheraml, name)
        except (ImportError, PantheraError) as err:
            problems.append(f"pantheraml.{name}: {err}")
    return problems


def main() -> int:
    problems = missing_names()
    for problem in problems:
        print(problem)
    if not problems:
        print(f"All names can be imported: {', '.join(NAMES)}")
    return pantheraml_command(["doctor"]) or int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""Regular expressions in an adapter's config, which may come from someone else, must not run without an end.

PEFT matches them against the names of the model's modules. A few characters suffice for a match that takes years, and
nothing can interrupt it. So they are tried before, in a process that can be killed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peft import LoraConfig

from pantheraml.base.errors import ModelError

SECONDS = 20.0
"""For all patterns with all names. Unsloth's take milliseconds."""
FEW = 64
"""Names and other patterns without repetition are only tried if there are more of them."""
_PLAIN = re.compile(r"[\w.^$-]*")
_TRY = r"""
import json, re, sys
given = json.load(sys.stdin)
for name in given["names"]:
    for pattern in given["patterns"]:
        try:
            re.fullmatch(pattern, name)
            re.match(rf"(.*\.)?({pattern})$", name)
        except (re.error, RecursionError, OverflowError):
            pass
"""


def require_bounded(config: LoraConfig, names: Sequence[str], folder: Path) -> None:
    """ModelError if PEFT could not match the config's patterns with these names of modules in reasonable time."""
    whole = {"modules_to_save": config.modules_to_save, "layers_pattern": config.layers_pattern}
    for key, given in whole.items():  # matched with names that only exist later
        for each in [given] if isinstance(given, str) else given or ():
            if not _PLAIN.fullmatch(each):
                raise ModelError(
                    f"{key} of the adapter has a regular expression: {each[:200]!r}.",
                    where=str(folder),
                    fix="Write the names of the modules in its adapter_config.json.",
                )
    patterns = [each for each in (config.target_modules, config.exclude_modules) if isinstance(each, str)]
    patterns += [*(config.rank_pattern or {}), *(config.alpha_pattern or {})]
    if len(patterns) <= FEW and all(_PLAIN.fullmatch(each) for each in patterns):
        return
    asked = json.dumps({"patterns": patterns, "names": list(names)})
    try:
        command = [sys.executable, "-I", "-S", "-c", _TRY]
        subprocess.run(command, input=asked, text=True, timeout=SECONDS, check=True, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as err:
        raise ModelError(
            f"The patterns in the config of the adapter take longer than {SECONDS:.0f} s to match: target_modules,"
            " exclude_modules, rank_pattern or alpha_pattern.",
            where=str(folder),
            fix="Write names of modules in place of regular expressions.",
        ) from err

"""Code blocks of the product documents, to be run as they stand: only import lines may change, and what EDITS lists.

The blocks are in seed_blocks.txt, verbatim. docs/generate_conformance.py prints the reasons of EDITS on the page.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

BLOCKS = Path(__file__).with_suffix(".txt")

MODULES = {
    "performance_optimization": "pantheraml.performance",
    "onyx.server.features.ads.multi_gpu_training": "pantheraml.multigpu",
    "onyx.server.features.ads.multi_gpu_api": "pantheraml.service",
    "onyx.server.features.ads.optimized_finetuning": "pantheraml.service",
    "unsloth_multigpu_prototype": "pantheraml",
    "unsloth_multigpu_prototype.core": "pantheraml",
    "unsloth_multigpu_prototype.utils": "pantheraml",
    "unsloth": "pantheraml",
    "unsloth.models._utils": "pantheraml",
}
"""Packages of the documents, and where their names are."""

NO_BODIES = "signatures get bodies"
FILLED_IN = "`...` is filled in"
WITH_ADAPTERS = "`...` is filled in, with adapters, since 4-bit weights are frozen"
NOT_NEEDED = "Unsloth, torchvision, torchaudio and CUDA 11.8 are not needed"
SHORT = "a short run"
EDITS: dict[str, list[tuple[str, str, str]]] = {
    "S0:121": [(r"SFTConfig\(\.\.\.\),", "SFTConfig(**settings), peft_config=adapter,", WITH_ADAPTERS)],
    "S0:185": [
        (r"PantheraMLTrainer\(\.\.\.\)", "PantheraMLTrainer(**arguments)", FILLED_IN),
        (r"PantheraMLDistributedTrainer\(\.\.\.\)", "PantheraMLDistributedTrainer(**arguments)", FILLED_IN),
    ],
    "S0:199": [(r"# \.\.\. existing parameters", "**arguments", FILLED_IN)],
    "S1:61": [(r"(?m)(def .*)$", r"\1: ...", NO_BODIES)],
    "S1:77": [(r"(?m)(def (?!__init__).*)$", r"\1: ...", NO_BODIES)],
    "S1:129": [("rank=0,", "rank=rank,", "each rank gives its own rank")],
    "S1:206": [(r"(?m)(def .*)$", r"\1: ...", NO_BODIES)],
    "S1:218": [(r"# \.\.\. forward pass, loss calculation \.\.\.", "loss = model(batch).square().mean()", FILLED_IN)],
    "S2:29": [(r"\)\n\)", ")", "a closing parenthesis too many")],
    "S2:46": [("max_steps=60", "max_steps=2", SHORT)],
    "S2:100": [
        ("from trl import SFTConfig", "from trl import SFTConfig, SFTTrainer", "SFTTrainer was not imported"),
        ("max_steps=60", "max_steps=2", SHORT),
    ],
    "S2:214": [
        (r'(?s)torchrun --nproc_per_node=2 -c ".*?"\n', "pantheraml verify --nproc 2\n", "`torchrun` has no `-c`"),
    ],
    "S2:243": [(r"Trainer\(\.\.\.\)", "Trainer(**arguments)", FILLED_IN)],
    "S3:15": [
        (r'pip install "unsloth.*\n', "", NOT_NEEDED),
        (r" torchvision torchaudio --index-url \S+", "", NOT_NEEDED),
    ],
    "S3:45": [(r"# \.\.\. other training parameters", "**others", WITH_ADAPTERS)],
    "S3:74": [
        (
            r'(model, tokenizer = .*\("model_name"\))',
            r"\1\nmodel = FastLanguageModel.get_peft_model(model)",
            "the model gets adapters",
        ),
    ],
    "S4:89": [("rank=0,", "rank=rank,", "each rank gives its own rank")],
    "S4:206": [
        (r"(?m)^def train_function", "async def train_function", "`await` needs an `async def`"),
        (
            r"(?m)^    finetuning_service =",
            "    if rank > 0:\n        return None\n    finetuning_service =",
            "rank 0 asks the service, which starts its own processes",
        ),
        ("world_size=4", "world_size=2", "two ranks"),
    ],
    "S4:231": [("localhost:8000", "localhost:$PORT", "the port of the test")],
}
"""Edits of each block: pattern, replacement, reason."""


@cache
def read_blocks() -> dict[str, str]:
    found = re.findall(r"(?ms)^## (S\d:\d+)\n\n```\w+\n(.*?)^```$", BLOCKS.read_text(encoding="utf-8"))
    return dict(found)


def adapted(block: str) -> str:
    """Return a block with our imports and its edits."""
    lines = []
    for line in read_blocks()[block].splitlines():
        start = re.match(r"\s*(from|import) ([\w.]+)", line)
        if start and start[2] in MODULES:
            name = MODULES[start[2]]
            if start[1] == "import" and " as " not in line:  # `import unsloth` binds the name unsloth
                name += f" as {start[2]}"
            line = line.replace(f"{start[1]} {start[2]}", f"{start[1]} {name}", 1)
        lines.append(line)
    source = "\n".join(lines) + "\n"
    for pattern, replacement, reason in EDITS.get(block, []):
        source, count = re.subn(pattern, replacement, source)
        assert count, f"{block}: {reason}: nothing to change"
    return source


def run(block: str, *, names: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Run a block with `names` and `others` defined; return all names, in `names` if it is given."""
    names = {} if names is None else names
    names |= others
    exec(compile(adapted(block), block, "exec"), names)
    return names


async def run_async(
    block: str, *, source: str | None = None, names: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """Run a block, or the part `source` of it, that has `await` outside of functions, as a notebook does."""
    names = {} if names is None else names
    names |= others
    pending = eval(compile(source or adapted(block), block, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(pending):
        await pending
    return names


def run_code(source: str, block: str, **names: Any) -> dict[str, Any]:
    exec(compile(source, block, "exec"), names)
    return names

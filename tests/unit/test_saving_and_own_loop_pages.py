"""docs/saving.md and docs/own-loop.md: every Python block runs as it stands, on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheraml.base.env import child_environment
from pantheraml.hooks import peft as peft_hooks
from pantheraml.hooks import trl as trl_hooks
from tests import toy

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    pytest.param(page, code, id=f"{page}-{index}")
    for page in ("saving", "own-loop")
    for index, code in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL))
]


@pytest.fixture(autouse=True)
def _patches() -> Iterator[None]:
    yield
    trl_hooks.revert()
    peft_hooks.revert()


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_block_runs(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy.write_llama(tmp_path / "my-model", hidden_size=64)
    if "__main__" in code:  # it starts processes, which import it
        tmp_path.joinpath("script.py").write_text(code)
        subprocess.run(
            [sys.executable, "script.py"], env=child_environment(OMP_NUM_THREADS="1"), check=True, timeout=200
        )
        assert tmp_path.joinpath("checkpoint.pt").is_file()
        return
    exec(compile(code, page, "exec"), {})
    if page == "saving":
        written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert {"adapter_model.safetensors", "model.safetensors"} <= written
        assert any(name.endswith(".gguf") for name in written)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 6

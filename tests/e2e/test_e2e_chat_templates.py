"""docs/chat-templates.md, executed as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pantheraml.base.env import child_environment
from pantheraml.data.chat_templates.registry import KNOWN_NAMES
from tests import toy
from tests.e2e.conftest import COMMAND_SECONDS

PAGE = (Path(__file__).parents[2] / "docs/chat-templates.md").read_text()
SHOW = """
tokens = [token for token in trainer.train_dataset[0]["labels"] if token != -100]
print("trained on:", tokenizer.decode(tokens))
"""


@pytest.mark.extended
def test_the_page_runs(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "my-model", max_position_embeddings=1024)
    turns = [("human", "1+1="), ("gpt", "2"), ("human", "2+2="), ("gpt", "4")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    toy.write_jsonl(tmp_path / "my-conversations.jsonl", [row] * 8)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if not torch.cuda.is_available():  # TRL requires it
        code = code.replace("max_steps=2", "max_steps=2, use_cpu=True, bf16=False")
    done = subprocess.run(
        [sys.executable, "-c", code + SHOW],
        cwd=tmp_path,
        env=child_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained on: 2<eos>4<eos>" in done.stdout
    assert "turns end with the eos token <eos> instead" in done.stderr


def test_the_page_names_every_template() -> None:
    listed = PAGE.partition("\nNames: ")[2].partition("Case,")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == set(KNOWN_NAMES)

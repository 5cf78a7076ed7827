"""The tool that runs public notebooks: what counts as run, and that the page shows what was counted."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools.notebooks.execute import _classify
from tools.notebooks.rewrite import rewrite
from tools.notebooks.summary import END, START, page_section, summarize, with_section
from tools.notebooks.training_record import Training, problem_with, trains
from tools.notebooks.verdicts import OLD_REWARDS, OUTCOMES, Result, not_possible, reason_not_supported

import pantheraml
from pantheraml.base.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]
SUMMARY = json.loads((ROOT / "tools/notebooks/results.json").read_text())


def test_the_page_shows_the_results() -> None:
    page = (ROOT / "docs/migrating.md").read_text()
    assert f"{START}\n{page_section(SUMMARY)}\n{END}" in page


def test_most_notebooks_run() -> None:
    total = {outcome: sum(counts[outcome] for counts in SUMMARY["counts"].values()) for outcome in OUTCOMES}
    assert total["ok"] >= 110
    for outcome in ("error", "unsupported", "limit"):
        assert total[outcome] == sum(map(len, SUMMARY["reasons"][outcome].values()))
    assert SUMMARY["steps"] >= total["ok"]


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        (Training(2, (3.0, 2.9), (0.1, 0.2)), None),
        (Training(2, (3.0, 2.9), (0.0, 0.2)), None),
        (Training(0, (), ()), "0 steps"),
        (Training(2, (), (0.1,)), "logged 0 losses"),
        (Training(1, (float("nan"),), (0.1,)), "loss is not finite"),
        (Training(1, (1.0,), (float("inf"),)), "norm is not finite"),
        (Training(2, (1.0, 1.0), (0.0, 0.0)), "every gradient is zero"),
    ],
)
def test_a_training_counts_if_it_trained(training: Training, problem: str | None) -> None:
    found = problem_with([Training(1, (1.0,), (1.0,)), training])
    assert found is None if problem is None else found is not None and problem in found
    assert problem_with([]) == "no trainer trained, though the notebook calls train()"


def test_code_that_trains() -> None:
    assert trains("stats = trainer.train()")
    assert trains("import x\nx.unsloth_train(my_trainer)") is False
    assert trains("unsloth_train(my_trainer)")
    assert not trains("model.train()\nprint('trainer.train()')")


def test_only_an_error_that_says_so_is_not_supported() -> None:
    says_so, another = ConfigError("It does not support auto_model=X."), DataError("A row is empty.")
    assert _classify(says_so, "encoders")["outcome"] == "unsupported"
    assert _classify(says_so, None)["outcome"] == "error"
    assert _classify(another, "encoders")["outcome"] == "error"
    assert _classify(ValueError("does not support"), "encoders")["outcome"] == "error"


def test_what_is_missing_here_is_no_error_of_ours() -> None:
    assert _classify(ModuleNotFoundError("x", name="langid"), None)["reason"] == "needs the package langid"
    assert _classify(ModuleNotFoundError("x", name="pantheraml.new"), None)["outcome"] == "error"
    assert _classify(ConnectionError("x"), None)["reason"] == "needs the network"
    with pytest.raises(FileNotFoundError) as caught:
        subprocess.run(["no-such-program"], check=False)
    assert _classify(caught.value, None)["reason"] == "needs the program no-such-program"
    assert _classify(FileNotFoundError(2, "x", "file"), None)["outcome"] == "error"


def test_reward_functions_of_old_trl() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def reward(texts):\n    import re\n    return re.findall('a', texts[0])", "<cell 3>", "exec"), scope)

    def _calculate_rewards() -> None:
        scope["reward"]([[{"role": "assistant", "content": "a"}]])

    with pytest.raises(TypeError) as caught:
        _calculate_rewards()
    assert _classify(caught.value, None)["reason"] == OLD_REWARDS
    with pytest.raises(TypeError) as caught:
        scope["reward"]([[]])
    assert _classify(caught.value, None)["outcome"] == "error"


def test_patterns() -> None:
    assert not_possible("from snac import SNAC") is not None
    assert reason_not_supported("from unsloth import FastSentenceTransformer") is not None
    assert not_possible("from unsloth import FastLanguageModel") is None
    assert reason_not_supported("from unsloth import FastLanguageModel") is None


def test_code_is_changed_as_the_tool_says() -> None:
    code = """
from unsloth.chat_templates import get_chat_template
config = SFTConfig(max_steps=60, learning_rate=1e-4)
trainer = GRPOTrainer(reward_funcs=[mine])
link = "https://example.org/a%20cat.jpg"
if False: model.save_pretrained_merged("folder", tokenizer)
if False: model.push_to_hub_merged("name", tokenizer)
if False: model.save_pretrained_gguf("folder", tokenizer, quantization_method = "q4_k_m")
"""
    changed = ast.unparse(rewrite(code))
    assert f"from {pantheraml.__name__}.chat_templates import get_chat_template" in changed
    assert "max_steps=2, logging_steps=1, use_cpu=True" in changed
    assert "reward_funcs=[*[mine], _notebook_reward]" in changed
    assert "link = _notebook_picture" in changed
    assert changed.count("_notebook_save") == 1
    assert "if False:\n    model.push_to_hub_merged" in changed


def test_summary() -> None:
    results = [
        Result(
            "B",
            "GRPO",
            "ok",
            losses=(1.0, 0.9),
            refused=(
                "model.save_pretrained_gguf('x'): Models of type 'falcon_h1' cannot be converted to GGUF. fix: Known",
                "model.save_pretrained_merged('x'): The adapter of a.b cannot be merged: it is over a Experts. fix: X",
            ),
        ),
        Result("A", "GRPO", "limit", reason="needs | x"),
        Result("C", "vision", "error", reason="broken"),
    ]
    summary = summarize(results, "0123456789abcdef")
    assert summary["counts"]["GRPO"] == {"ok": 1, "error": 0, "unsupported": 0, "limit": 1}
    assert summary["reasons"]["error"] == {"broken": ["C"]}
    section = page_section(summary)
    assert "- GGUF of `falcon_h1`\n- merging adapters over `Experts`" in section
    assert "| **all** | 1 | 1 | 0 | 1 |" in section
    assert "- needs \\| x (1)" in section
    assert with_section(f"a\n{START}\nold\n{END}\nb", section) == f"a\n{START}\n{section}\n{END}\nb"
    with pytest.raises(ValueError, match="the page has no"):
        with_section("a", section)

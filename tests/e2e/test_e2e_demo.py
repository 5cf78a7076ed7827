"""The demo, whole: it learns its task from nothing, says so, and leaves models that other tools load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pantheraml.data.synthetic import TARGET_TASK, split_examples
from tests.e2e.conftest import Playground

pytestmark = pytest.mark.extended


@pytest.mark.timeout(900)
def test_the_demo_learns(playground: Playground, tmp_path: Path) -> None:
    from peft import PeftModel

    output = tmp_path / "demo"
    ended = playground("demo", "--output", str(output), timeout=840)
    assert ended.code == 0, ended
    result = json.loads((output / "run.json").read_text())
    assert result["exact_match_before"] <= 0.05
    assert result["exact_match_after"] >= 0.9
    assert result["tokens_per_second"] > 0
    assert result["peak_memory_bytes"] > 0
    assert "exact match after" in ended.out
    assert "Held-out examples" in (output / "report.html").read_text()

    # Plain PEFT and transformers, no PantheraML: the answer is the same.
    tokenizer = AutoTokenizer.from_pretrained(output / "base")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(output / "base"), str(output / "adapter"))
    held_out = split_examples(TARGET_TASK, train=5000, held_out=10, seed=77).held_out
    right = 0
    for prompt, completion in held_out:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        right += tokenizer.decode(ids, skip_special_tokens=True) == completion
    assert right >= 8

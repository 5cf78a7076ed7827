"""Inference on two ranks, as docs/Multi-GPU-Guide.md shows it: every prompt once, with the answers of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import toy
from tests.distributed.launching import run_ranks

PROMPTS = 7


@pytest.mark.extended
@pytest.mark.seed("S0-007", partly="ranks share the prompts on CPUs; the speed of several GPUs is not measured")
def test_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        toy.write_llama(folder / "my-model", initializer_range=0.2)
        toy.write_jsonl(folder / "my-data.jsonl", toy.arithmetic(PROMPTS))
        run_ranks("guide_ranks", ranks, folder, "Inference")
        shares = [
            [json.loads(line) for line in (folder / f"answers-{rank}.jsonl").read_text().splitlines()]
            for rank in range(ranks)
        ]
        assert [len(share) for share in shares] == ([PROMPTS] if ranks == 1 else [4, 3])
        found.append({answer["number"]: answer["text"] for share in shares for answer in share})
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(PROMPTS))
    assert len(set(found[0].values())) > 1

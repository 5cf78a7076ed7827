"""The accuracy benchmark: its corpus is deterministic, its summary is correct, and it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.benchmarks.conftest import Python

pytestmark = pytest.mark.extended

CORPUS = """
import json
from pathlib import Path
import corpus
folders = [Path(sys.argv[1]) / name for name in "ab"]
for folder in folders:
    folder.mkdir()
made = [[corpus.write_prose(folder, 60_000), corpus.write_code(folder, 60_000)] for folder in folders]
texts = [[text for path in (domain.train, domain.evaluation) for text in corpus.texts(path)] for domain in made[0]]
print(json.dumps([[(domain.bytes, domain.sha256) for domain in domains] for domains in made]))
print(json.dumps(texts))
"""


def test_corpus_is_deterministic_and_its_domains_are_disjoint(python: Python, tmp_path: Path) -> None:
    first, second = map(json.loads, python(CORPUS, str(tmp_path)).splitlines())
    (prose, code), again = first
    assert [prose, code] == again
    assert all(60_000 <= size < 160_000 for size, _ in (prose, code))
    prose_texts, code_texts = second
    assert len(set(prose_texts)) == len(prose_texts), "each document once"
    assert not set(prose_texts) & set(code_texts)
    assert sum(len(text.encode()) for text in code_texts) == code[0]
    assert sum("import " in text or "def " in text for text in code_texts) > len(code_texts) / 3


FIGURES = """
import torch, accuracy
one = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[2.0]])}
print(accuracy.cosine(one, {name: -3 * value for name, value in one.items()}))
print(accuracy.cosine(one, {"a": torch.tensor([0.0, 5.0]), "b": torch.tensor([[0.0]])}))
rows = [
    {"precision": "bf16", "eval_loss": 2.0, "relative_difference": 0.0, "gradient_cosine": 1.0,
     "gradient_cosine_random_up": 1.0},
    {"precision": "fp8", "eval_loss": 2.008, "relative_difference": 0.004, "gradient_cosine": 0.995,
     "gradient_cosine_random_up": 0.991},
    {"precision": "nf4", "eval_loss": 2.0, "relative_difference": 0.001, "gradient_cosine": 0.999,
     "gradient_cosine_random_up": 0.999},
    {"precision": "nf4", "eval_loss": 1.98, "relative_difference": -0.01, "gradient_cosine": 0.998,
     "gradient_cosine_random_up": 0.999},
]
facts = {"precisions": "bf16,fp8,nf4", "prose_bytes": 1e6, "code_bytes": 2e6, "base_eval_loss": 2.5, "steps": 3,
         "seeds": 2, "size": "small"}
older = [{**row, "eval_loss": 9.0} for row in rows]
print(accuracy.summary([{"parameters": facts, "results": rows}, {"parameters": facts, "results": older}]))
print("another size")
print(accuracy.summary([{"parameters": {**facts, "size": size}, "results": rows} for size in ("cpu", "small")]))
print(accuracy.summary([{"parameters": {**facts, "family": "gemma3"}, "results": rows}]))
"""


def test_figures(python: Python) -> None:
    opposite, orthogonal, *lines = python(FIGURES).partition("another size")[0].splitlines()
    assert float(opposite) == pytest.approx(-1)
    assert float(orthogonal) == pytest.approx(0)
    assert [line for line in lines if line.startswith("| ")][1:] == [
        "| Llama, LoRA, small | fp8 | 2.0080 | 2.0000 | +0.40 % | 0.9950 | 0.9910 | yes |",
        "| Llama, LoRA, small | nf4 | 1.9900 | 2.0000 | -1.00 % | 0.9980 | 0.9990 | no |",
    ]
    printed = python(FIGURES)
    named = ("Llama, LoRA, small", "Llama, LoRA, cpu", "tiny", "Gemma 3, LoRA, small")
    assert [words in printed for words in named] == [True, True, False, True]


RUN = "import json, accuracy\nprint(json.dumps(accuracy.run(size='tiny', seeds=1, precisions='bf16,nf4', family={!r})))"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.extended)])
def test_it_runs(python: Python, family: str) -> None:
    measured = json.loads(python(RUN.format(family)).splitlines()[-1])
    bf16, nf4 = measured["results"]
    assert bf16["relative_difference"] == 0
    assert bf16["gradient_cosine"] == pytest.approx(1)
    assert 0 < abs(nf4["relative_difference"]) < 0.005
    least = {"llama": 0.97, "gemma3": 0.93}[family]
    assert least < nf4["gradient_cosine"] < 0.9999
    assert least < nf4["gradient_cosine_random_up"] < 0.9999
    assert measured["parameters"]["base_eval_loss"] < 6.3, "below log(512): it has started to learn"

"""The search that `auto` is compared with."""

from __future__ import annotations

import json

import pytest

from tests.unit.benchmarks.conftest import Python

COMPARED = """
import json, auto_defaults
rows = [
    {"task": "code", "auto": auto, "rate": rate, "rank": 16, "eval_loss": loss}
    for auto, rate, loss in ((True, 2e-4, 2.05), (False, 5e-5, 2.2), (False, 1e-3, 2.0), (False, 1e-2, 9.0))
]
rows.append({"task": "code", "auto": False, "rate": 2e-2, "rank": 64, "eval_loss": None})  # diverged
rows += [{**row, "task": "manual", "eval_loss": row["eval_loss"] / (1.02 if row["auto"] else 1)} for row in rows[:-1]]
print(json.dumps([len(auto_defaults.GRID), auto_defaults.compared(rows)]))
"""


def test_auto_is_compared_with_the_best_point(python: Python) -> None:
    points, lines = json.loads(python(COMPARED))
    assert points == 20
    assert lines == [
        ["code", "2.0500 (0.0002, rank 16)", "2.0000 (0.001, rank 16)", "4", "+2.50 %", "no"],
        ["manual", "2.0098 (0.0002, rank 16)", "2.0000 (0.001, rank 16)", "3", "+0.49 %", "yes"],
    ]


DIVERGED = """
import json, types, accuracy, auto_defaults
from pathlib import Path
from pantheraml.base.errors import NonFiniteError
def train(folder, config):
    if config.train.learning_rate == 1e-2:
        raise NonFiniteError("The loss is NaN.")
    chosen = types.SimpleNamespace(kind="choice", name="train.learning_rate", value=2e-4)
    return [chosen, types.SimpleNamespace(kind="eval.done", loss=2.0)]
accuracy.train = train
bench = object.__new__(auto_defaults.Bench)
bench.folder, bench.size = Path("f"), auto_defaults.SIZES["tiny"]
bench.code = auto_defaults.corpus.Domain(Path("t"), Path("e"), 1, "x")
points = [auto_defaults.Point(rate, 16) for rate in (1e-2, 2e-3)]
losses = [[row["eval_loss"] for row in bench.search("code", points, end)] for end in (float("inf"), 0.0)]
rows = [{"task": "code", "auto": True, "rate": 2e-4, "rank": 16, "eval_loss": 2.0}]
print(json.dumps([*losses, auto_defaults.compared(rows)]))
"""


def test_a_point_that_diverges_is_a_row_and_the_others_are_tried(python: Python) -> None:
    losses, without_time, compared = json.loads(python(DIVERGED))
    assert losses == [2.0, None, 2.0]
    assert not without_time
    assert not compared, "there is nothing to compare `auto` with"


SHAPES = """
import json, accuracy, auto_defaults
from accuracy_models import FAMILIES, model_config
found = []
for sizes in (accuracy.SIZES, auto_defaults.SIZES):
    for size in sizes.values():
        names = ("vocabulary", "hidden", "intermediate", "layers", "head_dim", "seq_len")
        for family in FAMILIES:
            config = model_config(family, **{name: getattr(size, name) for name in names})
            found.append([config.num_attention_heads, config.num_key_value_heads])
print(json.dumps(found))
"""


def test_models_of_all_sizes_can_share_their_keys_and_values(python: Python) -> None:
    shapes = json.loads(python(SHAPES))
    assert [16, 4] in shapes, "the size for a GPU"
    assert not [shape for shape in shapes if shape[0] % shape[1]]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_it_runs(python: Python) -> None:
    code = "import json, auto_defaults\nprint(json.dumps(auto_defaults.run(size='tiny', points=1)))"
    found = json.loads(python(code).splitlines()[-1])
    rows = found["results"]
    assert [(row["task"], row["auto"]) for row in rows] == [
        (task, auto) for task in ("code", "manual", "describe") for auto in (True, False)
    ]
    assert all(5 < row["eval_loss"] < 7 and row["bytes"] > 50_000 for row in rows), "about log(512)"
    assert len({row["bytes"] for row in rows}) == 3, "three kinds of text"

"""Multi-process benchmarks on a tiny model: they run, and their rows have all columns of their tables."""

from __future__ import annotations

import json

import pytest

from tests.unit.benchmarks.conftest import Python

pytestmark = pytest.mark.extended

SIZE = "hidden=64, layers=2, vocabulary=512, seq_len=32, batch=2"

WEAK_SCALING = f"""
import json, weak_scaling
measured = weak_scaling.run({SIZE}, repeats=1, cores=[0, 0])
shown = {{column.field for column in weak_scaling.TABLE.columns}}
assert all(shown <= row.keys() for row in measured["results"])
print(json.dumps(measured))
"""


@pytest.mark.timeout(900)
def test_weak_scaling_compares_with_plain_ddp_and_the_host(python: Python) -> None:
    rows = json.loads(python(WEAK_SCALING).splitlines()[-1])["results"]
    assert [(row["method"], row["target"]) for row in rows] == [("lora", 0.95), ("full", 0.85)]
    lora, full = rows
    assert 0 < lora["trained"] < full["trained"]
    for row in rows:
        assert row["efficiency"] > 0
        assert row["alone_seconds"] / row["together_seconds"] > 0
        # a tiny model, one round: timings are meaningless on a busy host
        names = ("plain_efficiency", "machine_efficiency", "against_plain", "cpu_against_plain")
        assert all(0 < row[name] < 1000 for name in names)
        assert row["against_plain_spread"] == 0, "there is one round"


THEORY = """
import json
from ranks.theory import Case, Shape, expected
shape = Shape(hidden=4096, layers=32, vocabulary=128256, tokens=8192)
found = {mode: expected(Case(mode, "lora"), shape) for mode in ("ddp", "tp")}
print(json.dumps({mode: [one.counts, one.whole_bytes] for mode, one in found.items()}))
"""


def test_theory_of_a_large_model(python: Python) -> None:
    found = json.loads(python(THEORY))
    counts, whole = found["ddp"]
    assert counts == {"all-reduce": 1}
    assert whole["all-reduce"] == 4 * 32 * 16 * 19 * 4096
    counts, whole = found["tp"]
    assert counts["all-reduce"] == 4 * 32 + 1 + 1
    assert whole["all-reduce"] == (4 * 32 + 1) * 4 * 8192 * 4096 + 4 * 32 * 16 * 7 * 4096


SHOWN = """
import communication
from ranks.theory import Case, Shape, expected
theory = expected(Case("pp", "full", passes=2), Shape(64, 2, 512, tokens=64))
ranks = [
    {"counts": dict(theory.counts), "whole_bytes": dict(theory.whole_bytes), "sent_bytes": sent} for sent in (1, 2048)
]
row = communication._row(Case("pp", "full", passes=2), Shape(64, 2, 512, tokens=64), ranks)
print("|".join(column.write(row[column.field]) for column in communication.TABLE.columns if "." not in column.field))
"""


def test_row_shows_the_process_that_sent_most(python: Python) -> None:
    kinds = "2 send"
    assert python(SHOWN).strip() == f"pp|full|64|{kinds}|{kinds}|16.0 KiB|16.0 KiB|2.0 KiB"

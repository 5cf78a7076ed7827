"""docs/stability.md and its plots are generated from result files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.unit.benchmarks.conftest import Python

DOCS = Path(__file__).parents[3] / "docs"

MEASURED: dict[str, Any] = {
    "benchmark": "stability",
    "date": "2030-01-02T03:04:05+00:00",
    "parameters": {"at": 2, "noisy_steps": 1, "learning_rate": 0.004},
    "results": [
        {"run": "nan", "case": "off", "before": 3.0, "worst": None, "end": None, "losses": [3.5, 3.0, None, None]},
        {"run": "nan", "case": "skip <&>", "before": 3.0, "worst": 2.5, "end": 2.0, "losses": [3.5, 3.0, None, 2.0]},
        {"run": "spike", "case": "zclip", "before": 3.0, "worst": 2.5, "end": 2.0, "losses": [3.5, 3.0, 9.0, 2.0]},
    ],
}


def test_page_and_plots_are_up_to_date(python: Python) -> None:
    code = "import json, run; found = run.records(); page = run.stability_page\n"
    made = json.loads(python(code + "print(json.dumps([page.page(found), page.pictures(found)]))"))
    assert (DOCS / "stability.md").read_text(encoding="utf-8") == made[0], "run `python benchmarks/run.py --table`"
    assert made[1].keys() == {"stability-nan.svg", "stability-spike.svg"}
    for name, svg in made[1].items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == svg, name


def test_nonfinite_numbers_are_gaps(python: Python) -> None:
    code = "import json, stability_page as page; found = json.loads(sys.argv[1])\n"
    text, pictures = json.loads(
        python(code + "print(json.dumps([page.page(found), page.pictures(found)]))", json.dumps([MEASURED]))
    )
    assert "| off | 3.000 | NaN | NaN |" in text
    assert "Not measured yet." in text, "overhead of the guard"
    drawn = ElementTree.fromstring(pictures["stability-nan.svg"])
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in drawn.iter(f"{space}polyline")]
    assert [len(points) for points in lines] == [2, 2], "a line of one point is invisible"
    assert "skip <&>" in [text.text for text in drawn.iter(f"{space}text")]

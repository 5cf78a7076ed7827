"""report.html: self-contained, escaped, and consistent with the events, for runs of any length."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import RunDirectoryError
from pantheraml.readers import report_charts
from pantheraml.readers.report import Section, write_report
from pantheraml.readers.report_charts import charts, downsample, smooth
from pantheraml.readers.summary import history, summarize


class Page(html.parser.HTMLParser):
    """Parsed page: tags, visible text, and the embedded chart data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.chart_data = ""
        self._inside: list[tuple[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.charts = json.loads(self.chart_data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self._inside.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop()[0] == tag, f"unbalanced {tag}"

    def handle_data(self, data: str) -> None:
        where = self._inside[-1] if self._inside else ("", None)
        if where == ("script", "charts"):
            self.chart_data += data
        elif where[0] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " | ".join(text for text in self.text if text.strip())


@pytest.mark.seed("S4-165")
def test_report_of_a_complete_run(complete: Any, tmp_path: Path) -> None:
    complete.emit("warning", message="41 rows were truncated")
    path = write_report(complete.write(tmp_path / "first"), extra_figures=[("exact match", "97.3 %")])
    assert path == tmp_path / "first" / "report.html"
    page = Page(path)
    for words in ("first | succeeded", "97.3 % | exact match", "120 | steps", "two GPUs are visible", "98.7 %",
                  "41 rows were truncated", "checkpoints/step-60", "removed", "kept best"):  # fmt: skip
        assert words in page.words, words
    assert "PantheraML 0.1.0" in page.words
    titles = [text for text in page.text if text in CHARTS]
    assert titles == list(CHARTS)
    assert len(page.charts) == len(CHARTS)
    losses = {series["name"]: series for series in page.charts[0]["series"]}
    steps = [event for event in complete.events if event.kind == "train.step"]
    assert losses["training, each step"]["x"] == list(range(1, 121))
    assert losses["training, each step"]["y"] == pytest.approx([event.loss for event in steps], rel=1e-5)
    assert losses["evaluation"]["x"] == [30, 60, 90, 120]


CHARTS = ("Loss", "Perplexity on evaluation data", "Learning rate", "Gradient norm", "Tokens per second",
          "Memory per device, GiB")  # fmt: skip


def test_concern_is_shown_at_the_top(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    fake_run.train(1, 3)
    fake_run.emit("train.finished", steps=3, stopped_by="end", concern="the loss ended at <9>")
    page = Page(write_report(fake_run.write(tmp_path / "run")))
    assert page.text.index("the loss ended at <9>") < page.text.index("Charts")


def test_choices_made_with_the_model_are_shown_with_the_plan(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    fake_run.emit("choice", name="parallel.static_graph", value=False, reason="nothing needs it", automatic=True)
    page = Page(write_report(fake_run.write(tmp_path / "run")))
    at = page.text.index("parallel.static_graph")
    assert page.text[at : at + 4] == ["parallel.static_graph", "False", "automatic", "nothing needs it"]
    assert at > page.text.index("activations fit")


def test_report_has_no_external_resources(complete: Any, tmp_path: Path) -> None:
    path = write_report(complete.write(tmp_path / "run"))
    page = Page(path)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "data"} & attributes.keys(), (tag, attributes)
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")
    assert path.read_text(encoding="utf-8").count("plotly.js v") == 1, "plotly is embedded once"


def test_all_text_is_escaped(fake_run: Any, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
    fake_run.begin()
    fake_run.events[-1].plan = {
        **fake_run.events[-1].plan,
        "choices": [{"name": evil, "value": evil, "reason": evil, "automatic": True}],
    }
    fake_run.train(1, 3)
    for kind in ("notice", "warning"):
        fake_run.emit(kind, message=evil)
    fake_run.emit("verdict", step=2, action=evil, cause=evil)
    fake_run.emit("error", error=evil, what=evil, where=evil, fix=evil, exit_code=8)
    fake_run.emit("checkpoint.saved", step=3, path=evil, bytes=1, seconds=0.1, best=False)
    fake_run.emit("model.saved", path=evil, form=evil)
    fake_run.emit("run.finished", status=evil, seconds=1.0)
    extra = [Section(evil, evil, (evil,), [(evil,)])]
    run_dir = fake_run.write(tmp_path / "a<b>&c")
    page = Page(write_report(run_dir, extra=extra, extra_figures=[(evil, evil)]))
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert tags.count("script") == 3
    assert page.words.count("alert(1)") >= 16, "the text itself is shown"


def test_failed_run_shows_its_error_and_skips_nonfinite_values(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    fake_run.train(1, 4, total=10)
    fake_run.step(5, 10, loss="nan", grad_norm="inf")
    fake_run.emit("error", error="NonFiniteError", what="The loss is nan.", where="step 5", exit_code=18,
               fix="Lower the learning rate.")  # fmt: skip
    fake_run.emit("run.finished", status="failed", seconds=1.0)
    page = Page(write_report(fake_run.write(tmp_path / "run")))
    assert "NonFiniteError | \nThe loss is nan.\nwhere: step 5\nfix: Lower the learning rate." in page.words
    assert page.charts[0]["series"][0]["y"][-1] is None
    assert "1 step without a finite value, not drawn." in page.words
    assert "5 of 10 | steps" in page.words


@pytest.mark.parametrize(
    "tell", [lambda fake_run: None, lambda fake_run: fake_run.train(1, 1)], ids=["no step", "one step"]
)
def test_report_of_a_run_with_at_most_one_step(fake_run: Any, tmp_path: Path, tell: Any) -> None:
    fake_run.begin()
    tell(fake_run)
    page = Page(write_report(fake_run.write(tmp_path / "run")))
    assert "running" in page.words
    assert all(series["markers"] for chart in page.charts for series in chart["series"]), "one point must be visible"


def test_lines_that_cannot_be_read_are_told(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    folder = fake_run.write(tmp_path / "run")
    assert "cannot be read" not in write_report(folder).read_text()
    with open(folder / "events.jsonl", "a") as stream:
        stream.write('{"v":1,"kind":"train.st\n\n')
    assert "1 line(s) of events.jsonl cannot be read" in write_report(folder).read_text()


def test_folder_without_events_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no events"):
        write_report(tmp_path)


def test_long_runs_are_downsampled_with_a_note(fake_run: Any) -> None:
    points = [(step, math.sin(step / 1000)) for step in range(1, 100_001)]
    points[54_320] = (54_321, 99.0)
    drawn = downsample(points)
    assert len(drawn) <= 2 * report_charts.BUCKETS
    assert (54_321, 99.0) in drawn, "a spike of one step stays visible"
    assert [step for step, _ in drawn] == sorted({step for step, _ in drawn})
    fake_run.train(1, 2_000)
    loss = charts(history(fake_run.events))[0]
    assert loss.note == "2,000 points, drawn as the lowest and highest of 750 buckets."


def test_downsampling_keeps_gaps() -> None:
    points = [(step, None if 40_000 < step <= 60_000 else 1.0) for step in range(1, 100_001)]
    gaps = [step for step, value in downsample(points) if value is None]
    assert min(gaps) > 40_000
    assert max(gaps) <= 60_000
    assert len(gaps) == pytest.approx(150, abs=2)


def test_smoothing_does_not_lag() -> None:
    line = [(step, 100.0 - step) for step in range(1, 401)]
    assert [value for _, value in smooth(line)] == pytest.approx([value for _, value in line])
    noisy = [(step, float(step % 2)) for step in range(1, 401)]
    assert all(0.4 < value < 0.6 for _, value in smooth(noisy)[10:-10] if value is not None)
    assert smooth([(1, 2.0), (2, None), (3, 4.0)])[1] == (2, None)


def test_number_of_messages_is_limited(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    for index in range(1_000):
        fake_run.emit("warning", message=f"warning number {index}.")
    page = Page(write_report(fake_run.write(tmp_path / "run")))
    assert "The last 200 of 1,000." in page.words
    assert "warning number 999." in page.words
    assert len(re.findall(r"warning number \d+\.", page.words)) == 200


def test_rank_table_shows_the_last_start_and_names_the_slow_rank(fake_run: Any, tmp_path: Path) -> None:
    def started() -> None:
        fake_run.emit("train.started", first_step=1, total_steps=2, world_size=3, device="cpu", global_batch_size=4)

    fake_run.begin()
    started()
    fake_run.emit("train.ranks", step=1, tokens=[9_999] * 4, seconds=[9.0] * 4, memory_bytes=[1] * 4)
    started()
    fake_run.emit("train.ranks", step=1, tokens=[800, 801, 300], seconds=[0.5, 0.5, 0.7], memory_bytes=[2**30, 1, None])
    fake_run.emit("train.ranks", step=2, tokens=[800, 803, 300], seconds=[0.5, 0.5, 1.1], memory_bytes=[1, 2**29, None])
    words = Page(write_report(fake_run.write(tmp_path / "run"))).words
    assert "Rank 2 takes 1.8 times as long" in words
    assert "Rank 0 takes" not in words
    assert "0 | 800 | 0.5 s | 1.00 × | 1 GiB | 1 | 802 | 0.5 s | 1.00 × | 512 MiB" in words
    assert "2 | 300 | 0.9 s | 1.80 × | –" in words
    assert "9,999" not in words


def test_rank_table_with_unknown_times(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    fake_run.emit("train.ranks", step=1, tokens=[800, 800], seconds=None, memory_bytes=[1024, 1024])
    words = Page(write_report(fake_run.write(tmp_path / "run"))).words
    assert "0 | 800 | – | – | 1 KiB | 1 | 800 | – | – | 1 KiB" in words


def test_verdicts_are_marked_on_the_gradient_norm(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    fake_run.train(1, 4, total=10)
    fake_run.step(5, 10, grad_norm="nan")
    fake_run.emit("verdict", step=5, action="skip", cause="the gradient norm is nan")
    fake_run.emit("verdict", step=2, action="retry", cause="spike")
    chart = next(
        chart for chart in Page(write_report(fake_run.write(tmp_path / "run"))).charts if len(chart["series"]) == 2
    )
    norm, marks = chart["series"]
    assert marks["labels"] == ["retry: spike", "skip: the gradient norm is nan"]
    assert marks["x"] == [2, 5]
    assert marks["y"] == [norm["y"][1], max(value for value in norm["y"] if value is not None)]


def test_predicted_memory_is_drawn_beside_the_measured(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    fake_run.events[-1].plan = {**fake_run.events[-1].plan, "predicted_memory_bytes": 3 * 2**30}
    fake_run.train(1, 3)
    memory = Page(write_report(fake_run.write(tmp_path / "run"))).charts[-1]["series"]
    assert [series["name"] for series in memory] == ["measured", "predicted"]
    assert memory[1]["y"] == [3.0] * 3


def test_predictions_stand_beside_what_was_measured(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    predicted = {"predicted_memory_bytes": 17 * 10**9, "prediction": {"step_seconds": 0.4}}
    fake_run.events[-1].plan = {**fake_run.events[-1].plan, **predicted}
    fake_run.train(1, 12)
    fake_run.finish(12)
    fake_run.events[-3].reserved_bytes = 18 * 10**9
    summary = summarize(fake_run.events)
    assert (summary["predicted_memory_bytes"], summary["reserved_memory_bytes"]) == (17 * 10**9, 18 * 10**9)
    assert (summary["step_seconds"], summary["predicted_step_seconds"]) == (0.5, 0.4)
    text = write_report(fake_run.write(tmp_path / "run")).read_text()
    assert "15.8 GiB (predicted 15.8 GiB, -0.0 %)" in text
    assert "0.5 s (predicted 0.4 s, -20.0 %)" in text


def test_incidents_name_tensor_rank_and_documents(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    for step in (3, 4):
        fake_run.emit("incident", step=step, path=f"incidents/step-{step}.json", finding="first not finite", rank=1,
                      module="layers.0.mlp", tensor="output", samples=[7, 8])  # fmt: skip
    folder = fake_run.write(tmp_path / "run")
    (folder / "incidents").mkdir()
    document = {"file": "/data/rows.jsonl", "unit": "line", "number": 17, "text": "<b>words</b>", "suspect": True}
    content = {"findings": [{"rank": 1}], "origins": [{"sample": 7, "documents": [document], "count": 1}]}
    (folder / "incidents" / "step-3.json").write_text(json.dumps(content))
    (folder / "incidents" / "step-4.json").write_text("[" * 100_000)
    words = Page(write_report(folder)).words
    assert "3 | output of layers.0.mlp | 1 | first not finite | [7, 8] | rows.jsonl line 17 <b>words</b>" in words
    assert "4 | output of layers.0.mlp | – | first not finite | [7, 8] | –" in words, "a damaged file is no error"


def test_configuration_is_shown_without_folders(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    folder = fake_run.write(tmp_path / "run")
    (folder / "config.yaml").write_text("model: {path: /home/someone/secret/llama}\ndata: {path: [/a/b.jsonl, c]}\n")
    words = Page(write_report(folder)).words
    assert "model.path: .../llama" in words
    assert "data.path: ['.../b.jsonl', 'c']" in words
    assert "secret" not in words


def test_every_axis_has_a_place_for_each_point(complete: Any, tmp_path: Path) -> None:
    loss = Page(write_report(complete.write(tmp_path / "run"))).charts[0]["series"]
    for series in loss:
        assert {name: len(values) for name, values in series["axes"].items()} == dict.fromkeys(
            ("epoch", "tokens", "minutes"), len(series["x"])
        )
    assert loss[0]["axes"]["tokens"][-1] == 120 * 32_000
    evaluation = loss[-1]
    assert evaluation["axes"]["epoch"] == pytest.approx([0.3, 0.6, 0.9, 1.2])

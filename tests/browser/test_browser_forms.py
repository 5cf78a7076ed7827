"""Actions on the page: start jobs, compare them, try models, find things."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pantheraml.data import row_formats
from tests import toy
from tests.browser.conftest import shoot, start_job
from tests.service.conftest import Server, wait_for, wait_until

pytestmark = pytest.mark.extended

HTML = '<img src=x onerror="window.hacked=1"><b>bold</b>'


def test_a_job_is_put_together_and_started(service: Server, page: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": 3, "completion": "4"}\n{"prompt": "x"\n')
    page.goto(service.url)
    page.get_by_role("link", name="New job").last.click()
    page.get_by_text("Choose a model and training data, and the plan appears here").wait_for()
    assert page.get_by_role("button", name="Start the job").is_disabled()
    page.get_by_text("What a line looks like").click()
    lines = page.get_by_label("A line of each kind").text_content().splitlines()
    assert [row_formats.detect(json.loads(line)) for line in lines] == list(row_formats.COLUMNS), "true examples"

    page.set_input_files("#upload", wrong)
    page.get_by_text("wrong.jsonl was not taken: 2 rows cannot be used.").wait_for()
    rows = page.get_by_role("region", name="Wrong rows").get_by_role("row").all_text_contents()
    assert rows[1].startswith("2prompt")
    assert rows[2].startswith("3")
    shoot(page, "new-job-wrong-rows")

    page.set_input_files("#upload", toy.write_jsonl(tmp_path / "sums.jsonl", toy.arithmetic(24)))
    page.get_by_text("sums.jsonl: 24 rows, all of them good.").wait_for()
    page.get_by_text("1 × CPU process").wait_for()
    page.get_by_text("Why:").click()
    page.get_by_text("CPUs are rarely faster in bf16").wait_for()
    trained = page.locator(".tokens span.trained")
    row = toy.arithmetic(24)[0]
    page.get_by_text("Line 1", exact=True).wait_for()
    pieces = page.locator("article .tokens").first.locator("span").all_text_contents()
    assert "".join(pieces) == row["prompt"] + row["completion"] + "<eos>"
    first = page.locator("article .tokens").first.locator("span.trained").all_text_contents()
    assert "".join(first) == row["completion"] + "<eos>"
    assert trained.count() > 1, "the legend, and the rows"

    page.get_by_text("More settings").click()
    page.get_by_label("GPUs or processes").fill("2")
    page.get_by_text("2 × CPU process").wait_for()
    page.get_by_label("Other settings (JSON)").fill('{"train": {"nonsense": 1}}')
    page.get_by_role("alert").get_by_text("nonsense").wait_for()
    assert page.get_by_role("button", name="Start the job").is_disabled()
    page.get_by_label("Other settings (JSON)").fill('{"train": {"warmup_steps": 2}}')
    page.get_by_label("Epochs").fill("2")
    page.get_by_label("Name (optional)").fill("by-hand")
    page.get_by_text("2 × CPU process").wait_for()
    shoot(page, "new-job")
    wait_until(page.get_by_role("button", name="Start the job").is_enabled)
    page.get_by_role("button", name="Start the job").click()
    page.locator("[data-state]", has_text="succeeded").wait_for()
    assert page.get_by_role("heading", name="by-hand").is_visible()
    _before_and_after(page, row)
    _duplicate(service, page)
    _try(page)


def _before_and_after(page: Any, row: dict[str, Any]) -> None:
    page.get_by_role("tab", name="Before and after").click()
    page.get_by_role("button", name="Show before and after").click()
    card = page.get_by_role("article", name="Line 1", exact=True)
    card.get_by_text(row["prompt"], exact=True).wait_for()
    assert card.locator(".answers .said").count() == 3
    assert card.locator(".answers .said").last.text_content() == row["completion"]
    page.get_by_text("the training data, which the model has seen").wait_for()
    shoot(page, "job-samples")
    page.get_by_role("tab", name="Charts").click()


def _duplicate(service: Server, page: Any) -> None:
    page.get_by_role("link", name="Duplicate").click()
    page.get_by_role("heading", name="Duplicate a job").wait_for()
    assert page.get_by_label("Name (optional)").input_value() == "by-hand-2"
    assert page.get_by_label("GPUs or processes").input_value() == "2"
    assert json.loads(page.get_by_label("Other settings (JSON)").input_value()) == {"train": {"warmup_steps": 2}}
    page.get_by_label("Submit on hold").check()
    wait_until(page.get_by_role("button", name="Start the job").is_enabled)
    page.get_by_role("button", name="Start the job").click()
    page.locator("[data-state]", has_text="paused").wait_for()
    with service.http() as http:
        one, two = http.get("/v1/fine_tuning/jobs?limit=2").json()["data"]
        configs = [http.get(f"/v1/fine_tuning/jobs/{job['id']}/config").json()["config"] for job in (one, two)]
    assert configs[0] == configs[1], "nothing of the settings was lost"
    page.go_back()
    page.go_back()


def _try(page: Any) -> None:
    page.get_by_role("link", name="Try it").click()
    page.get_by_role("heading", name="Playground").wait_for()
    page.get_by_label("Most tokens of an answer").fill("8")
    page.get_by_label("Message", exact=True).fill("1+1=")
    page.get_by_role("button", name="Send").click()
    for side in ("Base", "Fine-tuned"):
        page.get_by_role("region", name=side, exact=True).get_by_text(re.compile(r"\d+ tokens? ·")).wait_for()
    shoot(page, "playground")


def test_queue_history_and_comparison(service: Server, page: Any) -> None:
    long = start_job(service, suffix="long", processes=2, epochs=2000)
    with service.client() as client:
        wait_for(client, long, "running")
    one = start_job(service, suffix="one", processes=1, epochs=1)
    two = start_job(service, suffix="two", processes=1, epochs=2)
    page.goto(f"{service.url}/#/jobs")
    queue = page.locator("table", has=page.get_by_text("Queue", exact=True)).locator("tbody tr")
    wait_until(lambda: [row.split("local")[0] for row in queue.all_text_contents()] == ["1one", "2two"])
    page.get_by_text("needs 1 of 2 devices; 0 free", exact=True).wait_for()
    used = page.locator("table", has=page.get_by_text("Usage by user", exact=True)).locator("tbody tr")
    wait_until(lambda: [row.startswith("local") for row in used.all_text_contents()] == [True])
    page.get_by_role("button", name=f"Move up {two}").click()
    wait_until(lambda: [row.split("local")[0] for row in queue.all_text_contents()] == ["1two", "2one"])
    shoot(page, "jobs")
    page.goto(f"{service.url}/#/")
    page.get_by_text(re.compile(r"needs 1 of 2 devices[;,] 0 free; 1 before it")).wait_for()
    shoot(page, "overview-queue")
    with service.client() as client:
        client.fine_tuning.jobs.cancel(long)
        for job in (one, two):
            wait_for(client, job, "succeeded")

    page.goto(f"{service.url}/#/jobs")
    page.get_by_label("Compare one").check()
    page.get_by_label("Find jobs").fill("two")
    wait_until(lambda: page.get_by_label("Compare one").count() == 0)
    page.get_by_label("Compare two").check()
    page.get_by_role("link", name="Compare 2").click()
    page.get_by_role("region", name="Training loss", exact=True).wait_for()
    differing = page.locator("table", has=page.get_by_text("Settings that differ", exact=True)).locator("tbody tr")
    assert [row for row in differing.all_text_contents() if row.startswith("train.epochs")] == ["train.epochs12"]
    lines = "() => document.querySelector('section[aria-label=\"Training loss\"] .plot')?.data?.map(line => line.name)"
    wait_until(lambda: page.evaluate(lines) == ["one", "two"])
    shoot(page, "compare")


def test_html_of_jobs_files_logs_and_models_is_text(service: Server, page: Any, tmp_path: Path) -> None:
    job = start_job(service, epochs=1, metadata={HTML[:60]: HTML})
    with service.client() as client:
        wait_for(client, job, "succeeded")
    run = service.data / "jobs" / job / "run"
    with open(run / "worker.log", "a", encoding="utf-8") as log:
        log.write(f"{HTML}\n")
    (run / "adapter" / "<img src=x onerror=window.hacked=1>.json").write_text("{}")
    rows = [{"messages": [{"role": "user", "content": HTML}, {"role": "assistant", "content": HTML}]}]
    named = toy.write_jsonl(tmp_path / "<img src=x onerror=window.hacked=1>.jsonl", rows)

    page.goto(f"{service.url}/#/job/{job}?tab=log")
    page.get_by_text(HTML).wait_for()
    page.get_by_role("tab", name="Files").click()
    page.get_by_role("link", name="adapter/<img").wait_for()
    page.get_by_role("tab", name="Configuration").click()
    page.get_by_role("cell", name=HTML, exact=True).last.wait_for()
    page.goto(f"{service.url}/#/jobs?search=onerror")
    page.get_by_label("Find jobs").wait_for()
    page.goto(f"{service.url}/#/new")
    page.get_by_label("Upload training data").wait_for(state="attached")
    page.set_input_files("#upload", named)
    page.get_by_text("<img src=x onerror=window.hacked=1>.jsonl: 1 row").wait_for()
    page.locator("article .tokens").first.wait_for()
    assert HTML in "".join(page.locator("article .tokens").first.locator("span").all_text_contents())
    assert page.evaluate("() => window.hacked ?? null") is None
    assert page.locator("main img").count() == 0


class _Writer(BaseHTTPRequestHandler):
    """An inference server whose model writes HTML."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for piece in (HTML[:9], HTML[9:], f"</div><script>window.hacked=1</script>{HTML}"):
            chunk = {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent."""


def test_html_that_a_model_writes_is_text(own_server: Callable[..., Server], page: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Writer) as upstream:
        thread = threading.Thread(target=upstream.serve_forever)
        thread.start()
        try:
            server = own_server("--cpu-slots", "1", "--inference-url", f"http://127.0.0.1:{upstream.server_port}/v1")
            page.goto(f"{server.url}/#/playground")
            page.get_by_label("Message", exact=True).fill(HTML)
            page.get_by_role("button", name="Send").click()
            answer = page.get_by_role("region", name="Base", exact=True).locator(".answer")
            answer.get_by_text("window.hacked=1</script>").wait_for()
            assert answer.text_content() == f"{HTML}</div><script>window.hacked=1</script>{HTML}"
            assert answer.locator("*").count() == 0
            assert page.evaluate("() => window.hacked ?? null") is None
        finally:
            upstream.shutdown()
            thread.join()

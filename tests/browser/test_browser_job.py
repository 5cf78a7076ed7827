"""A job that runs on two processes, watched and steered from the page."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import Proxy, shoot, start_job
from tests.service.conftest import Server, wait_for, wait_until

pytestmark = pytest.mark.extended

DRAWN = """name => {
  const plot = document.querySelector(`section[aria-label="${name}"] .plot`);
  return (plot?.data ?? []).map(line => ({ name: line.name, x: [...line.x], y: [...line.y] }));
}"""
STATE = "[data-state]"


def drawn(page: Any, chart: str) -> list[dict[str, Any]]:
    """Lines of a chart as they are on the screen."""
    page.locator(f'section[aria-label="{chart}"] .plot').scroll_into_view_if_needed()
    found: list[dict[str, Any]] = page.evaluate(DRAWN, chart)
    return found


def open_job(page: Any, url: str, job: str, tab: str = "") -> None:
    page.goto(f"{url}/#/job/{job}{tab}")
    page.locator(STATE).wait_for()


@pytest.mark.seed("S0-114")
def test_a_job_is_watched_live_over_a_lost_connection(service: Server, proxied: Proxy, page: Any) -> None:
    page.goto(proxied.url)
    page.get_by_text("No job runs.").wait_for()
    job = start_job(service, suffix="live", processes=2, epochs=60)
    card = page.get_by_role("article", name=f"Job {job}")
    card.get_by_text(re.compile(r"step \d+ of 360")).wait_for()
    with service.suspended(job):  # it may not end before the page has lost its connection
        assert card.get_by_role("meter").get_attribute("aria-valuenow")
        shoot(page, "overview-running")
        card.get_by_role("link", name="live").click()
        wait_until(lambda: any(line["x"] for line in drawn(page, "Loss")))
        page.get_by_text("live", exact=True).last.wait_for()
        before = page.locator(".figure b").first.text_content()
        proxied.cut()
        page.get_by_text("Connection to the service lost").wait_for()
        proxied.up = True
        page.get_by_text("Connected again").wait_for()
    page.locator(STATE, has_text="succeeded").wait_for()
    assert page.locator(".figure b").first.text_content() != before, "the loss went on"

    every = list(range(1, 361))
    wait_until(lambda: next(line["x"] for line in drawn(page, "Loss") if line["name"].startswith("training")) == every)
    lines = {line["name"]: line for line in drawn(page, "Loss")}
    with service.http() as http:
        told = http.get(f"/v1/fine_tuning/jobs/{job}/curves").json()
    assert lines["training, each step"]["y"] == pytest.approx(told["metrics"]["train_loss"]["values"], rel=1e-5)
    assert lines["evaluation"]["x"] == told["metrics"]["valid_loss"]["steps"] == list(range(20, 361, 20))
    smoothed = told["smoothed"]["10"]
    assert lines["training, smoothed"]["x"] == smoothed["steps"], "as the service smooths it, wherever the page joined"
    assert lines["training, smoothed"]["y"] == pytest.approx(smoothed["values"], rel=1e-4)
    shoot(page, "job")

    loss = page.get_by_role("region", name="Loss", exact=True)
    assert "over 360 logged steps" in (loss.locator(".sentence").text_content() or "")
    loss.get_by_text("Data table").click()
    loss.get_by_role("table", name="evaluation").wait_for()
    assert loss.get_by_role("table").count() == 2, "the smoothed line and the evaluation"
    page.locator("#axis").select_option("epoch")
    wait_until(lambda: max(drawn(page, "Gradient norm")[0]["x"]) == pytest.approx(60))
    page.locator("#axis").select_option("tokens")
    wait_until(lambda: max(drawn(page, "Gradient norm")[0]["x"]) == told["tokens"])
    page.locator("#smoothing").select_option("0")
    page.get_by_label("Log scale of loss and norm").check()
    wait_until(lambda: [line["name"] for line in drawn(page, "Loss")] == ["training", "evaluation"])
    scale = "() => document.querySelector('section[aria-label=\"Loss\"] .plot').layout.yaxis.type"
    wait_until(lambda: page.evaluate(scale) == "log")
    _look_through_the_tabs(page, job)


def _look_through_the_tabs(page: Any, job: str) -> None:
    page.get_by_role("tab", name="Devices").click()
    page.get_by_role("region", name="CPU of the host, %", exact=True).wait_for()
    page.get_by_role("tab", name="Plan").click()
    page.get_by_text("DDP: every process holds the whole model").wait_for()
    shoot(page, "job-plan")
    page.get_by_role("tab", name="Events").click()
    page.get_by_text("Training from step 1 to 360 on 2 cpu process(es)").wait_for()
    page.get_by_role("tab", name="Files").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="report.html").click()
    assert download.value.path().read_bytes().startswith(b"<!doctype html>")
    page.get_by_role("tab", name="Configuration").click()
    page.get_by_label("Find a setting").fill("world_size")
    row = page.get_by_role("row", name=re.compile(r"parallel\.world_size"))
    assert row.get_by_role("cell", name="2", exact=True).is_visible()
    page.get_by_label("Find a setting").fill("data.path")
    page.get_by_text("[data]/files/").wait_for()
    page.get_by_role("tab", name="Log").click()
    page.get_by_role("log").wait_for()
    page.get_by_role("tab", name="Log").press("ArrowRight")
    assert page.url.endswith(f"#/job/{job}?tab=files")


def test_the_service_restarts_and_the_page_goes_on(own_server: Callable[..., Server], page: Any) -> None:
    service = own_server("--cpu-slots", "2")
    with contextlib.closing(Proxy(service)) as proxied:
        _restart_and_steer(service, proxied, page)


def _restart_and_steer(service: Server, proxied: Proxy, page: Any) -> None:
    job = start_job(service, processes=2, epochs=2000)
    open_job(page, proxied.url, job)
    wait_until(lambda: any(len(line["x"]) > 3 for line in drawn(page, "Loss")))
    proxied.cut()
    service.kill()
    page.get_by_text("Connection to the service lost").wait_for()
    service.start()
    proxied.up = True
    page.get_by_text("Connected again").wait_for()
    newest = drawn(page, "Loss")[0]["x"][-1]
    wait_until(lambda: drawn(page, "Loss")[0]["x"][-1] > newest + 5)
    steps = drawn(page, "Loss")[0]["x"]
    assert steps == list(range(1, len(steps) + 1)), "without a gap, and nothing twice"

    page.get_by_role("button", name="Pause").click()
    page.locator(STATE, has_text="paused").wait_for()
    assert not service.processes(job)
    page.get_by_text("It is paused; resume it").wait_for()
    page.get_by_role("button", name="Resume").click()
    page.locator(STATE, has_text="running").wait_for()
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Cancel").click()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel").click()
    page.locator(STATE, has_text="cancelled").wait_for()
    assert page.get_by_role("button", name="Cancel").count() == 0
    with service.client() as client:
        assert wait_for(client, job, "cancelled").status == "cancelled"
    assert not service.processes(job)


def test_a_closed_page_stops_nothing(service: Server, page: Any) -> None:
    job = start_job(service, epochs=10)
    open_job(page, service.url, job)
    page.context.close()
    with service.client() as client:
        wait_for(client, job, "succeeded")

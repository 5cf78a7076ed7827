"""`/metrics`, and what is made of it: rules, alerts and the dashboard name metrics that exist, and promtool agrees."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pantheraml.devices import nvml
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.service import Settings, create_app
from tests import toy
from tests.ports import reserved_port
from tests.service.conftest import Server, jsonl, wait_for, wait_until
from tests.service.test_service_control import submit
from tests.service.test_service_security import keys as keys_command

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/pantheraml.json").read_text())
NAME = re.compile(r"\bpantheraml[_:][a-z0-9_:]+")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (Debian's package prometheus)",
)


def samples(text: str) -> dict[str, list[Any]]:
    """Samples of each name."""
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(text: str, name: str, **labels: str) -> float:
    (found,) = [each.value for each in samples(text)[name] if labels.items() <= each.labels.items()]
    return float(found)


@pytest.fixture
def scraped(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Metrics of a service with two GPUs."""
    driver = FakeNvml("2xH100-80GB")
    driver.gpus[0].utilization = 40
    driver.gpus[1].ecc = (0, 3)
    monkeypatch.setattr(nvml, "binding", driver)

    async def ask() -> str:
        app = create_app(Settings(tmp_path / "data", models))
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as http:
            for path in ("/v1/models", "/v1/fine_tuning/jobs/a", "/v1/fine_tuning/jobs/b", "/x", "/y"):
                await http.get(f"http://localhost{path}")
            for _ in range(100):
                text = (await http.get("http://localhost/metrics")).raise_for_status().text
                if "pantheraml_gpu_health" in samples(text):
                    break
                await asyncio.sleep(0.1)
            return text

    return asyncio.run(ask())


@pytest.mark.seed("S4-141")
def test_gpus_and_requests_are_told(scraped: str) -> None:
    assert value(scraped, "pantheraml_gpu_utilization_ratio", gpu="0") == 0.4
    assert value(scraped, "pantheraml_gpu_temperature_celsius", gpu="0") == 34
    assert value(scraped, "pantheraml_gpu_power_watts", gpu="0") == 76
    assert [value(scraped, "pantheraml_gpu_health", gpu=gpu) for gpu in "01"] == [0, 2]
    assert value(scraped, "pantheraml_gpu_in_use", gpu="1") == 0
    by_route = {
        (each.labels["route"], each.labels["status"]): each.value
        for each in samples(scraped)["pantheraml_api_request_seconds_count"]
    }
    assert by_route["/v1/models", "200"] == 1
    assert by_route["/v1/fine_tuning/jobs/{job_id}", "404"] == 2
    assert by_route["unknown", "404"] == 2, "what anybody can make up is no label"
    assert value(scraped, "pantheraml_jobs", state="running") == 0
    assert value(scraped, "pantheraml_dispatcher_alive") == 1


def expressions() -> Iterator[str]:
    for group in RULES["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query")


@pytest.mark.seed("S4-158")
def test_rules_and_dashboard_name_what_exists(scraped: str) -> None:
    declared = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE))
    known = {name for name in declared if not name.endswith("_created")}
    known |= {
        f"{name}_{part}" for name, kind in declared.items() if kind == "histogram" for part in ("bucket", "count")
    }
    known |= {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(used) > 25
    assert used <= known, used - known
    shown = {name for name in declared if name.startswith(("pantheraml_job_", "pantheraml_gpu_"))}
    unused = shown - used - {"pantheraml_job_devices", "pantheraml_job_last_step_timestamp_seconds"}
    assert not unused, "a figure that nobody looks at"


def test_panels_are_well_formed() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for index, one in enumerate(places):
        assert one["x"] + one["w"] <= 24
        for other in places[:index]:
            apart = one["y"] >= other["y"] + other["h"] or other["y"] >= one["y"] + one["h"]
            assert apart or one["x"] >= other["x"] + other["w"] or other["x"] >= one["x"] + one["w"], (one, other)


@pytest.mark.extended
@pytest.mark.seed("S4-146", partly="the demand is told and alerted on; starting machines is up to an autoscaler")
def test_a_key_sees_its_own_and_an_open_page_all(own_server: Callable[..., Server], tmp_path: Path) -> None:
    keys = {user: keys_command(tmp_path / "data", "create", user)["key"] for user in ("ann", "bob")}
    server = own_server("--cpu-slots", "1")
    file = server.client(keys["ann"]).files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    job, waiting = (submit(server.client(keys["ann"]), file, epochs=10_000) for _ in range(2))
    wait_for(server.client(keys["ann"]), job.id, "starting", "running")
    with server.http() as http:
        assert http.get("/metrics").status_code == 401
        seen = {
            user: http.get("/metrics", headers={"authorization": f"Bearer {key}"}).raise_for_status().text
            for user, key in keys.items()
        }
    assert value(seen["ann"], "pantheraml_job_devices", job_id=job.id) == 1
    assert [value(seen["bob"], f"pantheraml_devices{what}") for what in ("", "_wanted")] == [1, 2]
    assert job.id not in seen["bob"]
    assert "ann" not in seen["bob"]
    server.stop()
    server.options += ("--open-metrics",)
    server.start()
    with server.http() as http:
        told = http.get("/metrics").raise_for_status().text
        assert http.get("/v1/models").status_code == 401
    assert value(told, "pantheraml_job_info", job_id=job.id, user="ann", model="tiny") == 1
    for each in (waiting, job):
        server.client(keys["ann"]).fine_tuning.jobs.cancel(each.id)
        wait_for(server.client(keys["ann"]), each.id, "cancelled")


@needs_prometheus
@pytest.mark.seed("S4-143", "S4-144")
def test_promtool_accepts_rules_and_their_tests() -> None:
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done
        assert "SUCCESS" in done.stdout


@needs_prometheus
@pytest.mark.extended
def test_prometheus_scrapes_a_job(own_server: Callable[..., Server], tmp_path: Path) -> None:
    server = own_server("--cpu-slots", "1")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    job = submit(client, file, epochs=10_000)
    wait_for(client, job.id, "running")
    with running_prometheus(tmp_path / "prometheus", server.url) as url:

        def query(expression: str) -> Any:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=10)
            found = answer.raise_for_status().json()["data"]["result"]
            return found[0] if found else None

        step = wait_until(lambda: query(f'pantheraml_job_step{{job_id="{job.id}"}}'), pause=0.5)
        assert float(step["value"][1]) >= 1
        progress = wait_until(lambda: query("pantheraml:job_progress:ratio"), pause=0.5)
        assert progress["metric"]["job_id"] == job.id
        assert 0 < float(progress["value"][1]) < 1
        assert query('up{job="pantheraml"}')["value"][1] == "1"
        rate = wait_until(lambda: query('pantheraml:api_requests:rate5m{route="/metrics"} > 0'), pause=0.5)
        assert float(rate["value"][1]) > 0
        for expression in {target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())}:
            query(re.sub(r"\$\w+", ".*", expression))  # an error would be raised
        loss = 'pantheraml_job_train_loss{instance=~".*"}'
        assert query(loss)["metric"]["job_id"] == job.id
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, job.id, "cancelled")


@contextmanager
def running_prometheus(folder: Path, target: str) -> Iterator[str]:
    """Prometheus with our configuration, every second, and another target."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus/rules.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target.removeprefix("http://")]
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with reserved_port() as port, open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(lambda: process.poll() is not None or _is_ready(port), pause=0.2)
            assert process.poll() is None, (folder / "log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=5).is_success
    except httpx.HTTPError:
        return False

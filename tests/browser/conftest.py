"""Debian's Chromium on pages of real services. Skipped, with a line that says so, where there is none (in CI: failed).

A page that logs an error or an uncaught exception fails its test. Screenshots go to the folder that the environment
variable PANTHERAML_SCREENSHOTS names, if it is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import promises, toy
from tests.service.conftest import Server, jsonl, models, own_server, wait_for  # noqa: F401 - fixtures

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PATIENCE_MS = 90_000
"""For something that is about to come; generous, for busy hosts."""
HERE = Path(__file__).parent
OPTIONS = ("--cpu-slots", "2", "--chat-idle-seconds", "1")
EXPECTED = ("net::ERR_", "the server responded with a status of 4")
"""What Chromium itself says of a lost connection or a refusal, which the page shows in its own words."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if CHROMIUM is None and not config.getoption(promises.OPTION):
        missing = pytest.mark.skip(reason="no Chromium is installed (Debian: apt-get install chromium)")
        for item in items:
            if HERE in item.path.parents and "playwright" in getattr(item, "fixturenames", ()):
                item.add_marker(missing)


class Proxy:
    """A TCP connection to a service that can be cut, and led to the service's next process."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.up = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        with self._lock:
            self.up = False
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            if not self.up:
                return
            port = int(self.server.url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as far:
                with self._lock:
                    self._open |= {near, far}
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join()
                with self._lock:
                    self._open -= {near, far}


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def playwright() -> Iterator[Any]:
    """Per module: its event loop would disturb tests of other modules in this process."""
    assert CHROMIUM is not None, "no Chromium is installed, which CI requires (.ci/packages)"
    with playwright_api.sync_playwright() as started:
        yield started


@pytest.fixture
def complaints() -> list[str]:
    """Errors and warnings of a test's pages."""
    return []


@pytest.fixture
def new_page(playwright: Any, complaints: list[str]) -> Iterator[Callable[..., Any]]:
    """Opens pages, each in a context of its own; at the end, none may have complained."""
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and not any(known in message.text for known in EXPECTED):
            complaints.append(message.text)

    def make(**options: Any) -> Any:
        page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}).new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", note)
        page.on("pageerror", lambda err: complaints.append(str(err)))
        return page

    yield make
    browser.close()
    assert not complaints


@pytest.fixture
def page(new_page: Callable[..., Any]) -> Any:
    return new_page()


@pytest.fixture(scope="module")
def service(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    """A service without keys and with two CPU slots, for one module's tests."""
    shared = Server(tmp_path_factory.mktemp("page") / "data", models, OPTIONS).start()
    yield shared
    assert not shared.clean_up(), "a test left processes behind"


@pytest.fixture(autouse=True)
def no_job_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test that failed has left running would disturb the next one."""
    yield
    if "service" in request.fixturenames:
        with request.getfixturevalue("service").client() as client:
            for job in client.fine_tuning.jobs.list(limit=100).data:
                if job.state not in ("succeeded", "failed", "cancelled", "paused"):
                    client.fine_tuning.jobs.cancel(job.id)
                    wait_for(client, job.id, "cancelled", "succeeded", "failed")


@pytest.fixture
def proxied(service: Server) -> Iterator[Proxy]:
    proxy = Proxy(service)
    yield proxy
    proxy.close()


def start_job(server: Server, *, epochs: int = 30, suffix: str | None = None, metadata: Any = None, **own: Any) -> str:
    """Submit a job on the arithmetic rows; return its id."""
    with server.client() as client:
        train = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
        held = client.files.create(file=jsonl(toy.arithmetic(8, seed=1), "held-out.jsonl"), purpose="fine-tune").id
        named = {} if suffix is None else {"suffix": suffix}
        job = client.fine_tuning.jobs.create(
            model="tiny",
            training_file=train,
            validation_file=held,
            seed=5,
            metadata=metadata,
            hyperparameters={"n_epochs": epochs, "batch_size": 4},
            extra_body={"pantheraml": {"config": {"train": {"eval_every_steps": 20}}, **own}},
            **named,
        )
        return str(job.id)


def keys_command(data: Path, *arguments: str) -> Any:
    """What `pantheraml keys ... --json` prints; in a process of its own, since playwright has this one's event loop."""
    command = [sys.executable, "-m", "pantheraml.cli.main", "keys", *arguments, "--data-dir", str(data), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


def accessible(page: Any, view: str) -> None:
    """axe-core finds nothing against WCAG A and AA; in the dark, nothing about colors."""
    from axe_playwright_python.sync_playwright import Axe

    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    for scheme, chosen in {"light": rules, "dark": ["color-contrast"]}.items():
        page.emulate_media(color_scheme=scheme)
        results = Axe().run(page, options={"runOnly": chosen})
        assert results.violations_count == 0, f"{view}, {scheme}: {results.generate_report()}"


def shoot(page: Any, name: str) -> None:
    folder = os.environ.get("PANTHERAML_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(page.screenshot(full_page=True))  # by a path, a thread would stay

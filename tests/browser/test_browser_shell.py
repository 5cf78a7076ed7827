"""The page itself: load time, access, and what it may load."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import promises, toy
from tests.browser.conftest import accessible, keys_command, shoot
from tests.service.conftest import Server, jsonl

DASHBOARD = Path(__file__).parents[2] / "src/pantheraml/service/dashboard"
TYPESCRIPT = "typescript@7.0.2"
FIRST_PAINT_MS = 1000.0
NO_SHIFT = 0.01

PAINT = """async () => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0].startTime;
  const shift = await new Promise(resolve => {
    let sum = 0;
    new PerformanceObserver(list => { for (const entry of list.getEntries()) sum += entry.value; })
      .observe({ type: "layout-shift", buffered: true });
    setTimeout(() => resolve(sum), 300);
  });
  return { paint, shift };
}"""


def test_the_first_paint_comes_at_once_and_nothing_jumps(service: Server, page: Any) -> None:
    page.goto(service.url)
    page.get_by_role("heading", name="Devices").wait_for()
    seen = page.evaluate(PAINT)
    page.reload()
    page.get_by_role("heading", name="Devices").wait_for()
    warm = page.evaluate(PAINT)
    print(f"first paint: {seen['paint']:.0f} ms, again {warm['paint']:.0f} ms; layout shift {seen['shift']:.4f}")
    assert min(seen["paint"], warm["paint"]) <= FIRST_PAINT_MS
    assert seen["shift"] <= NO_SHIFT
    assert page.locator("script[src*=plotly]").count() == 0, "charts are loaded where there are any"
    assert page.get_by_text("No GPU: jobs run on the CPU").is_visible()
    assert page.get_by_text("Slot 1").is_visible()
    shoot(page, "overview-idle")


def test_scripts_of_this_service_alone(service: Server, page: Any, complaints: list[str]) -> None:
    with service.http() as http:
        answer = http.get("/")
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "default-src 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|javascript:", answer.text), "no script is inline"
        for name in ("../auth.py", "..%2fauth.py", "views", "views/../../auth.py", "none.js", "/etc/passwd"):
            assert http.get(f"/dashboard/{name}").status_code == 404, name
        script = http.get("/dashboard/main.js")
        assert script.headers["content-type"].startswith("text/javascript")
        again = http.get("/dashboard/main.js", headers={"If-None-Match": script.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    page.goto(service.url)
    page.get_by_role("heading", name="Devices").wait_for()
    inline = "() => { const s = document.createElement('script'); s.textContent = 'window.ran = true'; "
    assert page.evaluate(inline + "document.head.append(s); return window.ran ?? false; }") is False
    assert len(complaints) == 1
    assert "Content Security Policy" in complaints.pop()


@pytest.mark.extended
def test_sign_in_by_key(own_server: Callable[..., Server], new_page: Callable[..., Any], tmp_path: Path) -> None:
    data = tmp_path / "data"
    reading = keys_command(data, "create", "ann", "--scope", "read")
    submitting = keys_command(data, "create", "ann", "--scope", "submit")
    admin = keys_command(data, "create", "root", "--scope", "admin")
    server = own_server("--cpu-slots", "2", data=data)
    page = new_page()
    page.goto(f"{server.url}/#/jobs")
    page.get_by_label("API key").fill("pml-wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").get_by_text("This API key is not known").wait_for()
    accessible(page, "sign-in")
    shoot(page, "sign-in")
    page.get_by_label("API key").fill(reading["key"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Jobs").wait_for()
    assert page.get_by_text("ann", exact=True).is_visible()
    assert page.get_by_role("link", name="New job").count() == 0, "what the key may not do is not offered"
    _only_look(page, server, submitting["key"])

    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["expires"]) == (True, "Strict", -1)
    kept = page.evaluate("() => [document.cookie, JSON.stringify(localStorage), document.documentElement.innerHTML]")
    assert not any(secret in text for text in kept for secret in (reading["key"], cookie["value"]))
    with server.http(cookies={cookie["name"]: cookie["value"]}) as http:
        assert http.get("/session").json()["user"] == "ann"
        assert http.delete("/session").json()["error"]["code"] == "missing_header", "a form cannot sign anybody out"
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("heading", name="Sign in").wait_for()
        assert http.get("/session").json()["user"] is None, "the cookie is worth nothing any more"

    page.get_by_label("API key").fill(admin["key"])
    page.keyboard.press("Enter")
    page.get_by_role("link", name="New job").first.wait_for()
    keys_command(data, "revoke", admin["id"])
    page.get_by_role("heading", name="Sign in").wait_for()


def _only_look(page: Any, server: Server, submitting: str) -> None:
    """Nothing on any page that a key with the scope `read` may not do."""
    with server.client(submitting) as client:
        file = client.files.create(file=jsonl(toy.arithmetic(8)), purpose="fine-tune").id
        held = {"pantheraml": {"hold": True}}
        job = client.fine_tuning.jobs.create(model="tiny", training_file=file, suffix="held", extra_body=held).id
    page.goto(f"{server.url}/#/job/{job}")
    page.locator("[data-state]", has_text="paused").wait_for()
    page.get_by_role("link", name="Compare").last.wait_for()
    for offer in ("Pause", "Resume", "Cancel", "Duplicate", "Try it"):
        assert page.locator("main").get_by_text(offer, exact=True).count() == 0, offer
    for view in ("new", "playground"):  # by its address
        page.goto(f"{server.url}/#/{view}")
        page.get_by_text("this page needs one with the scope submit").wait_for()
        assert page.locator("main button, main input").count() == 0
    page.goto(f"{server.url}/#/jobs")
    page.get_by_role("cell", name="held", exact=True).wait_for()
    assert page.get_by_role("button", name="Move").count() == 0


def test_light_dark_and_keyboard(service: Server, new_page: Callable[..., Any]) -> None:
    page = new_page(color_scheme="dark")
    page.goto(service.url)
    page.get_by_role("heading", name="Devices").wait_for()
    color = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(color)
    shoot(page, "overview-dark")
    button = page.get_by_role("button", name="Theme")
    button.click()
    light = page.evaluate(color)
    assert light != dark
    page.reload()
    page.get_by_role("heading", name="Devices").wait_for()
    assert page.evaluate(color) == light, "the choice is kept"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to content"
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="New job").wait_for()
    assert page.evaluate("() => document.activeElement.id") == "main"


@pytest.mark.extended
def test_types(pytestconfig: pytest.Config) -> None:
    npx = shutil.which("npx")
    if npx is None:
        assert not pytestconfig.getoption(promises.OPTION), "CI installs npm (.ci/packages)"
        pytest.skip("no npm is installed (Debian: apt-get install npm)")
    command = [npx, "--yes", "--package", TYPESCRIPT, "--", "tsc", "--noEmit", "--project", "tests/browser"]
    done = subprocess.run(command, cwd=DASHBOARD.parents[3], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_text_is_never_markup() -> None:
    """The ways by which text becomes elements are not used at all."""
    ways = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser")
    for path in DASHBOARD.rglob("*.js"):
        assert not ways.search(path.read_text("utf-8")), path

"""Sessions of the page, without a browser: a cookie is not enough to change something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.service.conftest import Server
from tests.service.test_service_security import keys as keys_command


def test_a_cookie_alone_changes_nothing(own_server: Callable[..., Server], tmp_path: Path) -> None:
    """What a form of another page could send."""
    key = keys_command(tmp_path / "data", "create", "ann", "--scope", "submit")["key"]
    server = own_server(data=tmp_path / "data")
    with server.http() as http:
        refused = http.post("/session", headers={"Authorization": f"Bearer {key}"})
        assert refused.json()["error"]["code"] == "missing_header"
        header = {"X-Requested-With": "pantheraml"}
        http.post("/session", headers={"Authorization": f"Bearer {key}", **header}).raise_for_status()
        assert http.get("/v1/fine_tuning/jobs").status_code == 200
        for method, path in (("POST", "/v1/fine_tuning/jobs/x/cancel"), ("DELETE", "/v1/files/x")):
            assert http.request(method, path).json()["error"]["code"] == "missing_header"
            assert http.request(method, path, headers=header).status_code == 404
        http.cookies.clear()
        assert http.get("/v1/fine_tuning/jobs").status_code == 401

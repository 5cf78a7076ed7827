"""Uploads by the real hub client to a server on loopback that answers like the hub."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.models.saving.hub_upload import upload_folder
from tests.unit.models.conftest import TinyModel


class Hub(ThreadingHTTPServer):
    """Takes small files inside of the commit, as the hub does; keeps them, and who sent them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.repos: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.refuse = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        hub.tokens.add(self.headers.get("authorization"))
        path = self.path.partition("?")[0]
        if hub.refuse:
            self._answer(403, {"error": "you may not"})
        elif path == "/api/repos/create":
            hub.repos.append(json.loads(body))
            self._answer(200, {"url": f"{hub.url}/me/model", "name": "me/model"})
        elif "/preupload/" in path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                if line["key"] == "header":
                    hub.messages.append(line["value"]["summary"])
            url = f"{hub.url}/me/model/commit/{'a' * 40}"
            self._answer(200, {"success": True, "commitOid": "a" * 40, "commitUrl": url})

    def do_GET(self) -> None:  # asked about the repository
        status = 404 if self.server.refuse else 200
        self._answer(status, {"id": "me/model", "sha": "b" * 40, "siblings": []})

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()
        thread.join()


def test_a_merged_model_is_uploaded(hub: Hub, tiny_model: TinyModel) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu")
    adapted: Any = FastLanguageModel.get_peft_model(model, r=4)
    address = adapted.push_to_hub_merged("me/model", tokenizer, token="hf_key", private=True, commit_message="Mine")
    assert address == f"{hub.url}/me/model/commit/{'a' * 40}"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.files.keys()
    weights = load(hub.files["model.safetensors"])
    assert not any("lora" in name for name in weights)
    assert "model.layers.0.mlp.up_proj.weight" in weights
    (repo,) = hub.repos
    assert repo["name"] == "model"
    assert repo.get("private") is True or repo.get("visibility") == "private"  # as older and newer clients say it
    assert (hub.tokens, hub.messages) == ({"Bearer hf_key"}, ["Mine"])


def test_refused_and_unreachable(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(ConfigError, match=r"'bad name!' is not the name of a hub repository"):
        upload_folder(tmp_path, "bad name!", token=None, private=None, message="m")
    hub.refuse = True
    with pytest.raises(ModelError, match=r"Uploading to me/model failed: (?s:.*)token"):
        upload_folder(tmp_path, "me/model", token="hf_key", private=None, message="m")
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{nobody_listens.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"hub cannot be reached to upload me/model(?s:.*)save to a folder"):
            upload_folder(tmp_path, "me/model", token="hf_key", private=None, message="m")
    assert hub.files == {}

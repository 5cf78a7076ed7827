"""A form that arrives: what is around its file is bounded as well."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import Request

from pantheraml.service import multipart
from pantheraml.service.errors import ApiError
from pantheraml.service.multipart import received

FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%s\r\n--b--\r\n'
LIMIT = 1 << 20
BLOCK = bytes(1 << 20)


class Sender:
    """A client that never stops."""

    def __init__(self, first: bytes, then: bytes) -> None:
        self.blocks = itertools.chain([first], itertools.repeat(then))
        self.sent = 0

    async def receive(self) -> dict[str, Any]:
        block = next(self.blocks)
        self.sent += len(block)
        return {"type": "http.request", "body": block, "more_body": True}


@pytest.mark.parametrize("first", [FILE % b"rows", b"\r\n", b"--b\r\ncontent-disposition: form-data"])
def test_a_form_that_never_ends_is_refused(tmp_path: Path, first: bytes) -> None:
    """After its end, before its beginning, and in a header."""
    sender = Sender(first, BLOCK)
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"multipart/form-data; boundary=b")]}

    async def upload() -> None:
        async with received(Request(scope, sender.receive), tmp_path, file_field="file", limit=LIMIT):
            pytest.fail("accepted")

    with pytest.raises(ApiError) as caught:
        anyio.run(upload)
    assert caught.value.status in (400, 413)
    assert sender.sent <= LIMIT + multipart._FORM_BYTES + len(BLOCK) + len(first)
    assert not list(tmp_path.iterdir())

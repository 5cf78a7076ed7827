"""Receive a multipart form whose one file goes straight to disk.

A web framework's form parser writes to a temporary folder without a limit, and the file is copied from there. Here the
limit is enforced while the body arrives, one block is in memory, and a broken upload leaves nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pantheraml.base.private import open_private
from pantheraml.service.errors import ApiError

_FIELD_BYTES = 64 << 10
_FIELDS = 100
_FORM_BYTES = 8 << 20
"""Around the file: fields, headers, and what the parser skips before the first boundary and after the last."""
_BLOCK_BYTES = 1 << 20


@dataclass
class ReceivedForm:
    """A form that has arrived: its fields, and its file at `path`."""

    path: Path
    filename: str | None = None
    size: int = 0
    sha256: str = ""
    fields: dict[str, str] = field(default_factory=dict)


@dataclass
class _Form:
    """Callbacks of the parser; what it finds."""

    upload: ReceivedForm
    file_field: str
    output: BinaryIO
    limit: int
    digest: Any = field(default_factory=hashlib.sha256)
    pending: list[bytes] = field(default_factory=list)
    complete: bool = False
    _header: tuple[bytes, bytes] = (b"", b"")
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _name: str = ""
    _value: bytearray = field(default_factory=bytearray)
    _in_file: bool = False

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": lambda data, start, end: self._header_part(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._header_part(1, data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        self._headers, self._header, self._in_file = {}, (b"", b""), False

    def _header_part(self, index: int, data: bytes) -> None:
        name, value = self._header
        self._header = (name + data, value) if index == 0 else (name, value + data)

    def _header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = (b"", b"")

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._name == self.file_field
        if self._in_file:
            if self.upload.filename is not None:
                raise ApiError(400, f"The form has `{self.file_field}` twice.", param=self.file_field)
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            plain = os.path.basename(name.replace("\\", "/")).replace("\0", "")
            self.upload.filename = plain[:255] or "upload"
        elif len(self.upload.fields) >= _FIELDS:
            raise ApiError(400, "The form has too many fields.")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.upload.size += end - start
            if self.upload.size > self.limit:
                raise too_large(self.limit)
            self.pending.append(data[start:end])
        elif len(self._value) + end - start > _FIELD_BYTES:
            raise ApiError(400, f"The field `{self._name[:100]}` is too long.", param=self._name[:100])
        else:
            self._value += data[start:end]

    def _part_end(self) -> None:
        if not self._in_file:
            self.upload.fields[self._name] = self._value.decode("utf-8", "replace")
            self._value.clear()

    def _end(self) -> None:
        self.complete = True

    def flush(self) -> None:
        for part in self.pending:
            self.digest.update(part)
            self.output.write(part)
        self.pending.clear()


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"The upload is larger than the {limit:,} bytes allowed here.", code="too_large")


@asynccontextmanager
async def received(request: Request, folder: Path, *, file_field: str, limit: int) -> AsyncIterator[ReceivedForm]:
    """Yield the form of a request. The file is removed at the end of the block unless the block has moved it."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(415, "Send the file as multipart/form-data.", code="unsupported_media_type")
    upload = ReceivedForm(folder / secrets.token_hex(16))
    try:
        with open(open_private(upload.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as output:
            await _receive(request, _Form(upload, file_field, output, limit), options[b"boundary"])
        if upload.filename is None:
            raise ApiError(400, f"The form has no file `{file_field}`.", param=file_field)
        yield upload
    finally:
        upload.path.unlink(missing_ok=True)


async def _receive(request: Request, form: _Form, boundary: bytes) -> None:
    waiting = total = 0
    try:
        parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
        async for block in request.stream():
            total += len(block)
            if total > form.limit + _FORM_BYTES:
                raise too_large(form.limit)
            parser.write(block)
            waiting += len(block)
            if waiting >= _BLOCK_BYTES:
                await asyncio.to_thread(form.flush)
                waiting = 0
        parser.finalize()
    except FormParserError as err:
        raise ApiError(400, "The body is not a valid multipart form.") from err
    if not form.complete:
        raise ApiError(400, "The upload ended before the form was complete.", code="incomplete_upload")
    await asyncio.to_thread(form.flush)
    await asyncio.to_thread(os.fsync, form.output.fileno())
    form.upload.sha256 = form.digest.hexdigest()

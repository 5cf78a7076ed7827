"""The content of a file as a response, whole or a range of its bytes."""

from __future__ import annotations

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from pantheraml.service.errors import error_response

_REFUSED = {
    400: "The header Range is malformed: it must be such as `bytes=0-99`, or `bytes=-100` for the end.",
    416: "The file has no such range.",
}


class StoredFile(FileResponse):
    """Refuses a range in our form of errors; the framework answers with a line of text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: Message | None = None

        async def pass_on(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] in _REFUSED:
                refused = message
            elif refused is None:
                await send(message)

        await super().__call__(scope, receive, pass_on)
        if refused is not None:
            answer = error_response(refused["status"], _REFUSED[refused["status"]], param="Range", code="invalid_range")
            size = dict(refused["headers"]).get(b"content-range")
            if size is not None:
                answer.headers["content-range"] = size.decode()
            await answer(scope, receive, send)

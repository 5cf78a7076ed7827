"""Forward chat requests to the operator's inference server (`--inference-url`), such as vLLM, and return its answers.

Only the body is forwarded: the user's key stays here, and the server's own key, if it has one, goes to that server
alone. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import httpx2
from fastapi.responses import Response, StreamingResponse

from pantheraml.base import log
from pantheraml.service.chat.queue import LOOK_SECONDS, cancelled, unavailable
from pantheraml.service.errors import ApiError

logger = log.get(__name__)

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 600.0
_AGAIN_SECONDS = 10.0
_KEPT_HEADERS = ("content-type", "retry-after")


class Forwarder:
    def __init__(self, url: str, key: str | None) -> None:
        """`url`: up to `/v1`."""
        self._url = f"{url.rstrip('/')}/chat/completions"
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        timeout = httpx2.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False, follow_redirects=False)

    async def __aenter__(self) -> Forwarder:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def answer(self, body: dict[str, Any], has_gone: Callable[[], Awaitable[bool]]) -> Response:
        """Return the server's answer, streamed. `has_gone`: whether the client has disconnected."""
        request = self._client.build_request("POST", self._url, json=body)
        sending = asyncio.create_task(self._client.send(request, stream=True))
        try:
            while not (await asyncio.wait({sending}, timeout=LOOK_SECONDS))[0]:
                if await has_gone():
                    raise cancelled()
            response = await sending
        except httpx2.HTTPError as err:
            logger.warning("the inference server does not answer: %r", err)
            raise unavailable("The inference server does not answer.", _AGAIN_SECONDS) from err
        finally:
            sending.cancel()
        status = response.status_code
        if status in (401, 403) or 300 <= status < 400:  # about this service, not about the client
            await response.aclose()
            logger.error("the inference server answers %d; check --inference-url and PANTHERAML_INFERENCE_KEY", status)
            raise unavailable("The inference server refuses requests of this service.", _AGAIN_SECONDS)
        if status == 404:
            await response.aclose()
            message = f"The inference server does not have the model `{str(body['model'])[:200]}`."
            raise ApiError(404, message, param="model", code="model_not_found")
        headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
        return StreamingResponse(_content(response), status, headers)


async def _content(response: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for block in response.aiter_bytes():
            yield block
    finally:
        await response.aclose()  # tells the server if the client has disconnected

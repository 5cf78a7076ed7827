"""Error responses: OpenAI's shape, a request id, and no traceback.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

The SDK repeats 408, 409, 429 and 5xx by itself, so a refusal says `x-should-retry: false`, and a request to create
something never answers 409.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from pantheraml.base import log
from pantheraml.base.errors import PantheraError
from pantheraml.base.text import printable

logger = log.get(__name__)

DISK_FULL = 507
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error response: its status, and the parameter at fault.

    A subclass of HTTPException, since FastAPI answers 400 to any other exception raised while it reads a body.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}
        self.rows: list[dict[str, Any]] = []
        """Invalid rows of a file."""


def not_found(what: str, name: str, *, param: str | None = None) -> ApiError:
    return ApiError(404, f"No such {what}: {name[:100]}", param=param, code="not_found")


def refusal(err: PantheraError, *, param: str | None = None) -> ApiError:
    """Return the response for a library error that the request caused."""
    message = err.what if err.fix is None else f"{err.what} {err.fix}"
    return ApiError(400, printable(message), param=param, code=type(err).__name__)


def invalid_values(err: ValidationError) -> ApiError:
    """Return the response for values that passed the request's own model."""
    first = err.errors()[0]
    return _invalid_value(first["loc"], first["msg"])


def _invalid_value(place: Sequence[int | str], message: str) -> ApiError:
    param = ".".join(map(str, place)) or None
    message = printable(message.removeprefix("Value error, "))
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_request")


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    rows: Sequence[dict[str, Any]] = (),
) -> JSONResponse:
    body = error_object(status, message, param=param, code=code)
    if rows:
        body["error"]["rows"] = list(rows)
    return JSONResponse(body, status, {"x-should-retry": "true" if status in (429, 503) else "false"})


class AnsweringRoute(APIRoute):
    """A route whose errors have this form in any application, even one that has not called `install`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as err:
                return await _refused(request, err)
            except RequestValidationError as err:
                return await _invalid(request, err)
            except PantheraError as err:
                return await _library(request, err)

        return answer


def install(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(PantheraError, _library)


async def _refused(request: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, ApiError)
    response = error_response(err.status, err.message, param=err.param, code=err.code, rows=err.rows)
    response.headers.update(err.headers)
    return response


async def _invalid(request: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, RequestValidationError)
    first: dict[str, Any] = err.errors()[0]
    if first["type"] == "json_invalid":
        return error_response(400, "The body is not valid JSON.", code="invalid_request")
    if tuple(first["loc"]) == ("body",):  # nothing in it is to blame, but the whole
        if first["type"] == "missing":
            return error_response(400, "The request has no body; send JSON.", code="invalid_request")
        if isinstance(first.get("input"), bytes):  # it was not even read, whatever is in it
            message = "Send the body as JSON, with the header `Content-Type: application/json`."
            return error_response(415, message, code="unsupported_media_type")
    refused = _invalid_value(first["loc"][1:], first["msg"])  # the first says where: body, query, header
    return error_response(400, refused.message, param=refused.param, code=refused.code)


async def _http(request: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, HTTPException)
    response = error_response(err.status_code, str(err.detail))
    response.headers.update(err.headers or {})
    if err.status_code == 405:  # the framework names the methods of one of the routes alone
        response.headers["allow"] = ", ".join(_methods(request)) or response.headers.get("allow", "")
    return response


def _methods(request: Request) -> list[str]:
    """Return the HTTP methods that the request's path allows, from the OpenAPI description."""
    described: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    for part in ("[^/]+", ".+"):  # a name of a model may hold a slash
        for template, operations in described.items():
            if re.fullmatch(re.sub(r"\{\w+\}", part, template), request.url.path):
                return sorted(method.upper() for method in operations)
    return []


async def _library(request: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, PantheraError)
    return await _refused(request, refusal(err))

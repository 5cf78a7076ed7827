"""Map failures of a call to our exceptions, and decide whether to retry."""

from __future__ import annotations

import json
import random
from typing import Any, TypeVar

import httpx2
from pydantic import ValidationError

from pantheraml.base.errors import (
    ConfigError,
    DataError,
    PantheraError,
    ServiceError,
    ServiceUnavailableError,
    error_classes,
)
from pantheraml.base.text import printable
from pantheraml.client.calls import Call

Answer = TypeVar("Answer")

AGAIN = frozenset({429, 502, 503, 504})
_LONGEST_PAUSE = 30.0
_DATA_CODES = frozenset({"invalid_file_format"})


def unreachable(err: httpx2.HTTPError, url: str) -> ServiceUnavailableError:
    why = str(err) or type(err).__name__
    return ServiceUnavailableError(
        f"The service at {printable(url)} does not answer: {printable(why)}.",
        fix="Check that `pantheraml serve` runs, and --url or PANTHERAML_URL.",
    )


def refused(status: int, content: bytes, request_id: str | None) -> PantheraError:
    """Return the exception for an error response: of the class that the service names, if it does."""
    message, code, param = _told(content)
    message = printable(message or f"The service answered {status}.")
    if status in (401, 403) and code in ("invalid_api_key", "insufficient_scope"):
        fix = "Set PANTHERAML_API_KEY to a key with the right scope (`pantheraml keys create`)."
        return ServiceError(message, status=status, code=code, param=param, request_id=request_id, fix=fix)
    if status in AGAIN:
        return ServiceUnavailableError(message, fix="Try again later.")
    if code in _DATA_CODES:
        return DataError(message)
    known = error_classes().get(code or "")
    if known is not None and known is not PantheraError and not issubclass(known, ServiceError):
        return known(message)
    if code == "invalid_request":
        return ConfigError(message)
    return ServiceError(message, status=status, code=code, param=param, request_id=request_id)


def _told(content: bytes) -> tuple[str | None, str | None, str | None]:
    try:
        error: Any = json.loads(content)["error"]
        values = [error.get(name) for name in ("message", "code", "param")]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None, None
    message, code, param = (value if isinstance(value, str) else None for value in values)
    return message, code, param


def parsed(call: Call[Answer], response: httpx2.Response) -> Answer:
    """Return the parsed response. ServiceError if it is not one of this service's."""
    try:
        return call.parse(response.json())
    except (ValueError, KeyError, TypeError, ValidationError) as err:
        raise ServiceError(
            f"{printable(str(response.request.url))} did not answer as expected.",
            status=response.status_code,
            fix="Check that the URL is that of `pantheraml serve`, and that its version fits this one.",
        ) from err


def pause_before(attempt: int, retry_after: str | None = None) -> float:
    """Return the seconds to wait before the next attempt: exponential backoff, or what the service asks for."""
    if retry_after is not None and retry_after.isdigit():
        return min(_LONGEST_PAUSE, float(retry_after))
    spread: float = random.uniform(0.75, 1.25)
    return min(_LONGEST_PAUSE, float(0.25 * 2**attempt)) * spread

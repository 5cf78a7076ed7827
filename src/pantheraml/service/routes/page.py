"""The dashboard at `/`: the files of `service/dashboard` and plotly.js of the installed wheel. No build step.

They are read once and served from memory, compressed where the browser accepts it. The policy allows scripts of this
service alone, neither inline nor evaluated; styles are looser, since plotly.js writes some into its elements.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

from pantheraml.base.errors import MissingExtraError
from pantheraml.service.errors import not_found

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "dashboard"
PLOTLY = "plotly.js"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_TYPES[".js"] = "text/javascript; charset=utf-8"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cross-origin-opener-policy": "same-origin",
    "vary": "accept-encoding",
}
_CACHE = {PLOTLY: "private, max-age=86400"}
"""Other files are revalidated each time, with 304 if unchanged."""


@dataclass(frozen=True)
class _Asset:
    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@router.get("/")
async def index(request: Request) -> Response:
    return await _answer(request, "index.html")


@router.get("/favicon.ico")
async def icon(request: Request) -> Response:
    return await _answer(request, "icon.svg")


@router.get("/dashboard/{name:path}")
async def asset(request: Request, name: str) -> Response:
    return await _answer(request, name)


async def _answer(request: Request, name: str) -> Response:
    if name not in _paths():
        raise not_found("page", name)
    found = await asyncio.to_thread(_read, name)
    headers = {**_HEADERS, "etag": found.etag, "cache-control": _CACHE.get(name, "no-cache")}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(found.compressed, media_type=found.media_type, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@functools.cache
def _paths() -> dict[str, Path]:
    """File of each name: a request's name is looked up here and never made into a path."""
    paths = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.suffix in _TYPES}
    return {**paths, PLOTLY: _plotly()}


def _plotly() -> Path:
    """Found without importing plotly, which takes a quarter of a second."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise MissingExtraError("The dashboard needs plotly.", fix="Install it with: pip install plotly")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


@functools.cache
def _read(name: str) -> _Asset:
    path = _paths()[name]
    content = path.read_bytes()
    etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _Asset(content, gzip.compress(content, 6), _TYPES[path.suffix], etag)

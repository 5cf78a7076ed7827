"""Address of the service, and the httpx2 settings of both clients."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from pantheraml import __version__
from pantheraml.base import env
from pantheraml.base.errors import ConfigError
from pantheraml.base.text import printable

DEFAULT_URL = "http://127.0.0.1:8000"
RETRIES = 4
TIMEOUT = httpx2.Timeout(60.0, connect=10.0)
"""A live stream sends something every 15 seconds."""


@dataclass(frozen=True)
class Connection:
    url: str
    key: str | None

    def options(self) -> dict[str, Any]:
        headers = {"user-agent": f"pantheraml/{__version__}"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": TIMEOUT,
            "trust_env": not _is_loopback(self.url),  # a proxy cannot reach this machine's loopback ports
        }


def connection(url: str | None, key: str | None) -> Connection:
    """None: PANTHERAML_URL, else this machine's port 8000; PANTHERAML_API_KEY, else no key."""
    chosen = (url or env.service_url() or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    parts = urlsplit(chosen)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{printable(chosen)!r} is not the URL of a service.", fix=f"Use one such as {DEFAULT_URL}.")
    secret = (key or env.api_key() or "").strip() or None
    if secret is not None and not (secret.isascii() and secret.isprintable()):
        raise ConfigError("The API key holds characters that no key has.", fix="Check PANTHERAML_API_KEY.")
    return Connection(chosen, secret)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

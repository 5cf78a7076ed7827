"""Check the target of a webhook.

A user chooses the URL and the service calls it: without a check, a user could reach this machine or its private network
(SSRF). So the name is resolved here, all of its addresses must be public, and the connection goes to the address that
was checked, even if the name resolves to another one a moment later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

_OPTION = "--allow-private-webhooks"
_EMBEDDED = (
    ipaddress.IPv6Network("64:ff9b::/96"),
    ipaddress.IPv6Network("2002::/16"),
    ipaddress.IPv6Network("2001::/32"),
)
"""Networks whose addresses embed IPv4 addresses: NAT64, 6to4, Teredo."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TargetError(Exception):
    """The URL cannot be used; the message says why."""


@dataclass(frozen=True)
class Target:
    url: str
    """The URL with the address in place of the name."""
    host: str
    """Header Host."""
    name: str
    """Host name that the certificate must match."""


def check_url(url: str, *, allow_private: bool) -> None:
    """TargetError unless the URL is well-formed."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as err:
        raise TargetError("`url` is not a URL.") from err
    if parts.scheme != "https" and not (parts.scheme == "http" and allow_private):
        raise TargetError("`url` must begin with https://.")
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        raise TargetError("`url` is not a URL.")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise TargetError("`url` must have neither a user nor a fragment.")


async def resolve(url: str, *, allow_private: bool) -> Target:
    """TargetError if the name cannot be resolved, or one of its addresses is not public."""
    check_url(url, allow_private=allow_private)
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        raise TargetError(f"The name {parts.hostname} cannot be resolved.") from err
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    private = [address for address in addresses if not is_public(address)]
    if private and not allow_private:
        found_one = f"{parts.hostname} is {private[0]}, which is not a public address"
        raise TargetError(f"{found_one}; the operator can allow such with {_OPTION}.")
    address = f"[{addresses[0]}]" if addresses[0].version == 6 else str(addresses[0])
    path = parts.path or "/"
    pinned = f"{parts.scheme}://{address}:{port}{path}" + (f"?{parts.query}" if parts.query else "")
    return Target(pinned, parts.netloc, str(parts.hostname))


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in _EMBEDDED):
            return False
    return address.is_global and not address.is_multicast

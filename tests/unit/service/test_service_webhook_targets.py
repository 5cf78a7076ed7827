"""Which addresses webhooks may reach, and that the connection goes to the one that was checked."""

from __future__ import annotations

import ipaddress

import anyio
import pytest

from pantheraml.service.store.tables import Event
from pantheraml.service.store.webhooks import type_of
from pantheraml.service.webhooks.targets import TargetError, is_public, resolve


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_the_connection_goes_to_the_checked_address() -> None:
    async def check() -> None:
        target = await resolve("https://93.184.215.14/a?b=c", allow_private=False)
        assert (target.url, target.host) == ("https://93.184.215.14:443/a?b=c", "93.184.215.14")
        local = await resolve("http://localhost:81", allow_private=True)
        assert local.url in ("http://127.0.0.1:81/", "http://[::1]:81/")
        assert (local.host, local.name) == ("localhost:81", "localhost")
        with pytest.raises(TargetError, match="cannot be resolved"):
            await resolve("https://no-such-name.invalid/", allow_private=False)

    anyio.run(check)


@pytest.mark.parametrize(
    ("kind", "data", "told"),
    [
        ("state", {"state": "succeeded"}, "fine_tuning.job.succeeded"),
        ("state", {"state": "running"}, None),
        ("alert.stall", {"active": True}, "fine_tuning.job.stalled"),
        ("alert.stall", {"active": False}, None),
        ("alert.divergence", {"active": True}, "fine_tuning.job.diverged"),
        ("alert.gpu_health", {"active": True}, "fine_tuning.job.gpu_unhealthy"),
        ("train.step", {"loss": 1.0}, None),
    ],
)
def test_what_is_told(kind: str, data: dict[str, object], told: str | None) -> None:
    assert type_of(Event(kind=kind, data=data)) == told

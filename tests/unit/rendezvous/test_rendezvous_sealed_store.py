"""Store values without the run token are rejected, and stores listen on their own address only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from pantheraml.base.env import ProcessRank, StoreAddress
from pantheraml.base.errors import LaunchError
from pantheraml.rendezvous.join_store import NODES, join_store
from pantheraml.rendezvous.sealed_store import SealedStore
from tests.ports import reserved_port

PATIENCE = 100


@pytest.fixture
def address() -> Iterator[StoreAddress]:
    with reserved_port() as port:
        yield StoreAddress("127.0.0.1", port, hosted_by_agent=False, attempt=0)


@pytest.fixture
def memory() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def listening() -> set[str]:
    """Addresses at which this process listens."""
    return {one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}


def alone(address: StoreAddress, **settings: Any) -> SealedStore:
    return join_store(ProcessRank(0, 0, 1), address, timeout_seconds=PATIENCE, **settings)


def test_store_listens_on_its_own_address_only(address: StoreAddress) -> None:
    before = listening()
    first = alone(address)
    second = alone(replace(address, attempt=1))  # the same store
    assert listening() == before | {"127.0.0.1"}
    first.set("word", "told")
    del first
    assert second.raw.num_keys() > 0, "it lives as long as its last host"
    del second
    assert listening() == before


def test_file_store_opens_no_port(tmp_path: Path) -> None:
    before = listening()
    store = alone(StoreAddress("", 0, hosted_by_agent=True, attempt=0, file=tmp_path / "store"))
    store.set("word", "told")
    assert store.get("word") == b"told"
    with pytest.raises(dist.DistStoreError):
        store.wait(["missing"], timedelta(seconds=0.1))
    assert listening() == before


def test_foreign_address_cannot_host_the_store(address: StoreAddress) -> None:
    with pytest.raises(LaunchError, match=r"cannot host the store at 192\.0\.2\.1: .*") as raised:
        alone(replace(address, host="192.0.2.1"), max_retries=0)
    assert "an address of a network interface" in str(raised.value)


def test_host_that_resolves_to_loopback_is_rejected_for_multi_node(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts maps the host name to loopback, which is fine on a single node."""
    real = socket.getaddrinfo

    def own_name_is_loopback(host: str, *arguments: Any, **named: Any) -> Any:
        return real("127.0.1.1" if host == "node0" else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", own_name_is_loopback)
    with pytest.raises(LaunchError, match=r"node0, from --rdzv, resolves to 127\.0\.1\.1 on its own node"):
        alone(replace(address, host="node0"), who=NODES)


def test_value_with_a_wrong_hmac_is_rejected(memory: Any) -> None:
    ours = SealedStore(memory, "run", "secret")
    ours.set("verdict", "{}")
    assert ours.get("verdict") == b"{}"
    for forger in (SealedStore(memory, "run", "guess"), SealedStore(memory, "run", None)):
        forger.set("verdict", '{"exit_code": 0}')
        with pytest.raises(LaunchError, match="`verdict` in the store was not written by a process of this run"):
            ours.get("verdict")


@pytest.mark.parametrize("found", [b"", b"{}", b"x" * 64])
def test_value_without_hmac_is_rejected(memory: Any, found: bytes) -> None:
    for token in ("secret", None):
        store = SealedStore(memory, "run", token)
        store.raw.set("word", found.decode())
        with pytest.raises(LaunchError):
            store.get("word")


def test_value_copied_to_another_key_is_rejected(memory: Any) -> None:
    ours = SealedStore(memory, "run/0", "secret")
    ours.set("failed", "")
    seen = ours.raw.get("failed").decode()
    for other, key in ((ours, "verdict"), (SealedStore(memory, "run/1", "secret"), "failed")):
        other.raw.set(key, seen)
        with pytest.raises(LaunchError):
            other.get(key)


@pytest.mark.parametrize("tokens", [("one", "two"), ("one", None)])
def test_different_run_token_is_reported(address: StoreAddress, tokens: tuple[str, str | None]) -> None:
    def come(rank: int) -> SealedStore:
        return join_store(ProcessRank(rank, 0, 2), address, timeout_seconds=PATIENCE, who=NODES, token=tokens[rank])

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(come, rank) for rank in (0, 1)]
        with pytest.raises(LaunchError, match=rf"Node 1 at 127\.0\.0\.1:{address.port} has a different run token"):
            both[0].result()
        with pytest.raises(LaunchError, match=r"Node 0 at .* has a different run token|lost the store"):
            both[1].result()

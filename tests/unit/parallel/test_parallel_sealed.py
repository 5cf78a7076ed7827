"""Who may say something in a store that others reach: nobody without the run token, and no store listens elsewhere."""

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
from pantheraml.parallel.rendezvous import MACHINES, meet
from pantheraml.parallel.sealed import SealedStore
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
    return meet(ProcessRank(0, 0, 1), address, timeout_seconds=PATIENCE, **settings)


def test_a_store_listens_at_its_own_address_and_nowhere_else(address: StoreAddress) -> None:
    before = listening()
    first = alone(address)
    second = alone(replace(address, attempt=1))  # the same store
    assert listening() == before | {"127.0.0.1"}
    first.set("word", "told")
    del first
    assert second.raw.num_keys() > 0, "it lasts as long as the last who hosts it"
    del second
    assert listening() == before


def test_a_file_needs_no_port(tmp_path: Path) -> None:
    before = listening()
    store = alone(StoreAddress("", 0, hosted_by_agent=True, attempt=0, file=tmp_path / "store"))
    store.set("word", "told")
    assert store.get("word") == b"told"
    with pytest.raises(dist.DistStoreError):
        store.wait(["missing"], timedelta(seconds=0.1))
    assert listening() == before


def test_an_address_of_somebody_else(address: StoreAddress) -> None:
    with pytest.raises(LaunchError, match=r"cannot host the store at 192\.0\.2\.1: .*") as raised:
        alone(replace(address, host="192.0.2.1"), max_retries=0)
    assert "an address of a network interface" in str(raised.value)


def test_a_name_that_leads_to_loopback_is_no_place_for_other_nodes(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's own /etc/hosts has it. On one node it is fine."""
    real = socket.getaddrinfo

    def own_name_is_loopback(host: str, *arguments: Any, **named: Any) -> Any:
        return real("127.0.1.1" if host == "node0" else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", own_name_is_loopback)
    with pytest.raises(LaunchError, match=r"node0, from --rdzv, leads to 127\.0\.1\.1 on its own node"):
        alone(replace(address, host="node0"), who=MACHINES)


def test_a_value_without_the_seal_of_this_run_is_not_used(memory: Any) -> None:
    ours = SealedStore(memory, "run", "secret")
    ours.set("verdict", "{}")
    assert ours.get("verdict") == b"{}"
    for forger in (SealedStore(memory, "run", "guess"), SealedStore(memory, "run", None)):
        forger.set("verdict", '{"exit_code": 0}')
        with pytest.raises(LaunchError, match="`verdict` in the store was not written by a process of this run"):
            ours.get("verdict")


@pytest.mark.parametrize("found", [b"", b"{}", b"x" * 64])
def test_values_that_have_no_seal_at_all(memory: Any, found: bytes) -> None:
    for token in ("secret", None):
        store = SealedStore(memory, "run", token)
        store.raw.set("word", found.decode())
        with pytest.raises(LaunchError):
            store.get("word")


def test_a_true_value_is_not_true_elsewhere(memory: Any) -> None:
    ours = SealedStore(memory, "run/0", "secret")
    ours.set("failed", "")
    seen = ours.raw.get("failed").decode()
    for other, key in ((ours, "verdict"), (SealedStore(memory, "run/1", "secret"), "failed")):
        other.raw.set(key, seen)
        with pytest.raises(LaunchError):
            other.get(key)


@pytest.mark.parametrize("tokens", [("one", "two"), ("one", None)])
def test_who_has_another_token_is_told_at_once(address: StoreAddress, tokens: tuple[str, str | None]) -> None:
    def come(rank: int) -> SealedStore:
        return meet(ProcessRank(rank, 0, 2), address, timeout_seconds=PATIENCE, who=MACHINES, token=tokens[rank])

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(come, rank) for rank in (0, 1)]
        with pytest.raises(LaunchError, match=rf"Machine 1 at 127\.0\.0\.1:{address.port} has another run token"):
            both[0].result()
        with pytest.raises(LaunchError, match=r"Machine 0 at .* has another run token|lost the store"):
            both[1].result()

"""Rendezvous, and every way it can fail: an error within the timeout that names what is missing.

Ranks are threads here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from pantheraml.base.env import ProcessRank, StoreAddress
from pantheraml.base.errors import DeviceError, LaunchError
from pantheraml.rendezvous.device_vote import Agreement, agree_on_devices, device_problem
from pantheraml.rendezvous.join_store import NODES, interface_towards, join_store
from pantheraml.rendezvous.one_node import loopback_interface
from tests.ports import reserved_port

PATIENCE = 100
"""Timeout in seconds for ranks that do join."""


def place(rank: int, world_size: int = 2) -> ProcessRank:
    return ProcessRank(rank=rank, local_rank=rank, world_size=world_size)


@pytest.fixture
def address() -> Iterator[StoreAddress]:
    with reserved_port() as port:
        yield StoreAddress("127.0.0.1", port, hosted_by_agent=False, attempt=0)


@pytest.fixture(params=["port", "file"])
def either(request: pytest.FixtureRequest, address: StoreAddress, tmp_path: Path) -> StoreAddress:
    """A TCPStore hosted by rank 0, or a FileStore."""
    return address if request.param == "port" else StoreAddress("", 0, True, 0, file=tmp_path / "store")


@pytest.fixture
def foreign_listener() -> Iterator[StoreAddress]:
    """A port where another program listens and never responds."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield StoreAddress("127.0.0.1", server.getsockname()[1], hosted_by_agent=False, attempt=0)


def on_ranks(count: int, work: Callable[[int], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(work, rank) for rank in range(count)]


def failure(rank: int, where: StoreAddress, **options: Any) -> str:
    """Error text of a lone rank, which must not hang."""
    begin = time.monotonic()
    with pytest.raises(LaunchError) as raised:
        join_store(place(rank), where, **options)
    assert time.monotonic() - begin < 50
    return str(raised.value)


def test_all_ranks_share_one_store_and_may_join_again(either: StoreAddress) -> None:
    def work(rank: int) -> tuple[list[str], list[Any]]:
        seen = []
        stores = []  # kept until all are done, as a process that hosts one would
        for turn in range(2):
            store = join_store(place(rank, 3), either, timeout_seconds=PATIENCE)
            stores.append(store)
            assert not store.check([f"word/{rank}"]), "each join starts with an empty store"
            store.set(f"word/{rank}", f"{turn}-{rank}")
            seen += [store.get(f"word/{peer}").decode() for peer in range(3)]
            store.set(f"done/{rank}", "")
            store.wait([f"done/{peer}" for peer in range(3)], timedelta(seconds=PATIENCE))
        return seen, stores

    for seen, _ in [future.result() for future in on_ranks(3, work)]:
        assert seen == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]


def test_late_rank_is_waited_for(either: StoreAddress) -> None:
    def work(rank: int) -> Any:
        time.sleep(1.0 if rank == 0 else 0.0)
        return join_store(place(rank), either, timeout_seconds=PATIENCE)

    assert all(future.result() for future in on_ranks(2, work))


@pytest.mark.seed("S0-107", "S1-033", "S2-056", "S4-129")
def test_missing_ranks_are_named(address: StoreAddress) -> None:
    host = join_store(
        place(0, 1), replace(address, attempt=1), timeout_seconds=PATIENCE
    )  # the same store, for another start

    def early() -> None:
        join_store(place(1, 4), address, timeout_seconds=PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(early)
        deadline = time.monotonic() + PATIENCE
        while host.raw.num_keys() < 4:  # two per rank that has joined
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(LaunchError, match=r"2 of 4 ranks joined within 2 s; missing: ranks 2, 3\."):
            join_store(place(0, 4), address, timeout_seconds=2)
        assert not first.done()
        del host
        with pytest.raises(LaunchError, match="Rank 1 lost the store"):
            first.result()


def test_missing_rank_0(address: StoreAddress) -> None:
    message = failure(1, address, timeout_seconds=0.5)
    assert f"Rank 1 of 2 could not reach the store at 127.0.0.1:{address.port} within 0.5 s" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_unresolvable_host(rank: int) -> None:
    nowhere = StoreAddress("no-such-host.invalid", 29500, hosted_by_agent=False, attempt=0)
    assert "no-such-host.invalid, from MASTER_ADDR, does not resolve" in failure(
        rank, nowhere, timeout_seconds=5, max_retries=1
    )


def test_port_in_use(foreign_listener: StoreAddress) -> None:
    message = failure(0, foreign_listener, timeout_seconds=PATIENCE, max_retries=1)
    assert f"port {foreign_listener.port} is in use" in message


def test_port_with_a_foreign_listener(foreign_listener: StoreAddress) -> None:
    """TCPStore's own client would hang."""
    assert "it is not the store of this run" in failure(1, foreign_listener, timeout_seconds=1)


@pytest.mark.seed("S1-012", "S1-032")
def test_port_briefly_in_use_is_retried(address: StoreAddress, caplog: pytest.LogCaptureFixture) -> None:
    """Retried up to `max_retries` times."""
    server = socket.create_server((address.host, address.port))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join_store, place(0), address, timeout_seconds=PATIENCE, max_retries=20)
        while "is in use by another process. Retrying" not in caplog.text:
            assert not first.done()
            time.sleep(0.01)
        server.close()
        second = pool.submit(join_store, place(1), address, timeout_seconds=PATIENCE)
        assert first.result() is not None
        assert second.result() is not None


def vote(address: StoreAddress, problems: list[str | None], *, strict: bool) -> list[Future[Agreement]]:
    def work(rank: int) -> Agreement:
        mine = place(rank, len(problems))
        store = join_store(mine, address, timeout_seconds=PATIENCE)
        return agree_on_devices(store, mine, problems[rank], strict=strict, timeout_seconds=PATIENCE)

    return on_ranks(len(problems), work)


@pytest.mark.parametrize("strict", [False, True])
def test_all_devices_usable(address: StoreAddress, strict: bool) -> None:
    for future in vote(address, [None, None], strict=strict):
        assert future.result() == Agreement(world_size=2, takes_part=True, fallback_reason=None)


def test_rank_0_continues_alone_on_fallback(either: StoreAddress) -> None:
    votes = [future.result() for future in vote(either, [None, "ECC error", None], strict=False)]
    assert [agreed.takes_part for agreed in votes] == [True, False, False]
    assert {agreed.world_size for agreed in votes} == {1}
    assert {agreed.fallback_reason for agreed in votes} == {"rank 1 cannot use its device: ECC error"}


@pytest.mark.parametrize(
    ("problems", "strict"), [([None, "ECC error"], True), (["gone", None], False)], ids=["strict", "rank 0 itself"]
)
def test_all_ranks_raise_the_same_device_error(address: StoreAddress, problems: list[str | None], strict: bool) -> None:
    messages = set()
    for future in vote(address, problems, strict=strict):
        with pytest.raises(DeviceError) as raised:
            future.result()
        messages.add(str(raised.value))
    (text,) = messages
    assert "1 of 2 ranks have no usable device: rank" in text


def test_rank_that_does_not_report_is_an_error(either: StoreAddress) -> None:
    def work(rank: int) -> Any:
        store = join_store(place(rank), either, timeout_seconds=PATIENCE)
        if rank == 0:
            with pytest.raises(LaunchError, match="Not all 2 ranks reported within 1 s"):
                agree_on_devices(store, place(0), None, strict=False, timeout_seconds=1)
        return store  # held until both have joined

    assert all(future.result() for future in on_ranks(2, work))


def test_device_problem() -> None:
    import torch

    assert device_problem(torch.device("cpu")) is None
    missing = torch.device("cuda", torch.cuda.device_count())
    assert device_problem(missing)


def test_interface_is_the_one_on_the_route_to_the_store() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        here = StoreAddress("127.0.0.1", port, hosted_by_agent=False, attempt=0)
        assert interface_towards(here) == loopback_interface() is not None
        own = {
            name: address.address
            for name, addresses in psutil.net_if_addrs().items()
            for address in addresses
            if address.family is socket.AF_INET and not address.address.startswith("127.")
        }
        for name, address in own.items():
            assert interface_towards(StoreAddress(address, port, hosted_by_agent=False, attempt=0)) == name
    assert interface_towards(StoreAddress("127.0.0.1", port, hosted_by_agent=False, attempt=0)) is None, "gone"


def test_nodes_have_their_own_prefix_and_name(address: StoreAddress) -> None:
    with pytest.raises(LaunchError, match=r"1 of 2 nodes joined within 2 s; missing: node 1\."):
        join_store(place(0), address, timeout_seconds=2, who=NODES)
    nodes = join_store(place(0, 1), address, timeout_seconds=PATIENCE, who=NODES)
    nodes.set("key", "value")
    ranks = join_store(place(0, 1), address, timeout_seconds=PATIENCE)
    assert not ranks.check(["key"])
    nowhere = StoreAddress("no-such-host.invalid", 1, hosted_by_agent=False, attempt=0)
    with pytest.raises(LaunchError, match="from --rdzv, does not resolve"):
        join_store(place(1), nowhere, timeout_seconds=5, max_retries=0, who=NODES)

"""Ranks that meet, and every way in which they do not: an error in time, that says who or what was missing.

The ranks are threads here: a store neither knows nor cares.
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
from pantheraml.parallel.device_vote import Agreement, agree_on_devices, device_problem
from pantheraml.parallel.one_node import loopback_interface
from pantheraml.parallel.rendezvous import MACHINES, interface_towards, meet
from tests.ports import reserved_port

PATIENCE = 100
"""Seconds for those who do come."""


def place(rank: int, world_size: int = 2) -> ProcessRank:
    return ProcessRank(rank=rank, local_rank=rank, world_size=world_size)


@pytest.fixture
def address() -> Iterator[StoreAddress]:
    with reserved_port() as port:
        yield StoreAddress("127.0.0.1", port, hosted_by_agent=False, attempt=0)


@pytest.fixture(params=["port", "file"])
def either(request: pytest.FixtureRequest, address: StoreAddress, tmp_path: Path) -> StoreAddress:
    """A store that rank 0 hosts, or that of one node, which is a file."""
    return address if request.param == "port" else StoreAddress("", 0, True, 0, file=tmp_path / "store")


@pytest.fixture
def foreign_listener() -> Iterator[StoreAddress]:
    """A port where somebody else listens and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield StoreAddress("127.0.0.1", server.getsockname()[1], hosted_by_agent=False, attempt=0)


def on_ranks(count: int, work: Callable[[int], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(work, rank) for rank in range(count)]


def failure(rank: int, where: StoreAddress, **options: Any) -> str:
    """What a lone rank is told, which must not take for ever."""
    begin = time.monotonic()
    with pytest.raises(LaunchError) as raised:
        meet(place(rank), where, **options)
    assert time.monotonic() - begin < 50
    return str(raised.value)


def test_all_ranks_share_one_store_and_may_meet_again(either: StoreAddress) -> None:
    def work(rank: int) -> tuple[list[str], list[Any]]:
        seen = []
        stores = []  # kept until all are done, as a process that hosts one would
        for turn in range(2):
            store = meet(place(rank, 3), either, timeout_seconds=PATIENCE)
            stores.append(store)
            assert not store.check([f"word/{rank}"]), "each meeting starts with an empty store"
            store.set(f"word/{rank}", f"{turn}-{rank}")
            seen += [store.get(f"word/{peer}").decode() for peer in range(3)]
            store.set(f"done/{rank}", "")
            store.wait([f"done/{peer}" for peer in range(3)], timedelta(seconds=PATIENCE))
        return seen, stores

    for seen, _ in [future.result() for future in on_ranks(3, work)]:
        assert seen == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]


def test_a_rank_that_comes_late_is_waited_for(either: StoreAddress) -> None:
    def work(rank: int) -> Any:
        time.sleep(1.0 if rank == 0 else 0.0)
        return meet(place(rank), either, timeout_seconds=PATIENCE)

    assert all(future.result() for future in on_ranks(2, work))


def test_a_peer_that_never_comes_is_named(address: StoreAddress) -> None:
    host = meet(place(0, 1), replace(address, attempt=1), timeout_seconds=PATIENCE)  # the same store, for another start

    def early() -> None:
        meet(place(1, 4), address, timeout_seconds=PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(early)
        deadline = time.monotonic() + PATIENCE
        while host.raw.num_keys() < 4:  # two for each who has come
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(LaunchError, match=r"2 of 4 processes came within 2 s; missing: ranks 2, 3\."):
            meet(place(0, 4), address, timeout_seconds=2)
        assert not first.done()
        del host
        with pytest.raises(LaunchError, match="Rank 1 lost the store"):
            first.result()


def test_a_rank_0_that_never_comes(address: StoreAddress) -> None:
    said = failure(1, address, timeout_seconds=0.5)
    assert f"Rank 1 of 2 could not reach the store at 127.0.0.1:{address.port} within 0.5 s" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_is_none(rank: int) -> None:
    nowhere = StoreAddress("no-such-machine.invalid", 29500, hosted_by_agent=False, attempt=0)
    assert "no-such-machine.invalid, from MASTER_ADDR, is not" in failure(
        rank, nowhere, timeout_seconds=5, max_retries=1
    )


def test_a_port_that_is_taken(foreign_listener: StoreAddress) -> None:
    said = failure(0, foreign_listener, timeout_seconds=PATIENCE, max_retries=1)
    assert f"port {foreign_listener.port} is taken" in said


def test_a_port_where_somebody_else_listens(foreign_listener: StoreAddress) -> None:
    """The store's own client would wait for ever."""
    assert "it is not the store of this run" in failure(1, foreign_listener, timeout_seconds=1)


def test_a_port_that_is_taken_for_a_moment_only(address: StoreAddress, caplog: pytest.LogCaptureFixture) -> None:
    """`max_retries` is for this."""
    server = socket.create_server((address.host, address.port))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, place(0), address, timeout_seconds=PATIENCE, max_retries=20)
        while "is taken by another process. Trying again" not in caplog.text:
            assert not first.done()
            time.sleep(0.01)
        server.close()
        second = pool.submit(meet, place(1), address, timeout_seconds=PATIENCE)
        assert first.result() is not None
        assert second.result() is not None


def vote(address: StoreAddress, problems: list[str | None], *, strict: bool) -> list[Future[Agreement]]:
    def work(rank: int) -> Agreement:
        mine = place(rank, len(problems))
        store = meet(mine, address, timeout_seconds=PATIENCE)
        return agree_on_devices(store, mine, problems[rank], strict=strict, timeout_seconds=PATIENCE)

    return on_ranks(len(problems), work)


@pytest.mark.parametrize("strict", [False, True])
def test_all_devices_well(address: StoreAddress, strict: bool) -> None:
    for future in vote(address, [None, None], strict=strict):
        assert future.result() == Agreement(world_size=2, takes_part=True, fallback_reason=None)


def test_rank_0_goes_on_alone_if_all_agree_to_that(either: StoreAddress) -> None:
    votes = [future.result() for future in vote(either, [None, "ECC error", None], strict=False)]
    assert [agreed.takes_part for agreed in votes] == [True, False, False]
    assert {agreed.world_size for agreed in votes} == {1}
    assert {agreed.fallback_reason for agreed in votes} == {"rank 1 cannot use its device: ECC error"}


@pytest.mark.parametrize(
    ("problems", "strict"), [([None, "ECC error"], True), (["gone", None], False)], ids=["strict", "rank 0 itself"]
)
def test_otherwise_all_stop_with_the_same_error(
    address: StoreAddress, problems: list[str | None], strict: bool
) -> None:
    said = set()
    for future in vote(address, problems, strict=strict):
        with pytest.raises(DeviceError) as raised:
            future.result()
        said.add(str(raised.value))
    (text,) = said
    assert "1 of 2 processes have no usable device: rank" in text


def test_a_rank_that_does_not_vote_is_an_error_too(either: StoreAddress) -> None:
    def work(rank: int) -> Any:
        store = meet(place(rank), either, timeout_seconds=PATIENCE)
        if rank == 0:
            with pytest.raises(LaunchError, match="Not all 2 processes said within 1 s"):
                agree_on_devices(store, place(0), None, strict=False, timeout_seconds=1)
        return store  # kept until both have met

    assert all(future.result() for future in on_ranks(2, work))


def test_what_is_wrong_with_a_device() -> None:
    import torch

    assert device_problem(torch.device("cpu")) is None
    missing = torch.device("cuda", torch.cuda.device_count())
    assert device_problem(missing)


def test_the_interface_between_machines_is_the_one_that_leads_there() -> None:
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


def test_machines_meet_apart_from_ranks_and_are_named_as_such(address: StoreAddress) -> None:
    with pytest.raises(LaunchError, match=r"1 of 2 machines came within 2 s; missing: machine 1\."):
        meet(place(0), address, timeout_seconds=2, who=MACHINES)
    machines = meet(place(0, 1), address, timeout_seconds=PATIENCE, who=MACHINES)
    machines.set("told", "to machines")
    ranks = meet(place(0, 1), address, timeout_seconds=PATIENCE)
    assert not ranks.check(["told"])
    nowhere = StoreAddress("no-such-machine.invalid", 1, hosted_by_agent=False, attempt=0)
    with pytest.raises(LaunchError, match="from --rdzv, is not the name of a machine"):
        meet(place(1), nowhere, timeout_seconds=5, max_retries=0, who=MACHINES)

"""Two network namespaces with a cable between them, and nothing else: two hosts, as far as the network can tell."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@contextmanager
def two_hosts(purpose: str) -> Iterator[list[str]]:
    """The names of two namespaces. Neither reaches the other by anything but these addresses, and other tests that run
    on this computer have hosts of their own."""
    names = [f"pantheraml-{purpose}-{os.getpid()}-{number}" for number in (0, 1)]
    if shutil.which("ip") is None or ip("netns", "add", names[0]).returncode:
        pytest.skip("network namespaces need root and iproute2")
    try:
        assert ip("netns", "add", names[1]).returncode == 0
        cable = ("link", "add", "eth9", "netns", names[0], "type", "veth", "peer", "name", "eth9", "netns", names[1])
        assert ip(*cable).returncode == 0
        for name, address in zip(names, ADDRESSES, strict=True):
            for words in (("addr", "add", f"{address}/24", "dev", "eth9"), ("link", "set", "eth9", "up"),
                          ("link", "set", "lo", "up")):  # fmt: skip
                assert ip("-n", name, *words).returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def within(name: str) -> list[str]:
    """What goes before a command to run it on that host."""
    return ["ip", "netns", "exec", name]

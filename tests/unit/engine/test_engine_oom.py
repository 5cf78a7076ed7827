from __future__ import annotations

from pantheraml.engine.memory.oom import read_shortage

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 512.00 MiB is"
    " free. Including non-PyTorch memory, this process has 139.30 GiB memory in use. Of the allocated memory 130.00 GiB"
    " is allocated by PyTorch, and 8.00 GiB is reserved by PyTorch but unallocated."
)


def test_torch_oom_message_is_parsed() -> None:
    shortage = read_shortage(MESSAGE)
    assert shortage.requested == int(2.5 * 2**30)
    assert shortage.free == 512 * 2**20
    assert shortage.total == int(139.8 * 2**30)


def test_oom_message_without_numbers_gives_none() -> None:
    shortage = read_shortage("CUDA out of memory.")
    assert (shortage.requested, shortage.free, shortage.total) == (None, None, None)

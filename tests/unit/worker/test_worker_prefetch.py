"""What begins before torch is there: weights are in the kernel's cache, and what cannot be read is left to others."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pantheraml.specs.train import ModelConfig
from pantheraml.worker import prefetch

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None)


def cached_pages(file: Path) -> int:
    """According to mincore, which reads nothing itself."""
    size = file.stat().st_size
    seen = (ctypes.c_ubyte * -(-size // PAGE))()
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        status = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), seen)
        del first
    assert status == 0
    return sum(page & 1 for page in seen)


def uncached(file: Path, size: int) -> Path:
    file.write_bytes(bytes(size))
    with open(file, "rb+") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(file):
        pytest.skip("this file system is in memory")
    return file


def test_files_are_read_to_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CHUNK_BYTES", 1 << 20)
    files = [uncached(tmp_path / name, (3 << 20) + PAGE) for name in "ab"]
    prefetch.prefetch_files(files)
    deadline = time.monotonic() + 20
    while any(cached_pages(file) < (3 << 20) // PAGE + 1 for file in files):
        assert time.monotonic() < deadline, "a file was not read to its end"
        time.sleep(0.01)


def test_files_larger_than_memory_are_not_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_MEMORY_SHARE", 0.0)
    file = uncached(tmp_path / "a", 1 << 20)
    prefetch.prefetch_files([file])
    time.sleep(0.2)
    assert cached_pages(file) == 0


def test_unreadable_files_are_ignored(tmp_path: Path) -> None:
    prefetch.prefetch_files([tmp_path / "gone"])


def test_weight_files_are_those_of_the_loader(tmp_path: Path) -> None:
    for name in ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    found = prefetch.weight_files(ModelConfig(path=str(tmp_path)))
    assert [file.name for file in found] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert prefetch.weight_files(ModelConfig(path=str(tmp_path), init="random")) == []
    assert prefetch.weight_files(ModelConfig(path="owner/model")) == []


def test_prefetch_starts_before_torch_is_imported() -> None:
    code = "import sys, pantheraml.worker.__main__; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]

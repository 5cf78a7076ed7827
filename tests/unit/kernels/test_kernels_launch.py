"""Triton launches on the current GPU: `launch` makes that the one of its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pantheraml.kernels import triton_support


class Argument:
    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)


class Kernel:
    """In place of a compiled kernel, which needs a GPU: notes which one is current when it is launched."""

    def __init__(self, current: list[int]) -> None:
        self.current, self.launched = current, list[int]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*_arguments: Any, **_options: Any) -> Kernel:
            self.launched.append(self.current[-1])
            return self

        return run


def test_kernels_are_launched_on_the_device_of_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(triton_support, "INTERPRETED", False)
    monkeypatch.setattr(triton_support, "_COMPILED", {})
    kernel = Kernel(current)
    arguments = [Argument(0), Argument(1)]
    for each in (*arguments, *arguments):  # the first launch of each compiles
        triton_support.launch(kernel, (1,), each, 3, BLOCK=16, num_warps=2)
    assert kernel.launched == [0, 1, 0, 1]
    assert current == [0]
    assert len(triton_support._COMPILED) == 2

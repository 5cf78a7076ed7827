"""Running a function over chunks in several processes, with results in order and one chunk in flight per process.

Processes are forked, as PyTorch's data loaders are: they start in milliseconds and share the tokenizer's memory, where
a fresh interpreter would spend seconds importing transformers. The children use neither torch nor its threads, and hold
nothing that could be lost, so they are killed when the work ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from pantheraml.base import env
from pantheraml.base.errors import WorkerError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def available_workers() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ordered_map(function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int) -> Generator[_Result]:
    """`map(function, items)` over `workers` processes; with one worker, in this process.

    Item i goes to process i modulo `workers`, and results are taken in the same turn, which keeps their order.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # one thread per child: there are as many children as cores, and Rust's thread pool does not survive a fork
    with env.changed({"TOKENIZERS_PARALLELISM": "false"}), _workers(function, workers) as started:
        sent = 0
        for item in items:
            worker = started[sent % workers]
            finished = [worker.received()] if sent >= workers else []
            worker.send(item)  # before yielding, so that the child works while the caller does
            sent += 1
            yield from finished
        for index in range(max(0, sent - workers), sent):
            yield started[index % workers].received()


@dataclass(frozen=True)
class _Worker:
    """A child, as the parent sees it."""

    connection: Connection[Any, Any]
    process: BaseProcess

    def send(self, item: Any) -> None:
        with self._death_reported():
            self.connection.send(item)

    def received(self) -> Any:
        with self._death_reported():
            result, err = self.connection.recv()
        if err is not None:
            raise err
        return result

    @contextlib.contextmanager
    def _death_reported(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as err:
            self.process.join(1)
            if self.process.exitcode == -signal.SIGXCPU:
                raise WorkerError(
                    "A process that tokenises the data was ended: it was stuck, most likely in the chat template.",
                    todo="Correct the template, or name another tokenizer with model.tokenizer.",
                ) from err
            raise WorkerError(
                "A process that tokenises the data died, most likely because memory ran out.",
                todo="Set data.workers to a smaller number.",
            ) from err


@contextlib.contextmanager
def _workers(function: Callable[[Any], Any], count: int) -> Iterator[list[_Worker]]:
    context = multiprocessing.get_context("fork")
    connections: list[Connection[Any, Any]] = []
    processes: list[BaseProcess] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            connections.append(ours)
            processes.append(context.Process(target=_serve, args=(function, theirs, list(connections)), daemon=True))
            processes[-1].start()
            theirs.close()
        yield [_Worker(*pair) for pair in zip(connections, processes, strict=True)]
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.kill()
            process.join()


def _serve(
    function: Callable[[Any], Any], connection: Connection[Any, Any], inherited: list[Connection[Any, Any]]
) -> None:
    """The life of a child: it ends when the parent closes its side, also when the parent dies."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # they reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            item = connection.recv()
            try:
                connection.send((function(item), None))
            except Exception as err:  # noqa: BLE001 - raised again in the parent
                connection.send((None, err))

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
    with env.changed("TOKENIZERS_PARALLELISM", "false"), _workers(function, workers) as connections:
        sent = 0
        for item in items:
            connection = connections[sent % workers]
            finished = [_received(connection)] if sent >= workers else []
            _send(connection, item)  # before yielding, so that the child works while the caller does
            sent += 1
            yield from finished
        for index in range(max(0, sent - workers), sent):
            yield _received(connections[index % workers])


@contextlib.contextmanager
def _workers(function: Callable[[Any], Any], count: int) -> Iterator[list[Connection[Any, Any]]]:
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
        yield connections
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


def _send(connection: Connection[Any, Any], item: Any) -> None:
    with _deaths_reported():
        connection.send(item)


def _received(connection: Connection[Any, Any]) -> Any:
    with _deaths_reported():
        result, err = connection.recv()
    if err is not None:
        raise err
    return result


@contextlib.contextmanager
def _deaths_reported() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as err:
        raise WorkerError(
            "A process that tokenises the data died, most likely because memory ran out.",
            todo="Set data.workers to a smaller number.",
        ) from err

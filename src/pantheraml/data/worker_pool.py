"""Map a function over chunks in several processes, with ordered results and one chunk in flight per process.

Workers are forked, like PyTorch's DataLoader workers: they start in milliseconds and share the tokenizer's memory,
where a fresh interpreter would spend seconds importing transformers. They use neither torch nor its threads and hold no
state, so they are killed when the work ends, for whatever reason.
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
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0))


def ordered_map(function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int) -> Generator[_Result]:
    """Run `map(function, items)` over `workers` processes; with one worker, in this process.

    Item i goes to process i % `workers`, and results are received round-robin, which keeps their order.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # one thread per worker: there are as many workers as cores, and Rust's thread pool does not survive a fork
    with env.changed({"TOKENIZERS_PARALLELISM": "false"}), _workers(function, workers) as pool:
        sent = 0
        for item in items:
            worker = pool[sent % workers]
            finished = [worker.receive()] if sent >= workers else []
            worker.send(item)  # before yielding, so that the worker and the caller run concurrently
            sent += 1
            yield from finished
        for index in range(max(0, sent - workers), sent):
            yield pool[index % workers].receive()


@dataclass(frozen=True)
class _Worker:
    """The parent's handle of a worker process."""

    connection: Connection[Any, Any]
    process: BaseProcess

    def send(self, item: Any) -> None:
        with self._report_death():
            self.connection.send(item)

    def receive(self) -> Any:
        with self._report_death():
            result, err = self.connection.recv()
        if err is not None:
            raise err
        return result

    @contextlib.contextmanager
    def _report_death(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as err:
            self.process.join(1)
            if self.process.exitcode == -signal.SIGXCPU:
                raise WorkerError(
                    "A tokenization process was killed: it was stuck, most likely in the chat template.",
                    fix="Correct the template, or choose another tokenizer with model.tokenizer.",
                ) from err
            raise WorkerError(
                "A tokenization process died, most likely because it ran out of memory.",
                fix="Set data.workers to a smaller number.",
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
    """Main loop of a worker: exits when the parent closes its end of the pipe or dies."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # sent to the whole process group; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            item = connection.recv()
            try:
                connection.send((function(item), None))
            except Exception as err:  # noqa: BLE001 - re-raised in the parent
                connection.send((None, err))

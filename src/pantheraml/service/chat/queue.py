"""Chat requests in the order of their arrival, answered by one worker on a device that no job needs.

The worker is started by the first request, keeps its base model in memory, and exits when idle. A job that waits for
its device gets it at once; the request in progress then fails with the reason.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import PantheraError
from pantheraml.planner.precision import choose_precision
from pantheraml.runs.chat_worker import ChatDevice, ChatWorkerProcess
from pantheraml.runs.supervised import Limits
from pantheraml.service.errors import ApiError
from pantheraml.service.jobs.dispatcher import Dispatcher
from pantheraml.service.jobs.inventory import gpu_indices
from pantheraml.service.settings import Settings
from pantheraml.specs.chat import ChatCancel, ChatDone, ChatFailed, ChatLoaded, ChatRequest, ChatText

logger = log.get(__name__)

CANCEL_SECONDS = 10.0
"""A worker that has not stopped answering a cancelled request after so many seconds is considered hung, and killed."""
LOOK_SECONDS = 0.25
"""Seconds between checks that the client is still connected."""
BUSY_SECONDS = 30
"""Seconds until a client should retry if jobs hold all devices."""
_TYPICAL_SECONDS = 5.0

Reply = ChatText | ChatDone


class Ticket:
    """A request and its answer."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.cancelled = False
        self.loaded = self.told = False
        """The model is loaded; part of the answer has been sent."""
        self.ended = False
        """The last reply has been sent."""
        self._replies: asyncio.Queue[Reply | ApiError] = asyncio.Queue()

    def tell(self, reply: Reply | ApiError) -> None:
        if not self.ended:
            self.ended = isinstance(reply, ApiError | ChatDone)
            self._replies.put_nowait(reply)

    async def replies(self) -> AsyncIterator[Reply]:
        """Replies up to the last one. Raises ApiError if there is no answer."""
        while True:
            reply = await self._replies.get()
            if isinstance(reply, ApiError):
                raise reply
            yield reply
            if isinstance(reply, ChatDone):
                return


class ChatQueue:
    def __init__(self, settings: Settings, dispatcher: Dispatcher) -> None:
        self._settings, self._dispatcher = settings, dispatcher
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._arrived = asyncio.Event()
        self._current: Ticket | None = None
        self._worker: ChatWorkerProcess | None = None
        self._device_name = ""
        """Device of the worker."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._preempted = self._closed = False
        self._numbers = 0
        self._seconds = _TYPICAL_SECONDS
        """Moving average of the seconds per answer."""

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def submit(self, request: ChatRequest) -> Ticket:
        """Queue a request. ApiError if too many wait already."""
        if self._closed:
            raise _closing()
        waiting = len(self._waiting)
        if waiting >= self._settings.chat_max_waiting:
            message = f"{waiting} chat requests wait already; try again later."
            raise unavailable(message, self._seconds * waiting, status=429, code="chat_queue_full")
        ticket = Ticket(request)
        self._waiting.append(ticket)
        self._arrived.set()
        return ticket

    def watch(self, ticket: Ticket, has_gone: Callable[[], Awaitable[bool]]) -> None:
        """Cancel the request once the client has disconnected."""
        self._keep(self._watch(ticket, has_gone))

    async def _watch(self, ticket: Ticket, has_gone: Callable[[], Awaitable[bool]]) -> None:
        while not ticket.ended:
            if await has_gone():
                self.cancel(ticket)
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, ticket: Ticket) -> None:
        """The client no longer waits for the answer."""
        if ticket.cancelled:
            return
        ticket.cancelled = True
        if ticket is self._current and self._worker is not None:
            self._keep(self._stop_answering(ticket, self._worker))

    async def _stop_answering(self, ticket: Ticket, worker: ChatWorkerProcess) -> None:
        await worker.send(ChatCancel(id=ticket.request.id))
        await asyncio.sleep(CANCEL_SECONDS)
        if ticket is self._current and ticket.loaded:
            logger.warning("the chat worker does not stop: it is killed")
            await worker.kill()

    # The one task that answers ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            while True:
                ticket = await self._next()
                if ticket is None:
                    await self._unload()
                else:
                    await self._answer_safely(ticket)
        finally:
            self.close()
            await self._unload()

    async def _next(self) -> Ticket | None:
        """The next request; None if there was none for the idle time."""
        while not self._waiting:
            self._arrived.clear()
            idle = self._settings.chat_idle_seconds if self._worker is not None else None
            try:
                async with asyncio.timeout(idle):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        return self._waiting.popleft()

    async def _answer_safely(self, ticket: Ticket) -> None:
        self._current, begin = ticket, time.monotonic()
        try:
            if not ticket.cancelled:
                await self._answer(ticket)
            ticket.tell(cancelled())  # unless it was answered
        except ApiError as err:
            ticket.tell(err)
        except PantheraError as err:
            logger.error("chat: %s", err)
            ticket.tell(unavailable("The chat worker could not be started.", BUSY_SECONDS))
        except Exception:
            logger.exception("a chat request failed")
            ticket.tell(ApiError(500, "The chat worker failed; the service's log has the reason."))
            await self._unload()
        finally:
            self._current = None
            self._seconds += 0.2 * (time.monotonic() - begin - self._seconds)

    async def _answer(self, ticket: Ticket) -> None:
        """As long as no part of the answer has been sent, a worker that died is replaced once, and one that lost its
        device is replaced on another, if there is one."""
        deaths = 0
        while deaths < 2:
            worker = await self._ready_worker()
            if await self._exchange(ticket, worker) or ticket.cancelled:
                return
            await self._unload()
            if self._closed:
                raise _closing()
            if self._preempted and ticket.told:
                raise unavailable(
                    "The device that chat was using is needed elsewhere.", BUSY_SECONDS, code="chat_preempted"
                )
            if ticket.told:
                break
            deaths += not self._preempted
        logger.warning("the chat worker died; see %s", self._settings.chat / "worker.log")
        raise ApiError(500, "The chat worker died while it worked on this request.", code="chat_worker_died")

    async def _exchange(self, ticket: Ticket, worker: ChatWorkerProcess) -> bool:
        """Return True if the worker has answered; False if it has ended."""
        await worker.send(ticket.request)
        async for reply in worker.replies():
            if reply.id != ticket.request.id:
                continue
            if isinstance(reply, ChatFailed):
                raise self._failure(reply)
            if isinstance(reply, ChatLoaded):
                ticket.loaded = True
                continue
            ticket.told = True
            ticket.tell(reply)
            if isinstance(reply, ChatDone):
                return True
        return False

    def _failure(self, failed: ChatFailed) -> ApiError:
        if failed.unexpected:
            logger.error("%s", failed.what)
            return ApiError(500, "The chat worker failed; the service's log has the reason.", code="chat_failed")
        message = " ".join(part for part in (failed.what, failed.fix) if part)
        return ApiError(400, self._dispatcher.hide(message), code=failed.error)

    # The worker and its device ----------------------------------------------------------------------------------------

    async def _ready_worker(self) -> ChatWorkerProcess:
        if self._worker is not None and self._worker.is_running:
            return self._worker
        await self._unload()
        self._preempted = False
        name = await self._dispatcher.borrow(self._give_back)
        if name is None:
            inventory = self._dispatcher.inventory
            message = f"None of the {len(inventory.devices)} {inventory.kind}s is free: jobs come first."
            raise unavailable(message, BUSY_SECONDS, code="no_free_device")
        try:
            settings = self._settings
            limits = Limits([settings.models_dir, settings.jobs], settings.cache)
            worker = await ChatWorkerProcess.start(settings.chat.resolve(), self._device(name), limits)
        except BaseException:
            self._dispatcher.returned(name)
            raise
        self._worker, self._device_name = worker, name
        if self._preempted:  # by a job, while it was being started
            await worker.kill()
        return worker

    def _device(self, name: str) -> ChatDevice:
        spec = self._dispatcher.inventory.spec
        indices = gpu_indices([name])
        if indices is None:
            threads = max(1, spec.cpu_count // len(self._dispatcher.inventory.devices))
            return ChatDevice(None, choose_precision(None, "cpu", []).value, threads)
        (gpu,) = (gpu for gpu in spec.gpus if gpu.index == indices[0])
        precision = choose_precision(None, "cuda", [gpu.compute_capability]).value
        threads = max(1, spec.cpu_count // len(spec.gpus))
        return ChatDevice(gpu.index, precision, threads, self._dispatcher.inventory.memory_fraction)

    async def _give_back(self) -> None:
        """Stop the worker now, because a job needs its device."""
        self._preempted = True
        if self._worker is not None:
            await self._worker.kill()

    async def _unload(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.kill()
            self._dispatcher.returned(self._device_name)

    def close(self) -> None:
        """Fail all requests: the service is shutting down."""
        self._closed = True
        for ticket in (*self._waiting, *([self._current] if self._current is not None else [])):
            ticket.tell(_closing())
        self._waiting.clear()


def unavailable(message: str, seconds: float, *, status: int = 503, code: str = "unavailable") -> ApiError:
    """Return an error, 503 by default, with `Retry-After`."""
    err = ApiError(status, message, code=code)
    err.headers["retry-after"] = str(min(120, max(1, round(seconds))))
    return err


def cancelled() -> ApiError:
    return ApiError(499, "The client has closed the connection.", code="cancelled")


def _closing() -> ApiError:
    return unavailable("The service is shutting down.", 5)

"""The application: routes over the store, and the dispatcher beside them.

To serve `/multigpu` from an application of your own, pass it `lifespan(settings)` and include `router`. Add `Gate` as
well, as `create_app` does, unless only programs on this machine can reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

from fastapi import FastAPI
from sqlalchemy import select

from pantheraml import __version__
from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.base.folders import write_text
from pantheraml.base.private import open_private, private_files
from pantheraml.devices.background import BackgroundSampler
from pantheraml.service import errors
from pantheraml.service.auth import Authenticator, has_keys
from pantheraml.service.catalog import Catalog
from pantheraml.service.chat.forward import Forwarder
from pantheraml.service.chat.queue import ChatQueue
from pantheraml.service.context import ServiceContext
from pantheraml.service.ids import new_id
from pantheraml.service.jobs.curves import CurveCache
from pantheraml.service.jobs.dispatcher import Dispatcher
from pantheraml.service.jobs.inventory import take_inventory
from pantheraml.service.jobs.live import NewsDesk
from pantheraml.service.jobs.merge import Merger
from pantheraml.service.jobs.notifier import Notifier
from pantheraml.service.jobs.preview import Previewer
from pantheraml.service.middleware import Gate
from pantheraml.service.openapi import DescribedAPI
from pantheraml.service.quota import Quota
from pantheraml.service.request_metrics import MeasureRequests, RequestMetrics
from pantheraml.service.routes import (
    chat,
    files,
    fine_tuning,
    health,
    jobs,
    merge,
    metrics,
    models,
    multigpu,
    overview,
    page,
    preview,
    samples,
    session,
    uploads,
    usage,
    webhooks,
)
from pantheraml.service.settings import Settings, claim_folder
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import DataFolderId
from pantheraml.service.webhooks.sender import WebhookSender

logger: logging.Logger = log.get(__name__)

STANDBY_SECONDS = 0.25
"""Seconds between attempts to take the place of another service."""
TAKE_OVER_SECONDS = 30.0
"""Seconds for the database to notice that a killed service is gone."""
SAMPLER_CPU_SHARE = 0.01
"""No training runs in this process; with less, opening the driver costs minutes without a sample."""


def create_app(settings: Settings, context: ServiceContext | None = None) -> FastAPI:
    """`context`: already prepared by the caller; None: prepared when the application starts."""
    app = DescribedAPI(
        title="PantheraML",
        version=__version__,
        description="Fine-tune language models: OpenAI's fine-tuning API, served by this machine.",
        lifespan=lifespan(settings, context),
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    app.add_middleware(Gate, settings=settings)
    app.state.request_metrics = RequestMetrics()
    app.add_middleware(MeasureRequests, metrics=app.state.request_metrics)
    for module in (health, session, files, uploads, jobs, fine_tuning, models, webhooks):
        app.include_router(module.router)
    for module in (overview, usage, metrics, preview, merge, samples, page):
        app.include_router(module.router)
    app.include_router(chat.router if settings.inference_url is None else chat.forwarding)
    for prefix in ("", "/api/v1"):
        app.include_router(multigpu.router, prefix=prefix)
    return app


def lifespan(
    settings: Settings, context: ServiceContext | None = None
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """Lifespan of an application whose routes include ours. `context`: see `create_app`."""

    @contextlib.asynccontextmanager
    async def span(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings, context) as app.state.context:
            yield

    return span


@contextlib.asynccontextmanager
async def running(settings: Settings, context: ServiceContext | None = None) -> AsyncIterator[ServiceContext]:
    """Run the service without its routes: what they share, and the dispatcher."""
    async with contextlib.AsyncExitStack() as stack:
        prepared = await stack.enter_async_context(preparation(settings)) if context is None else context
        stack.enter_context(prepared.sampler)
        tasks = [asyncio.create_task(each) for each in prepared.loops()]
        try:
            yield prepared
        finally:
            prepared.end_waiting()
            await prepared.merger.close()
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


@contextlib.asynccontextmanager
async def preparation(settings: Settings) -> AsyncIterator[ServiceContext]:
    """Prepare folders, database and what the routes share. ConfigError if the service may not start with these
    settings."""
    with private_files(), await _claimed(settings):
        stack = contextlib.AsyncExitStack()
        database = Database(settings.url)
        try:
            await _take(database, settings.standby)
            await _require_own(database, settings.data_dir)
            authenticator = Authenticator(
                database, is_open=await _is_open(settings, database), insecure=settings.insecure
            )
            notifier = Notifier()
            inventory = await asyncio.to_thread(take_inventory, settings.cpu_slots, settings.jobs_per_gpu)
            sampler = BackgroundSampler([gpu.index for gpu in inventory.spec.gpus], cpu_share=SAMPLER_CPU_SHARE)
            dispatcher = Dispatcher(database, settings, inventory, notifier, sampler.health)
            catalog = Catalog(settings.models_dir)
            forwarder = None
            if settings.inference_url is not None:
                forwarder = await stack.enter_async_context(Forwarder(settings.inference_url, settings.inference_key))
            yield ServiceContext(
                settings=settings,
                database=database,
                catalog=catalog,
                dispatcher=dispatcher,
                notifier=notifier,
                news=NewsDesk(database, notifier),
                authenticator=authenticator,
                sampler=sampler,
                previewer=Previewer(dispatcher.limits),
                merger=Merger(settings, dispatcher.limits),
                curves=CurveCache(),
                chat=ChatQueue(settings, dispatcher),
                webhooks=WebhookSender(database, settings),
                quota=Quota(database, settings),
                forwarder=forwarder,
            )
        finally:
            await stack.aclose()
            await database.close()


async def _take(database: Database, standby: bool) -> None:
    deadline = time.monotonic() + (TAKE_OVER_SECONDS if standby else 0.0)
    while True:
        try:
            claimed = await database.claim()
        except ConnectionError as err:
            raise ConfigError(
                f"The database does not answer. {err}", fix="Check --database-url, and that it runs."
            ) from err
        if claimed:
            break
        if time.monotonic() >= deadline:
            fix = "Stop it, or choose another --database-url."
            raise ConfigError("Another service is using this database.", fix=fix)
        await asyncio.sleep(STANDBY_SECONDS)
    await database.migrate()


async def _require_own(database: Database, folder: Path) -> None:
    """ConfigError unless the database belongs to this data folder, or to none yet. The jobs of another one would look
    lost from here, and be started again beside their running processes."""
    mark = folder / "service.id"
    if not mark.exists():
        write_text(mark, new_id("service"))
    own = mark.read_text(encoding="utf-8")
    async with database.write() as session:
        found = await session.scalar(select(DataFolderId.id))
        if found is None:
            session.add(DataFolderId(id=own))
        elif found != own:
            raise ConfigError(
                f"The database belongs to a data folder other than {folder}: that has the files and jobs it knows.",
                fix="Start with that --data-dir, or choose another --database-url.",
            )


async def _is_open(settings: Settings, database: Database) -> bool:
    if await has_keys(database):
        return False
    if not settings.is_loopback and not settings.insecure:
        raise ConfigError(
            f"Others can reach {settings.host}, and there are no API keys.",
            fix="Create one with `pantheraml keys create`, listen on 127.0.0.1, or add --insecure.",
        )
    return True


async def _claimed(settings: Settings) -> IO[bytes]:
    """Create the data folder, private, and lock it for this service until the returned file is closed."""
    for folder in (
        settings.data_dir,
        settings.files,
        settings.incoming,
        settings.uploads,
        settings.jobs,
        settings.cache,
    ):
        claim_folder(folder)
    if not settings.models_dir.is_dir():
        raise ConfigError(f"There is no folder {settings.models_dir}.", fix="Set --models-dir to a folder of models.")
    path = settings.data_dir / "service.lock"
    while True:
        lock = _opened(path)
        try:
            await _lock(lock, settings)
            if _is_at(path, lock):  # else somebody removed it meanwhile, and another service may have locked a new one
                for leftover in settings.incoming.iterdir():
                    leftover.unlink()
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


def _opened(path: Path) -> IO[bytes]:
    try:
        return os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT), "r+b")
    except OSError as err:
        what = f"The lock of the data folder cannot be opened: {err.strerror}."
        raise ConfigError(what, where=str(path), fix="Remove it if no service runs here.") from err


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


async def _lock(lock: IO[bytes], settings: Settings) -> None:
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as err:
            if not settings.standby:
                fix = "Stop it, choose another --data-dir, or take its place when it ends with --standby."
                raise ConfigError(f"Another service is using {settings.data_dir}.", fix=fix) from err
        if not told:
            logger.warning("standing by: another service is using %s", settings.data_dir)
            told = True
        await asyncio.sleep(STANDBY_SECONDS)

"""State that the routes share: one object per application, at `app.state.context`."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from pantheraml.devices.background import BackgroundSampler
from pantheraml.service.auth import Authenticator
from pantheraml.service.catalog import Catalog
from pantheraml.service.chat.forward import Forwarder
from pantheraml.service.chat.queue import ChatQueue
from pantheraml.service.jobs.curves import CurveCache
from pantheraml.service.jobs.dispatcher import Dispatcher
from pantheraml.service.jobs.live import NewsDesk
from pantheraml.service.jobs.merge import Merger
from pantheraml.service.jobs.notifier import Notifier
from pantheraml.service.jobs.preview import Previewer
from pantheraml.service.quota import Quota
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database
from pantheraml.service.webhooks.sender import WebhookSender


@dataclass(frozen=True)
class ServiceContext:
    settings: Settings
    database: Database
    catalog: Catalog
    dispatcher: Dispatcher
    notifier: Notifier
    news: NewsDesk
    authenticator: Authenticator
    sampler: BackgroundSampler
    """Samples the GPUs that jobs may use, and the host."""
    previewer: Previewer
    merger: Merger
    curves: CurveCache
    chat: ChatQueue
    webhooks: WebhookSender
    quota: Quota
    forwarder: Forwarder | None
    """Client of the operator's inference server; None: `chat` answers."""

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Run the background tasks for the lifetime of the service."""
        return [self.dispatcher.run(), self.chat.run(), self.webhooks.run()]

    def end_waiting(self) -> None:
        """Release everything that waits: the service is shutting down."""
        self.notifier.close()
        self.chat.close()


async def _context(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.context  # not from a thread, where FastAPI calls plain functions
    return context


Context = Annotated[ServiceContext, Depends(_context)]

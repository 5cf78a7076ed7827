"""What the routes share: one object per application, at `app.state.context`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from pantheraml.devices.background import BackgroundSampler
from pantheraml.service.auth import Authenticator
from pantheraml.service.catalog import Catalog
from pantheraml.service.jobs.dispatcher import Dispatcher
from pantheraml.service.jobs.notifier import Notifier
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database


@dataclass(frozen=True)
class ServiceContext:
    settings: Settings
    database: Database
    catalog: Catalog
    dispatcher: Dispatcher
    notifier: Notifier
    authenticator: Authenticator
    sampler: BackgroundSampler
    """Of the GPUs that jobs may be given, and of the host."""


def _context(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.context
    return context


Context = Annotated[ServiceContext, Depends(_context)]

"""`router`: `/multigpu` for your own application, with a service behind it that starts and ends with it.

    app = FastAPI()
    app.include_router(router, prefix="/api/v1")

An application with `lifespan=lifespan(settings)` chooses the folders and the database; without it, they are
`service-data` and `models` below the current folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI

from pantheraml.service.app import running
from pantheraml.service.routes import multigpu
from pantheraml.service.settings import default_settings


@contextlib.asynccontextmanager
async def _span(app: FastAPI) -> AsyncIterator[None]:
    if getattr(app.state, "context", None) is not None:  # the application's own lifespan, which comes first
        yield
        return
    async with running(default_settings()) as app.state.context:
        try:
            yield
        finally:
            app.state.context = None


router = APIRouter(lifespan=_span)
router.include_router(multigpu.router)

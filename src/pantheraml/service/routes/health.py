"""`/healthz`: the process responds. `/readyz`: it can also serve requests. Both need no key, for probes."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import text

from pantheraml import __version__
from pantheraml.service.context import Context

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok", "version": __version__}


@router.get("/readyz", responses={503: {"description": "The dispatcher has not looked at the jobs for a while."}})
async def readyz(context: Context) -> JSONResponse:
    async with context.database.read() as session:
        await session.execute(text("SELECT 1"))
    if not context.dispatcher.is_alive:
        return JSONResponse({"status": "the dispatcher does not answer"}, 503)
    return JSONResponse({"status": "ok"})

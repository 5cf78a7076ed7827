"""`/metrics`, for Prometheus. With a key it shows what the key's user may see; with `--open-metrics` it needs none."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pantheraml.service.auth import SCOPES, Principal, Require
from pantheraml.service.context import Context
from pantheraml.service.metrics import render
from pantheraml.service.request_metrics import RequestMetrics

router = APIRouter(tags=["metrics"])
_read = Require("read")


async def _viewer(request: Request, context: Context) -> Principal:
    if context.settings.open_metrics:
        return Principal("metrics", frozenset(SCOPES), "open")
    return await _read(request)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, principal: Annotated[Principal, Depends(_viewer)], context: Context) -> Response:
    """Jobs, queue, GPUs, accounts and the latency of this API, in Prometheus's text format."""
    requests: RequestMetrics = request.app.state.request_metrics
    return Response(await render(context, principal, requests), media_type=CONTENT_TYPE_PLAIN_0_0_4)

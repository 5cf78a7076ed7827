"""OpenAI's webhook endpoints: URLs that are notified when jobs of their owner end or raise alerts."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy import func, select

from pantheraml.service import audit
from pantheraml.service.auth import Principal, Reader, Submitter
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import ApiError, not_found
from pantheraml.service.ids import new_id
from pantheraml.service.schemas.webhooks import (
    CreateEndpoint,
    RotateSecret,
    TestEndpoint,
    UpdateEndpoint,
    endpoint_object,
)
from pantheraml.service.store.pages import fetch_page
from pantheraml.service.store.tables import WebhookEndpoint
from pantheraml.service.store.webhooks import EVENT_TYPES, delivery
from pantheraml.service.webhooks.sender import DeliveryError
from pantheraml.service.webhooks.signing import new_secret
from pantheraml.service.webhooks.targets import TargetError, resolve

router = APIRouter(prefix="/v1", tags=["webhooks"])

MOST_ENDPOINTS = 20
"""Endpoints of one user."""
_DAY = 86_400.0


@router.get("/webhook_event_types")
async def list_event_types(principal: Reader) -> dict[str, Any]:
    return {"object": "list", "data": list(EVENT_TYPES)}


@router.post("/webhook_endpoints")
async def create_endpoint(
    body: CreateEndpoint, request: Request, principal: Submitter, context: Context
) -> dict[str, Any]:
    """The response shows the signing secret, only this once."""
    await _check(body.url, context)
    now = time.time()
    endpoint = WebhookEndpoint(
        id=new_id("whe"),
        owner=principal.user,
        name=body.name,
        url=body.url,
        event_types=sorted(set(body.event_types)),
        secret=new_secret(),
        old_secret=None,
        old_secret_until=None,
        created_at=now,
        updated_at=now,
    )
    async with context.database.write() as session:
        mine = select(func.count()).select_from(WebhookEndpoint).where(WebhookEndpoint.owner == principal.user)
        if (await session.scalar(mine) or 0) >= MOST_ENDPOINTS:
            raise ApiError(403, f"You have {MOST_ENDPOINTS} webhook endpoints; delete some.", code="quota_exceeded")
        session.add(endpoint)
        audit.record(session, principal, "webhook.create", endpoint.id, request)
    return {**endpoint_object(endpoint), "signing_secret": endpoint.secret}


@router.get("/webhook_endpoints")
async def list_endpoints(
    principal: Reader,
    context: Context,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """Newest first."""
    query = select(WebhookEndpoint)
    if principal.owner is not None:
        query = query.where(WebhookEndpoint.owner == principal.owner)
    cursor = None if after is None else await _existing(context, principal, after)
    async with context.database.read() as session:
        page = await fetch_page(session, query, WebhookEndpoint, limit=limit, cursor=cursor)
    return page.as_list(endpoint_object)


@router.get("/webhook_endpoints/{endpoint_id}")
async def retrieve_endpoint(endpoint_id: str, principal: Reader, context: Context) -> dict[str, Any]:
    return endpoint_object(await _existing(context, principal, endpoint_id))


@router.post("/webhook_endpoints/{endpoint_id}")
async def update_endpoint(
    endpoint_id: str, body: UpdateEndpoint, request: Request, principal: Submitter, context: Context
) -> dict[str, Any]:
    """Change the fields in the body."""
    endpoint = await _existing(context, principal, endpoint_id)
    if body.url is not None:
        await _check(body.url, context)
    changes = body.model_dump(exclude_none=True)
    if "event_types" in changes:
        changes["event_types"] = sorted(set(changes["event_types"]))
    if any(getattr(endpoint, name) != value for name, value in changes.items()):
        endpoint = await _change(context, principal, endpoint_id, "webhook.update", request, changes)
    return endpoint_object(endpoint)


@router.post("/webhook_endpoints/{endpoint_id}/rotate_secret")
async def rotate_secret(
    endpoint_id: str, request: Request, principal: Submitter, context: Context, body: RotateSecret | None = None
) -> dict[str, Any]:
    """Create a new signing secret, shown only in this response."""
    endpoint = await _existing(context, principal, endpoint_id)
    keep = body is not None and body.keep_old_secret_active_for_24_hours
    changes = {
        "secret": new_secret(),
        "old_secret": endpoint.secret if keep else None,
        "old_secret_until": time.time() + _DAY if keep else None,
    }
    endpoint = await _change(context, principal, endpoint_id, "webhook.rotate", request, changes)
    return {**endpoint_object(endpoint), "signing_secret": endpoint.secret}


@router.post("/webhook_endpoints/{endpoint_id}/test")
async def test_endpoint(endpoint_id: str, body: TestEndpoint, principal: Submitter, context: Context) -> dict[str, Any]:
    """Send a sample event at once; its job, `ftjob-test`, does not exist."""
    endpoint = await _existing(context, principal, endpoint_id)
    sample = delivery(endpoint, body.event_type, {"id": "ftjob-test", "message": "A test of this endpoint"})
    try:
        status = await context.webhooks.post_once(endpoint, sample.id, sample.body)
    except DeliveryError as err:
        raise ApiError(400, f"The test was not delivered: {err}", code="delivery_failed") from err
    return {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": endpoint.id,
        "event_type": body.event_type,
        "status_code": status,
        "success": True,
    }


@router.delete("/webhook_endpoints/{endpoint_id}")
async def delete_endpoint(endpoint_id: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """Delete an endpoint, with its undelivered events."""
    await _existing(context, principal, endpoint_id)
    async with context.database.write() as session:
        await session.delete(await session.get_one(WebhookEndpoint, endpoint_id))
        audit.record(session, principal, "webhook.delete", endpoint_id, request)
    return {"id": endpoint_id, "object": "webhook_endpoint.deleted", "deleted": True}


async def _existing(context: ServiceContext, principal: Principal, endpoint_id: str) -> WebhookEndpoint:
    async with context.database.read() as session:
        endpoint = await session.get(WebhookEndpoint, endpoint_id)
    if endpoint is None or principal.owner not in (None, endpoint.owner):
        raise not_found("webhook endpoint", endpoint_id, param="webhook_endpoint_id")
    return endpoint


async def _change(
    context: ServiceContext,
    principal: Principal,
    endpoint_id: str,
    action: str,
    request: Request,
    changes: dict[str, Any],
) -> WebhookEndpoint:
    async with context.database.write() as session:
        endpoint = await session.get_one(WebhookEndpoint, endpoint_id)
        for name, value in {**changes, "updated_at": time.time()}.items():
            setattr(endpoint, name, value)
        audit.record(session, principal, action, endpoint_id, request)
    return endpoint


async def _check(url: str, context: ServiceContext) -> None:
    allow_private = context.settings.allow_private_webhooks
    try:
        await resolve(url, allow_private=allow_private)
    except TargetError as err:
        raise ApiError(400, str(err), param="url", code="url_not_allowed") from err

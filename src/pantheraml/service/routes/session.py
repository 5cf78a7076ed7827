"""Sign-in of the dashboard: `GET /session` returns the user, `POST` signs in with a key, `DELETE` signs out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pantheraml import __version__
from pantheraml.service import audit, sessions
from pantheraml.service.auth import Principal
from pantheraml.service.context import Context
from pantheraml.service.errors import ApiError

router = APIRouter(prefix="/session", tags=["session"])


@router.get("")
async def who_am_i(request: Request, context: Context) -> dict[str, Any]:
    """User and scopes; `user` is null for a browser that must sign in first."""
    try:
        principal = await context.authenticator.principal(request)
    except ApiError as err:
        if err.status != 401:
            raise
        return _described(None, keys_required=True)
    return _described(principal, keys_required=not context.authenticator.is_open)


@router.post("")
async def sign_in(request: Request, response: Response, context: Context) -> dict[str, Any]:
    """Exchange the key of the header `Authorization` for a session cookie."""
    sessions.refuse_forgery(request)
    if not request.headers.get("authorization"):
        raise ApiError(401, "Send the key in the header `Authorization: Bearer KEY`.", code="invalid_api_key")
    principal = await context.authenticator.principal(request)
    if principal.key_id is not None:
        async with context.database.write() as session:
            cookie = await sessions.open_session(session, principal.key_id)
            audit.record(session, principal, "session.open", principal.key_id, request)
        sessions.give_cookie(request, response, cookie)
    return _described(principal, keys_required=principal.key_id is not None)


@router.delete("")
async def sign_out(request: Request, response: Response, context: Context) -> dict[str, Any]:
    """End the session, which invalidates its cookie."""
    sessions.refuse_forgery(request)
    cookie = request.cookies.get(sessions.cookie_name(request))
    if cookie:
        async with context.database.write() as session:
            closed = await sessions.close_session(session, cookie)
            if closed is not None:
                session.add(audit.entry(closed.user, "session.close", closed.id, request))
        sessions.take_cookie(request, response)
    return _described(None, keys_required=not context.authenticator.is_open)


def _described(principal: Principal | None, *, keys_required: bool) -> dict[str, Any]:
    return {
        "object": "session",
        "user": None if principal is None else principal.user,
        "scopes": [] if principal is None else sorted(principal.scopes),
        "keys_required": keys_required,
        "version": __version__,
    }

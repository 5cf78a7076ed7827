"""The audit log: user, action and target, written in the transaction of the change."""

from __future__ import annotations

import time

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.auth import Principal
from pantheraml.service.store.tables import Audit


def record(session: AsyncSession, principal: Principal, action: str, target: str, request: Request) -> None:
    """`action`: such as `job.create`; `target`: the id."""
    session.add(entry(principal.user, action, target, request))


def entry(user: str, action: str, target: str, request: Request) -> Audit:
    return Audit(
        created_at=time.time(),
        user=user,
        action=action,
        target=target,
        request_id=request.scope.get("request_id"),
    )

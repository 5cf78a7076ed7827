"""Request bodies of webhook endpoints, and endpoints in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pantheraml.service.store.tables import WebhookEndpoint
from pantheraml.service.store.webhooks import EVENT_TYPES
from pantheraml.service.webhooks.signing import hint


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _known(value: str) -> str:
    if value not in EVENT_TYPES:
        raise ValueError(f"there is no such event type here; there are {', '.join(EVENT_TYPES)}")
    return value


EventType = Annotated[str, AfterValidator(_known)]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=len(EVENT_TYPES))]
Name = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00]+$")]
Url = Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]+$")]


class CreateEndpoint(_Body):
    event_types: EventTypes
    name: Name
    url: Url


class UpdateEndpoint(_Body):
    event_types: EventTypes | None = None
    name: Name | None = None
    url: Url | None = None


class RotateSecret(_Body):
    keep_old_secret_active_for_24_hours: bool = False


class TestEndpoint(_Body):
    event_type: EventType


def endpoint_object(endpoint: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "created_at": int(endpoint.created_at),
        "updated_at": int(endpoint.updated_at),
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": hint(endpoint.secret),
    }

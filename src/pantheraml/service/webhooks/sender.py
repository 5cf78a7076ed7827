"""Delivers queued webhooks: at least once, in no fixed order, retried with growing delays."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import time

import httpx2
from sqlalchemy import select

from pantheraml import __version__
from pantheraml.base import log
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database, is_away
from pantheraml.service.store.tables import WebhookDelivery, WebhookEndpoint
from pantheraml.service.webhooks.signing import signed_headers
from pantheraml.service.webhooks.targets import TargetError, resolve

logger = log.get(__name__)

PAUSES = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 36_000.0)
"""Seconds before each retry; after the last one the delivery is given up."""
TIMEOUT_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_AT_ONCE, _PER_ENDPOINT = 16, 2


class DeliveryError(Exception):
    """The delivery failed; the message says why."""


class WebhookSender:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._flying: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Endpoint and task of each delivery in progress."""

    async def run(self) -> None:
        async with self._client() as client:
            try:
                while True:
                    try:
                        await self._start_due(client)
                    except Exception as err:
                        if is_away(err):
                            logger.error("the database does not answer; webhooks are tried again: %s", err)
                        else:
                            logger.exception("webhooks failed once; they are tried again")
                    await asyncio.sleep(_LOOK_SECONDS)
            finally:
                tasks = [task for _, task in self._flying.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            timeout=TIMEOUT_SECONDS,
            follow_redirects=False,  # the next address would not have been checked
            trust_env=False,
            # a connection to an address that was checked for one name must not be reused for another
            limits=httpx2.Limits(max_keepalive_connections=0),
            headers={"user-agent": f"pantheraml/{__version__}", "content-type": "application/json"},
        )

    async def _start_due(self, client: httpx2.AsyncClient) -> None:
        due = WebhookDelivery.next_at <= time.time()
        query = select(WebhookDelivery, WebhookEndpoint).where(due).order_by(WebhookDelivery.next_at).limit(500)
        joined = query.join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        async with self._database.read() as session:
            rows = (await session.execute(joined)).all()
        busy = collections.Counter(endpoint for endpoint, _ in self._flying.values())
        for each, endpoint in rows:
            if len(self._flying) >= _AT_ONCE or busy[endpoint.id] >= _PER_ENDPOINT or each.id in self._flying:
                continue
            busy[endpoint.id] += 1
            task = asyncio.create_task(self._deliver(client, each, endpoint))
            self._flying[each.id] = endpoint.id, task
            task.add_done_callback(functools.partial(self._landed, each.id))

    def _landed(self, name: str, task: asyncio.Task[None]) -> None:
        del self._flying[name]

    async def _deliver(self, client: httpx2.AsyncClient, each: WebhookDelivery, endpoint: WebhookEndpoint) -> None:
        now = time.time()
        try:
            status = await self.post(client, endpoint, each.id, each.body)
            outcome, arrived = f"answered {status}", 200 <= status < 300
        except DeliveryError as err:
            outcome, arrived = str(err), False
        next_at = None if arrived or each.attempts >= len(PAUSES) else now + PAUSES[each.attempts]
        with contextlib.suppress(Exception):  # then it is sent once more
            async with self._database.write() as session:
                current = await session.get(WebhookDelivery, each.id)
                if current is not None:  # otherwise its endpoint was deleted meanwhile
                    current.attempts, current.next_at, current.outcome = each.attempts + 1, next_at, outcome
        if not arrived:
            again = "it is given up" if next_at is None else f"again in {next_at - now:.0f} s"
            logger.info("webhook %s to %s: %s; %s", each.id, endpoint.id, outcome, again)

    async def post(self, client: httpx2.AsyncClient, endpoint: WebhookEndpoint, name: str, body: str) -> int:
        """Send it now; return the status of the answer. DeliveryError if there is none."""
        now = time.time()
        secrets = [endpoint.secret]
        if endpoint.old_secret is not None and (endpoint.old_secret_until or 0.0) > now:
            secrets.append(endpoint.old_secret)
        try:
            target = await resolve(endpoint.url, allow_private=self._settings.allow_private_webhooks)
            headers = {"host": target.host, **signed_headers(secrets, name, int(now), body)}
            request = client.build_request(
                "POST", target.url, content=body, headers=headers, extensions={"sni_hostname": target.name}
            )
            async with asyncio.timeout(TIMEOUT_SECONDS):
                response = await client.send(request, stream=True)
            await response.aclose()  # the body is not needed
        except TargetError as err:
            raise DeliveryError(str(err)) from err
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as err:
            raise DeliveryError(f"no answer: {type(err).__name__}") from err
        return int(response.status_code)

    async def post_once(self, endpoint: WebhookEndpoint, name: str, body: str) -> int:
        """Like `post`, for a single message that is not queued."""
        async with self._client() as client:
            return await self.post(client, endpoint, name, body)

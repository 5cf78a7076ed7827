"""Signatures in the form of the Standard Webhooks specification, as OpenAI's `client.webhooks.unwrap()` checks them.

webhook-signature: v1,BASE64(HMAC-SHA256(secret, "ID.TIMESTAMP.BODY"))
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Iterable

_PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def hint(secret: str) -> str:
    """Return a hint that identifies a secret without revealing it."""
    return f"{_PREFIX}...{secret[-4:]}"


def signed_headers(keys: Iterable[str], message_id: str, timestamp: int, body: str) -> dict[str, str]:
    """`keys`: all currently valid ones; each adds a signature."""
    signed = f"{message_id}.{timestamp}.{body}".encode()
    signatures = [
        base64.b64encode(hmac.new(base64.b64decode(key.removeprefix(_PREFIX)), signed, hashlib.sha256).digest())
        for key in keys
    ]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature.decode()}" for signature in signatures),
    }

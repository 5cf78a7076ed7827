"""Fingerprint of prepared data: a hash of the source content, the tokenizer and every setting that affects the result.

Equal fingerprints mean equal sequences, so the sample order and the cache are keyed by it. Paths, timestamps and the
number of processes are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pantheraml.data.render import chat_template
from pantheraml.data.token_store import LAYOUT_VERSION


def tokenizer_digest(tokenizer: Any, *, with_template: bool) -> str:
    """Hash the tokenizer, including its chat template if `with_template`."""
    # tokenizer.json starts with the truncation and padding of the last call, which are call state
    text: str = tokenizer.backend_tokenizer.to_str()
    content = text[text.index('"added_tokens"') :]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    splits = bool(getattr(tokenizer, "split_special_tokens", False))  # not stored in tokenizer.json
    # a tokenizer with several templates may use another one when tools are given
    templates = [chat_template(tokenizer), tokenizer.get_chat_template(tools=[])] if with_template else None
    return _digest(content, special, splits, templates)


def data_fingerprint(content: str, tokenizer: str, **settings: Any) -> str:
    """Combine the digests of sources and tokenizer with the settings that affect the result."""
    return _digest(LAYOUT_VERSION, content, tokenizer, settings)


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

"""What identifies prepared data: the content of its sources and everything that shapes the result, hashed.

Equal fingerprints mean equal sequences, which is why the order of samples and the cache are keyed by it. Paths, times
and the number of processes do not enter.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pantheraml.data.render import chat_template
from pantheraml.data.store import LAYOUT_VERSION


def tokenizer_digest(tokenizer: Any, *, with_template: bool) -> str:
    """A hash of what the tokenizer does; its chat template counts where the data needs it."""
    # tokenizer.json starts with the truncation and padding of the last call, which are no part of what it is
    text: str = tokenizer.backend_tokenizer.to_str()
    content = text[text.index('"added_tokens"') :]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    splits = bool(getattr(tokenizer, "split_special_tokens", False))  # kept beside tokenizer.json, not in it
    # with tools, a tokenizer of several templates takes another one
    templates = [chat_template(tokenizer), tokenizer.get_chat_template(tools=[])] if with_template else None
    return _digest(content, special, splits, templates)


def data_fingerprint(content: str, tokenizer: str, **settings: Any) -> str:
    """The name of prepared data, from the digests of sources and tokenizer and the settings that shape the result."""
    return _digest(LAYOUT_VERSION, content, tokenizer, settings)


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

from __future__ import annotations

from typing import Any

from pantheraml.data.fingerprint import data_fingerprint, tokenizer_digest


def test_tokenizer_digest_ignores_call_state(tokenizer: Any) -> None:
    before = tokenizer_digest(tokenizer, with_template=False)
    tokenizer(["a b c d e f"], truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_digest(tokenizer, with_template=False) == before


def test_tokenizer_digest_covers_vocabulary_and_special_tokens(tokenizer: Any) -> None:
    def digest(**special: str) -> str:
        return tokenizer_digest(
            type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, **special), with_template=False
        )

    assert digest(eos_token="</s>") == digest(eos_token="</s>")
    assert digest(eos_token="</s>") != digest(eos_token="<|im_end|>")
    assert digest() != digest(additional_special_tokens=["<new>"])


def test_a_fingerprint_depends_on_each_of_its_parts() -> None:
    first = data_fingerprint("content", "tokenizer", seq_len=8, packing=True)
    assert first == data_fingerprint("content", "tokenizer", packing=True, seq_len=8)
    others = [
        data_fingerprint("other", "tokenizer", seq_len=8, packing=True),
        data_fingerprint("content", "other", seq_len=8, packing=True),
        data_fingerprint("content", "tokenizer", seq_len=9, packing=True),
        data_fingerprint("content", "tokenizer", seq_len=8),
    ]
    assert len({first, *others}) == 5

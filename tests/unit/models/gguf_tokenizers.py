"""Small trained tokenizers of the kinds that GGUF files can contain."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The cat's hat isn't what we'd call new; they've 12345 of THEM.",
    "Wie geht's? Übung macht den Meister, 67 Mal am Tag.  \n\n  Zeile\tzwei",
    "def f(x):\n    return x ** 2  # a comment\n",
    "hello hello world, the world of the cat and the hat and the others",
] * 4
CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
SIZE = 400


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return "gpt-2", "smollm", "qwen2", "llama-bpe", or "llama" and "gemma", which are SentencePiece's."""
    backend = _sentencepiece(prefix=kind == "llama") if kind in ("llama", "gemma") else _byte_level(kind)
    special = [AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>", "<|user|>")]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT
    assert len(fast) <= SIZE
    return fast


def _byte_level(kind: str) -> Tokenizer:
    digits: Any = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}.get(kind)
    backend = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    if digits is None:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if kind == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        split = pre_tokenizers.Split(Regex(CASELESS + digits + REST), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=SIZE - 10, initial_alphabet=alphabet))
    return backend


def _sentencepiece(*, prefix: bool) -> Tokenizer:
    """A BPE over whole texts, with byte tokens for unknown characters, as converted from SentencePiece."""
    spaced = [text.replace(" ", "\u2581") for text in TEXT]
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(
        [word for text in spaced for word in text.split("\n")], trainers.BpeTrainer(vocab_size=110, max_token_length=6)
    )
    learned = trained.get_vocab()
    ordered = sorted(learned, key=lambda token: learned[token])
    merged = [token for token in ordered if len(token) > 1]
    # as the conversion lists merges: every pair of tokens that makes a token, by the token's rank
    merges = [
        (token[:cut], token[cut:])
        for token in merged
        for cut in range(1, len(token))
        if token[:cut] in learned and token[cut:] in learned
    ]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *ordered]
    vocab = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend

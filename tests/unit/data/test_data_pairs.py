from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pantheraml.data.documents import loss_mask
from pantheraml.data.formats import Encoder, render_prompt
from pantheraml.data.pairs import _first_after, encode_pairs, plain_ids
from pantheraml.data.row_formats import validate_row

TEXTS = [
    "def foo(bar): return 42",
    "the answer is 42",
    "f oo foo def f 0 1 2",
    "Größe naïve 日本語 \n\n a  b",
    "a.b#c",
] * 20
SPECIAL = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def metaspace(scheme: str, kind: str) -> Any:
    """Like the tokenizer.json of SentencePiece models: a space before the text, then BPE or a Unigram lattice."""
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0)], 0, byte_fallback=True))
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=400, special_tokens=[*SPECIAL, *BYTES], unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    described = json.loads(tokenizer.to_str())
    described["model"]["byte_fallback"] = True  # Unigram's trainer forgets it
    tokenizer = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def legacy_llama() -> Any:
    """Prepend a space to every text with a normalizer, as in Llama 2's tokenizer.json."""
    made = metaspace("never", "bpe").backend_tokenizer
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


# as in Qwen and GPT-4: digits in groups of three, line breaks with the text before them
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(add_prefix_space: bool = False, trim_offsets: bool = False, pattern: str | None = None) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    if not add_prefix_space:
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = {
    "metaspace-always-bpe": lambda: metaspace("always", "bpe"),
    "metaspace-first-bpe": lambda: metaspace("first", "bpe"),
    "metaspace-always-unigram": lambda: metaspace("always", "unigram"),
    "metaspace-first-unigram": lambda: metaspace("first", "unigram"),
    "legacy-llama": legacy_llama,
    "byte-level": byte_level,
    "byte-level-trimmed": lambda: byte_level(trim_offsets=True),
    "byte-level-gpt4": lambda: byte_level(pattern=GPT4),
    "byte-level-prefix-space": lambda: byte_level(add_prefix_space=True),
}
PAIRS = [
    ("def f", "oo(bar)"),
    ("the answer is", " 42"),
    ("the answer is ", "42"),
    ("the answer is:\n", "42"),
    ("the answer is\n", "\n42"),
    ("a  ", "  b"),
    ("Grö", "ße"),
    ("日本", "語 日本語"),
    ("x", "🎈🎈"),
    ("🎈", "🎈"),
    ("0", "0"),
    ("f", "   "),
    ("na", "i\u0308ve"),
]


@pytest.fixture(scope="module", params=TOKENIZERS)
def made(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize(("prompt", "answer"), PAIRS)
def test_pairs_decode_to_the_text_and_prompts_match_generation(made: Any, prompt: str, answer: str) -> None:
    ((prompt_ids, targets),) = encode_pairs(made, [prompt], [answer])
    assert made.decode(prompt_ids + targets, clean_up_tokenization_spaces=False) == prompt + answer
    assert prompt_ids == plain_ids(made, [prompt])[0]
    assert targets


def test_random_texts_split_anywhere(made: Any) -> None:
    random = np.random.default_rng(0)
    pieces = [
        "foo",
        "def",
        " ",
        "  ",
        "\n",
        "(",
        "1",
        "234",
        "Größe",
        "日",
        "🎈",
        ".",
        "is",
        "the answer",
        "\t",
        "e\u0301",
    ]
    texts = ["a" + "".join(random.choice(pieces, size=8)) + "b" for _ in range(150)]
    boundaries = [int(random.integers(1, len(text))) for text in texts]
    prompts = [text[:boundary] for text, boundary in zip(texts, boundaries, strict=True)]
    pairs = encode_pairs(made, prompts, [text[boundary:] for text, boundary in zip(texts, boundaries, strict=True)])
    for text, own, (prompt_ids, targets) in zip(texts, plain_ids(made, prompts), pairs, strict=True):
        assert made.decode(prompt_ids + targets, clean_up_tokenization_spaces=False) == text
        assert prompt_ids == own


def test_a_clean_boundary_keeps_the_joint_tokens(made: Any) -> None:
    ((prompt_ids, targets),) = encode_pairs(made, ["the answer is"], [" 42"])
    assert prompt_ids + targets == plain_ids(made, ["the answer is 42"])[0]


@pytest.mark.parametrize("format", ["prompt", "instruction"])
def test_a_completion_gains_no_space(made: Any, format: str) -> None:
    names = ("prompt", "completion") if format == "prompt" else ("instruction", "output")
    row = dict(zip(names, ("def f", "oo(bar)"), strict=True))
    ((tokens, runs),) = Encoder(format, made).encode([validate_row(format, row)])
    text = made.decode(tokens, clean_up_tokenization_spaces=False)
    assert text == (
        "def foo(bar)</s>" if format == "prompt" else "### Instruction:\ndef f\n\n### Response:\noo(bar)</s>"
    )
    prompt = render_prompt(format, "def f", made)
    assert tokens.tolist()[: len(prompt)] == prompt
    assert loss_mask(runs, len(tokens)).tolist() == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))


def test_a_straddling_token_bears_loss() -> None:
    """With whole-word tokens, only the word that spans the boundary can be learned."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "foo": 1, "def": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert encode_pairs(words, ["def f"], ["oo"]) == [([2], [1])]


def test_zero_width_white_space_tokens_are_assigned_by_position() -> None:
    class Encoding:
        offsets = ((0, 3), (4, 4), (5, 5), (6, 8))

        def __len__(self) -> int:
            return len(self.offsets)

    assert _first_after(Encoding(), 3) == 1
    assert _first_after(Encoding(), 4) == 2
    assert _first_after(Encoding(), 8) == 4

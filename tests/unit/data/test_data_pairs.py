from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pantheraml.data.documents import loss_mask
from pantheraml.data.formats import Encoder, checked, render_prompt
from pantheraml.data.pairs import _first_after, encode_pairs, plain_ids

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
    """As tokenizer.json of SentencePiece models has it: a space before the text, the rest by merges or by a lattice."""
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
    """A space before every text by a normalizer, as in Llama 2's tokenizer.json."""
    made = metaspace("never", "bpe").backend_tokenizer
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


# as of Qwen and GPT-4: digits in threes, line ends with what precedes them
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
def test_prompt_and_answer_are_the_text_and_the_prompt_is_that_of_generation(
    made: Any, prompt: str, answer: str
) -> None:
    ((given, learnt),) = encode_pairs(made, [prompt], [answer])
    assert made.decode(given + learnt, clean_up_tokenization_spaces=False) == prompt + answer
    assert given == plain_ids(made, [prompt])[0]
    assert learnt


def test_any_text_divided_anywhere(made: Any) -> None:
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
    borders = [int(random.integers(1, len(text))) for text in texts]
    prompts = [text[:border] for text, border in zip(texts, borders, strict=True)]
    pairs = encode_pairs(made, prompts, [text[border:] for text, border in zip(texts, borders, strict=True)])
    for text, own, (given, learnt) in zip(texts, plain_ids(made, prompts), pairs, strict=True):
        assert made.decode(given + learnt, clean_up_tokenization_spaces=False) == text
        assert given == own


def test_where_the_border_lies_between_tokens_they_are_those_of_the_whole(made: Any) -> None:
    ((given, learnt),) = encode_pairs(made, ["the answer is"], [" 42"])
    assert given + learnt == plain_ids(made, ["the answer is 42"])[0]


@pytest.mark.parametrize("format", ["prompt", "instruction"])
def test_a_completion_gains_no_space(made: Any, format: str) -> None:
    names = ("prompt", "completion") if format == "prompt" else ("instruction", "output")
    row = dict(zip(names, ("def f", "oo(bar)"), strict=True))
    ((tokens, runs),) = Encoder(format, made).encode([checked(format, row)])
    text = made.decode(tokens, clean_up_tokenization_spaces=False)
    assert text == (
        "def foo(bar)</s>" if format == "prompt" else "### Instruction:\ndef f\n\n### Response:\noo(bar)</s>"
    )
    prompt = render_prompt(format, "def f", made)
    assert tokens.tolist()[: len(prompt)] == prompt
    assert loss_mask(runs, len(tokens)).tolist() == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))


def test_a_token_that_cannot_be_divided_bears_loss() -> None:
    """Whole words only: nothing but the word that holds both can be learnt."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "foo": 1, "def": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert encode_pairs(words, ["def f"], ["oo"]) == [([2], [1])]


def test_tokens_of_white_space_without_width_belong_to_what_they_stand_in() -> None:
    class Encoding:
        offsets = ((0, 3), (4, 4), (5, 5), (6, 8))

        def __len__(self) -> int:
            return len(self.offsets)

    assert _first_after(Encoding(), 3) == 1
    assert _first_after(Encoding(), 4) == 2
    assert _first_after(Encoding(), 8) == 4

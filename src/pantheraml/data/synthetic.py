"""Synthetic data, tokenizer and model config for the demo: small tasks with exactly checkable answers.

The base tasks teach a randomly initialized model to copy, to reorder and to write dates; the target task, which the
base model never sees, needs those skills in a new form. Everything is a pure function of its seed, so the demo is the
same on any host.

    base     "Date to ISO: 14 March 2023"                                 " 2023-03-14"
    target   "Payment to JSON: Ada Costa paid 250 EUR on 14 March 2023."  ' {"name": "Ada Costa", "amount": ...}'

Word lists are short and numbers have a fixed width on purpose: a tiny model copies a word only after seeing it often,
and learns late where a number ends. There are still 10^9 different payments, so held-out examples are new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pantheraml.base.folders import write_text

FIRST_NAMES = ("Ada", "Ben", "Carla", "David", "Elena", "Hugo", "Ines", "Jonas", "Maya", "Nora", "Omar", "Rosa")
LAST_NAMES = (
    *("Brandt", "Costa", "Evans", "Garcia", "Jensen", "Keller"),
    *("Lopez", "Meyer", "Novak", "Rossi", "Silva", "Weber"),
)
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
CURRENCIES = ("EUR", "USD", "GBP")
CITIES = ("Lima", "Oslo", "Paris", "Rome", "Seoul", "Tokyo")
ITEMS = ("lamp", "chair", "desk", "phone", "clock", "guitar")
FIRST_DAY, DAYS = date(1990, 1, 1), 40 * 365

DRAWS_PER_EXAMPLE = 100  # draws before giving up on finding more distinct examples

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"


class Example(NamedTuple):
    """A prompt and its only correct completion, which starts with the space after the prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Task:
    name: str
    description: str
    make: Callable[[Random], Example]


@dataclass(frozen=True)
class Split:
    """Training examples and held-out examples."""

    train: list[Example]
    held_out: list[Example]


def _date(rng: Random) -> date:
    return FIRST_DAY + timedelta(days=rng.randrange(DAYS))


def _words(day: date) -> str:
    return f"{day.day:02} {MONTHS[day.month - 1]} {day.year}"


def _name(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _amount(rng: Random) -> str:
    return f"{rng.randint(100, 999)} {rng.choice(CURRENCIES)}"


def _json(value: Any) -> str:
    return f" {json.dumps(value)}"


def _date_to_iso(rng: Random) -> Example:
    day = _date(rng)
    return Example(f"Date to ISO: {_words(day)}", f" {day.isoformat()}")


def _date_in_words(rng: Random) -> Example:
    day = _date(rng)
    return Example(f"Date in words: {day.isoformat()}", f" {_words(day)}")


def _add(rng: Random) -> Example:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return Example(f"Add: {a} + {b}", f" {a} + {b} = {a + b}")


def _reverse(rng: Random) -> Example:
    words = rng.sample(FIRST_NAMES + LAST_NAMES + CURRENCIES + CITIES + ITEMS, 3)
    return Example(f"Reverse: {' '.join(words)}", f" {' '.join(reversed(words))}")


def _list(rng: Random) -> Example:
    entries = [rng.choice((_name, _amount))(rng) for _ in range(3)]
    return Example(f"List to JSON: {', '.join(entries)}", _json(entries))


def _person(rng: Random) -> Example:
    name, born, city = _name(rng), _date(rng), rng.choice(CITIES)
    record = {"name": name, "born": born.isoformat(), "city": city}
    return Example(f"Person to JSON: {name}, born {_words(born)}, lives in {city}.", _json(record))


def _order(rng: Random) -> Example:
    name, item, count, amount = _name(rng), rng.choice(ITEMS), rng.randint(10, 99), _amount(rng)
    record = {"item": item, "count": count, "amount": amount, "name": name}
    return Example(f"Order to JSON: {name} wants {count} of {item} for {amount}.", _json(record))


def _trip(rng: Random) -> Example:
    name, day, (start, end) = _name(rng), _date(rng), rng.sample(CITIES, 2)
    record = {"date": day.isoformat(), "name": name, "from": start, "to": end}
    return Example(f"Trip to JSON: on {_words(day)} {name} flew from {start} to {end}.", _json(record))


def _invoice(rng: Random) -> Example:
    item, amount, due = rng.choice(ITEMS), _amount(rng), _date(rng)
    return Example(f"Invoice to CSV: {amount} for a {item}, due {_words(due)}.", f" {item},{amount},{due.isoformat()}")


def _payment(rng: Random) -> Example:
    name, amount, day = _name(rng), _amount(rng), _date(rng)
    record = {"name": name, "amount": amount, "date": day.isoformat()}
    return Example(f"Payment to JSON: {name} paid {amount} on {_words(day)}.", _json(record))


BASE_TASKS = (
    Task("date-to-iso", "a date in words, written as ISO 8601", _date_to_iso),
    Task("date-in-words", "an ISO 8601 date, written in words", _date_in_words),
    Task("add", "the sum of two digits", _add),
    Task("reverse", "three words in reverse order", _reverse),
    Task("list-to-json", "three names or amounts as a JSON list", _list),
    Task("person-to-json", "a sentence about a person as a JSON object", _person),
    Task("order-to-json", "a sentence about an order as a JSON object", _order),
    Task("trip-to-json", "a sentence about a trip as a JSON object", _trip),
    Task("invoice-to-csv", "a sentence about an invoice as a CSV line", _invoice),
)
TARGET_TASK = Task("payment-to-json", "a sentence about a payment as a JSON object", _payment)


def base_examples(count: int, *, seed: int, tasks: Sequence[Task] = BASE_TASKS) -> list[Example]:
    """Return `count` examples, evenly spread over the tasks, in random order."""
    rng = Random(seed)
    examples = [tasks[i % len(tasks)].make(rng) for i in range(count)]
    rng.shuffle(examples)
    return examples


def split_examples(task: Task, *, train: int, held_out: int, seed: int) -> Split:
    """Return examples of one task with distinct prompts, so that no held-out example was trained on."""
    rng = Random(seed)
    total = train + held_out
    by_prompt: dict[str, Example] = {}
    for _ in range(DRAWS_PER_EXAMPLE * total):
        example = task.make(rng)
        by_prompt.setdefault(example.prompt, example)
        if len(by_prompt) == total:
            break
    else:
        raise ValueError(f"the task {task.name} has fewer than {total} different examples")
    examples = list(by_prompt.values())
    return Split(train=examples[:train], held_out=examples[train:])


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Write JSON Lines with the columns `prompt` and `completion`."""
    write_text(path, "".join(json.dumps(example._asdict()) + "\n" for example in examples))


def write_tokenizer(folder: Path, examples: Iterable[Example], *, vocab_size: int) -> int:
    """Train a byte-level BPE tokenizer, write it in transformers' format, and return its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    # One token per digit: numbers that BPE splits unevenly are much harder to copy and reorder.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for example in examples for text in example), trainer)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": EOS_TOKEN,
    }
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=1))
    return int(tokenizer.get_vocab_size())


def write_model_config(
    folder: Path, *, vocab_size: int, hidden_size: int, layers: int, heads: int, longest: int
) -> None:
    """Write the `config.json` of a small Llama for the tokenizer of `write_tokenizer`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": longest,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        # The usual 0.02 suits wide models; a model this narrow would learn to copy much later.
        "initializer_range": 0.06,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    write_text(folder / "config.json", json.dumps(config, indent=1))

"""The demo's data: deterministic, correct by an independent computation, held out, and tokenized without loss."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from pantheraml.data.synthetic import (
    BASE_TASKS,
    TARGET_TASK,
    Example,
    Task,
    base_examples,
    split_examples,
    write_examples,
    write_model_config,
    write_tokenizer,
)

ALL_TASKS = (*BASE_TASKS, TARGET_TASK)
DATE = r"(\d\d \w+ \d{4})"


def iso(words: str) -> str:
    """Parse a date with strptime, independently of the implementation."""
    return time.strftime("%Y-%m-%d", time.strptime(words, "%d %B %Y"))


def found(pattern: str, prompt: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, prompt)
    assert match, prompt
    return match.groups()


def expected(task: Task, prompt: str) -> Any:
    """Return the correct answer, computed from the text of the prompt alone."""
    if task.name == "date-to-iso":
        return iso(*found(rf"Date to ISO: {DATE}", prompt))
    if task.name == "date-in-words":
        (day,) = found(r"Date in words: (\S+)", prompt)
        return time.strftime("%d %B %Y", time.strptime(day, "%Y-%m-%d"))
    if task.name == "add":
        a, b = found(r"Add: (\d+) \+ (\d+)", prompt)
        return f"{a} + {b} = {int(a) + int(b)}"
    if task.name == "reverse":
        return " ".join(found(r"Reverse: (.*)", prompt)[0].split()[::-1])
    if task.name == "list-to-json":
        return found(r"List to JSON: (.*)", prompt)[0].split(", ")
    if task.name == "person-to-json":
        name, born, city = found(rf"Person to JSON: (\w+ \w+), born {DATE}, lives in (\w+)\.", prompt)
        return {"name": name, "born": iso(born), "city": city}
    if task.name == "order-to-json":
        name, count, item, amount = found(r"Order to JSON: (\w+ \w+) wants (\d+) of (\w+) for (\d+ \w+)\.", prompt)
        return {"item": item, "count": int(count), "amount": amount, "name": name}
    if task.name == "trip-to-json":
        day, name, start, end = found(rf"Trip to JSON: on {DATE} (\w+ \w+) flew from (\w+) to (\w+)\.", prompt)
        return {"date": iso(day), "name": name, "from": start, "to": end}
    if task.name == "invoice-to-csv":
        amount, item, due = found(rf"Invoice to CSV: (\d+ \w+) for a (\w+), due {DATE}\.", prompt)
        return [item, amount, iso(due)]
    assert task.name == "payment-to-json"
    name, amount, day = found(rf"Payment to JSON: (\w+ \w+) paid (\d+ \w+) on {DATE}\.", prompt)
    return {"name": name, "amount": amount, "date": iso(day)}


def read(task: Task, completion: str) -> Any:
    if task.name.endswith("json"):
        return json.loads(completion)
    if task.name.endswith("csv"):
        return next(csv.reader([completion]))
    return completion


@pytest.mark.parametrize("task", ALL_TASKS, ids=lambda task: task.name)
def test_completions_are_correct(task: Task) -> None:
    rng = Random(3)
    for _ in range(300):
        prompt, completion = task.make(rng)
        assert completion[0] == " "
        assert completion[1:] == completion.strip()
        assert read(task, completion[1:]) == expected(task, prompt)


def test_task_names_and_instructions_are_unique() -> None:
    assert len({task.name for task in ALL_TASKS}) == len(ALL_TASKS)
    instructions = {task.make(Random(0)).prompt.partition(":")[0] for task in ALL_TASKS}
    assert len(instructions) == len(ALL_TASKS)


def test_base_examples_depend_on_the_seed_alone() -> None:
    assert base_examples(200, seed=5) == base_examples(200, seed=5)
    assert base_examples(200, seed=5) != base_examples(200, seed=6)


def test_examples_are_the_same_in_every_process() -> None:
    """Nothing may depend on hash order: the demo must give the same numbers everywhere."""
    program = (
        "from pantheraml.data.synthetic import *;"
        "print(base_examples(90, seed=1), split_examples(TARGET_TASK, train=20, held_out=5, seed=1))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_base_examples_cover_the_base_tasks_evenly_and_never_the_target() -> None:
    examples = base_examples(9 * 50, seed=0)
    counts = Counter(example.prompt.partition(":")[0] for example in examples)
    assert set(counts.values()) == {50}
    assert "Payment to JSON" not in counts
    first = [example.prompt.partition(":")[0] for example in examples[:9]]
    assert len(set(first)) < 9, "the examples are not shuffled"


def test_held_out_examples_are_not_in_the_training_set() -> None:
    split = split_examples(TARGET_TASK, train=2000, held_out=200, seed=0)
    assert (len(split.train), len(split.held_out)) == (2000, 200)
    prompts = {example.prompt for example in (*split.train, *split.held_out)}
    assert len(prompts) == 2200
    assert split == split_examples(TARGET_TASK, train=2000, held_out=200, seed=0)


def test_split_drops_repeated_examples() -> None:
    """`add` has 81 different prompts, so random draws repeat long before all of them are drawn."""
    add = next(task for task in BASE_TASKS if task.name == "add")
    split = split_examples(add, train=61, held_out=20, seed=0)
    assert len({example.prompt for example in (*split.train, *split.held_out)}) == 81


def test_split_rejects_more_examples_than_exist() -> None:
    add = next(task for task in BASE_TASKS if task.name == "add")
    with pytest.raises(ValueError, match="add"):
        split_examples(add, train=80, held_out=20, seed=0)


def test_examples_are_written_as_prompt_and_completion(tmp_path: Path) -> None:
    examples = base_examples(20, seed=0)
    write_examples(tmp_path / "rows.jsonl", examples)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [Example(**row) for row in rows] == examples


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    size = write_tokenizer(folder, base_examples(1000, seed=0), vocab_size=384)
    assert size == 384
    write_model_config(folder, vocab_size=size, hidden_size=64, layers=2, heads=4, longest=128)
    return folder


def test_transformers_loads_the_tokenizer(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.is_fast
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert len(tokenizer) == 384


def test_tokenizer_round_trips_every_text(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [text for task in ALL_TASKS for text in task.make(Random(8))]
    for text in [*texts, "Ünknown wörds , with  spaces ,\nlines and 漢字 ."]:
        ids = tokenizer(text, add_special_tokens=True)["input_ids"]
        assert not {tokenizer.pad_token_id, tokenizer.eos_token_id}.intersection(ids)
        assert tokenizer.decode(ids) == text


def test_tokenizer_merges_words_but_never_digits(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokens = tokenizer.tokenize("Person to JSON: 2023")
    assert tokens[-4:] == ["2", "0", "2", "3"]
    assert "ĠJSON" in tokens


def test_tokenizer_is_the_same_each_time(model_folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, base_examples(1000, seed=0), vocab_size=384)
    assert (tmp_path / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()


def test_transformers_loads_the_model_config(model_folder: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 384)
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_synthetic_data_needs_neither_torch_nor_transformers() -> None:
    program = "import sys, pantheraml.data.synthetic; print({'torch', 'transformers', 'peft'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

"""Data preparation: speed, packing efficiency and memory from JSON Lines to packed tokens.

Writes a file of the given size with log-normal document lengths (always the same bytes), trains a BPE tokenizer on its
beginning, runs `prepare` in a new process, and measures that process and its children from outside.

    python benchmarks/data_pipeline.py --megabytes 1000 --output result.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

NAME = "data_pipeline"
MEDIAN_CHARACTERS = 1200
SIGMA = 1.0
VOCABULARY_SIZE = 8192


def write_documents(path: Path, megabytes: int) -> None:
    """Write `{"text": ...}` lines sampled from a long text of made-up words with Zipf-like frequencies."""
    random = np.random.Generator(np.random.Philox(0))
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = ["".join(random.choice(letters, size=random.integers(2, 11))) for _ in range(30_000)]
    frequencies = 1 / (np.arange(len(words)) + 10.0)
    picks = random.choice(len(words), size=2_000_000, p=frequencies / frequencies.sum())
    text = " ".join(words[pick] for pick in picks)
    left = megabytes * 1_000_000
    with open(path, "w", encoding="utf-8") as file:
        while left > 0:
            lengths = np.exp(random.normal(np.log(MEDIAN_CHARACTERS), SIGMA, 1000)).astype(int).clip(20, 100_000)
            starts = random.integers(0, len(text) - lengths)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                left -= file.write(json.dumps({"text": text[start : start + length]}) + "\n")
                if left <= 0:
                    break


def train_tokenizer(data: Path, target: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with open(data, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(1000), strict=False)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(target))


def prepare_once(folder: Path, seq_len: int, workers: int) -> None:
    """Body of the measured process: prepare the data and print its `data.ready` event."""
    from transformers import PreTrainedTokenizerFast

    from pantheraml.data.prepare import prepare
    from pantheraml.specs.train import DataConfig

    def emit(event: Any, /) -> None:
        kind, fields = event.kind, event.model_dump()
        if kind == "data.ready":
            print(json.dumps(fields))

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<eos>")
    config = DataConfig(
        path=str(folder / "data.jsonl"), cache_dir=str(folder / "cache"), seq_len=seq_len, workers=workers
    )
    prepare(config, tokenizer=tokenizer, emit=emit)


def peak_memory(process: subprocess.Popen[str]) -> int:
    """Peak resident memory of a process and its children, until it ends.

    Pages shared by forked children count once per child, so this is an upper bound.
    """
    peak = 0
    while process.poll() is None:
        try:
            parent = psutil.Process(process.pid)
            peak = max(peak, sum(each.memory_info().rss for each in [parent, *parent.children(recursive=True)]))
        except psutil.NoSuchProcess:
            continue  # one of them ended in between
        time.sleep(0.05)
    return peak


def run(*, megabytes: int = 50, seq_len: int = 2048, workers: int = 0) -> dict[str, Any]:
    """Run one measurement."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "data.jsonl", megabytes)
        train_tokenizer(folder / "data.jsonl", folder / "tokenizer.json")
        command = [sys.executable, __file__, "--prepare", name, "--seq-len", str(seq_len), "--workers", str(workers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            peak = peak_memory(process)
            output = process.stdout.read() if process.stdout else ""
        if process.returncode != 0:
            raise SystemExit(f"preparing the data failed with exit code {process.returncode}")
        ready = json.loads(output)
        size = (folder / "data.jsonl").stat().st_size
    return {
        "parameters": {
            "megabytes": megabytes,
            "seq_len": seq_len,
            "workers": workers,
            "lengths": f"log-normal, median {MEDIAN_CHARACTERS} characters, sigma {SIGMA}",
            "vocabulary": VOCABULARY_SIZE,
        },
        "results": {
            "mb_per_second": size / 1e6 / ready["seconds"],
            "tokens_per_second": ready["tokens"] / ready["seconds"],
            "packing_efficiency": ready["efficiency"],
            "peak_rss_bytes": peak,
            "seconds": ready["seconds"],
            "tokens": ready["tokens"],
            "truncated_rows": ready["truncated_rows"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=50, help="size of the JSON Lines file")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per packed sequence")
    parser.add_argument("--workers", type=int, default=0, help="tokenizing processes; 0 = one per core")
    parser.add_argument("--output", type=Path, help="result file (default: standard output)")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare is not None:
        prepare_once(options.prepare, options.seq_len, options.workers)
        return
    measured = run(megabytes=options.megabytes, seq_len=options.seq_len, workers=options.workers)
    result = json.dumps({"name": NAME, **measured}, indent=2)
    if options.output is None:
        print(result)
    else:
        options.output.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

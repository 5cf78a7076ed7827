"""Compare fine-tuning over quantized weights with fine-tuning over bf16 weights, on real text.

A small model of a `family` is trained from scratch on prose (docstrings), then fine-tuned with LoRA on code (the
standard library), with the frozen weights in bf16 and in each quantized format, three seeds each, by the same code
that `pantheraml train` runs. Reported are the evaluation loss relative to bf16 with the same seed, and the cosine
between the gradients of all adapter weights at the first step: with B zero (where the gradient of A is zero) and with
a random B. nf4 runs fp8 matmuls, so its error is also split in two: that of quantized weights with bf16 matmuls, and
that of fp8 matmuls over the same weights. `nf4-quantized` is nf4 after `pantheraml quantize` has calibrated the base
on the text of the fine-tune. With `method=full` all weights are trained, with bf16 and with fp8 matmuls.

    python benchmarks/run.py accuracy                     on a GPU: some minutes
    python benchmarks/run.py accuracy --set method=full --set precisions=bf16,fp8
    python benchmarks/run.py accuracy --set family=qwen3
    python benchmarks/run.py accuracy --set size=cpu      on a CPU: a quarter of an hour, with the reference kernels
    python benchmarks/run.py accuracy --set size=tiny     on a CPU: a minute, as a smoke test
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import corpus
from accuracy_models import FAMILIES, model_config

from pantheraml.base.events import silent  # isort: skip
from table import Column, Table, markdown_table, percent

NEEDS_GPU = True

LARGEST_DIFFERENCE = 0.005
SMALLEST_COSINE = 0.99

QUANTIZED = "-quantized"
PRECISIONS = ("bf16", "fp8", "nf4", f"nf4{QUANTIZED}", "int8")
"""Formats of frozen weights, as in `model.precision`; calibrated by `pantheraml quantize`, or quantized when loaded."""

REFERENCE = "bf16"

METHODS = {"lora": 5e-4, "full": 1e-4}
"""Learning rate by method."""


@dataclass(frozen=True)
class Size:
    """Sizes of data, model and run; widths are multiples of 128, so that every fused kernel applies."""

    prose_megabytes: float = 8
    code_megabytes: float = 4
    vocabulary: int = 8192
    hidden: int = 768
    intermediate: int = 2048
    layers: int = 12
    head_dim: int = 64
    seq_len: int = 512
    batch: int = 16
    base_steps: int = 1000
    steps: int = 300
    rank: int = 16


SIZES = {
    "small": Size(),
    "cpu": Size(
        prose_megabytes=2,
        code_megabytes=2,
        vocabulary=2048,
        hidden=256,
        intermediate=512,
        layers=4,
        seq_len=128,
        batch=4,
        base_steps=800,
    ),
    "tiny": Size(
        prose_megabytes=0.1,
        code_megabytes=0.1,
        vocabulary=512,
        hidden=128,
        intermediate=256,
        layers=2,
        seq_len=64,
        batch=4,
        base_steps=4,
        steps=3,
    ),
}


def run(
    *,
    size: str = "small",
    seeds: int = 3,
    precisions: str = "bf16,fp8,nf4,nf4-quantized,int8",
    workers: int = 1,
    method: str = "lora",
    family: str = "llama",
) -> dict[str, Any]:
    """`workers`: number of seeds fine-tuned in parallel; such a small model does not fill a GPU."""
    names = precisions.split(",")
    if names[0] != REFERENCE or not set(names) <= set(PRECISIONS):
        raise SystemExit(f"precisions must start with {REFERENCE}; known: {', '.join(PRECISIONS)}")
    if method not in METHODS:
        raise SystemExit(f"method must be one of {', '.join(METHODS)}")
    if family not in FAMILIES:
        raise SystemExit(f"family must be one of {', '.join(FAMILIES)}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), SIZES[size], method, family)
        facts = bench.train_base()
        if any(name.endswith(QUANTIZED) for name in names):
            facts |= bench.quantize_base()
        if workers == 1:
            results = [row for seed in range(seeds) for row in bench.fine_tunes(names, seed)]
        else:
            with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
                done = pool.map(bench.fine_tunes, [names] * seeds, range(seeds))
                results = [row for rows in done for row in rows]
    requested = {"size": size, "method": method, "family": family, "seeds": seeds, "precisions": precisions}
    parameters = {**requested, **asdict(SIZES[size]), **facts}
    return {"parameters": parameters, "results": results}


def _compare(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its gradients replaced by comparisons of gradients and loss with the reference."""
    plain, random_up = row["gradients"]
    expected, expected_random_up = reference["gradients"]
    parts = {}
    if row["unfused"] is not None:
        parts = {
            "cosine_of_weights": cosine(row["unfused"], expected),
            "cosine_of_products": cosine(plain, row["unfused"]),
        }
    return {
        **{name: value for name, value in row.items() if name not in ("gradients", "unfused")},
        **parts,
        "relative_difference": row["eval_loss"] / reference["eval_loss"] - 1,
        "gradient_cosine": cosine(plain, expected),
        "gradient_cosine_random_up": cosine(random_up, expected_random_up),
    }


def cosine(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Cosine similarity of all gradients, concatenated."""
    assert one.keys() == other.keys(), "the two models train different weights"
    dot = math.fsum(float((one[name] * other[name]).sum()) for name in one)
    squares = (math.fsum(float(g.square().sum()) for g in gradients.values()) for gradients in (one, other))
    return dot / math.sqrt(math.prod(squares))


class Bench:
    """Corpus, base model and runs, all in one folder."""

    def __init__(self, folder: Path, size: Size, method: str, family: str) -> None:
        self.folder, self.size, self.method, self.family = folder, size, method, family
        self.prose = corpus.write_prose(folder, int(size.prose_megabytes * 1e6))
        self.code = corpus.write_code(folder, int(size.code_megabytes * 1e6))
        self._write_start()

    def train_base(self) -> dict[str, Any]:
        """Train the base on prose, and return facts about it."""
        import torch

        config = self._config(
            self.prose,
            {
                "model": {"path": str(self.folder / "start"), "init": "random", "precision": "auto"},
                "method": {"kind": "full"},
                "train": {
                    "max_steps": self.size.base_steps,
                    "global_batch_size": 2 * self.size.batch,
                    "learning_rate": 1e-3,
                    "warmup_steps": min(100, self.size.base_steps // 4),
                    "min_learning_rate_ratio": 0.1,
                    "weight_decay": 0.1,
                    "beta2": 0.95,
                    "compile": "off",  # a small model, and a minute to compile it
                    "cuda_graph": "on" if torch.cuda.is_available() else "off",
                },
            },
        )
        begin = time.perf_counter()
        events = train(self.folder / "base", config)
        return {
            "prose_bytes": self.prose.bytes,
            "prose_sha256": self.prose.sha256,
            "code_bytes": self.code.bytes,
            "code_sha256": self.code.sha256,
            "base_eval_loss": last_value(events, "eval.done", "loss"),
            "base_seconds": time.perf_counter() - begin,
        }

    def quantize_base(self) -> dict[str, Any]:
        """Calibrate the base on the text of the fine-tune, as `pantheraml quantize` does, and return facts about it."""
        from pantheraml.cli.quantize import TOKENS
        from pantheraml.devices.probe import probe
        from pantheraml.parallel.process_group import open_world
        from pantheraml.planner.choose import choose
        from pantheraml.specs.tasks import QuantizeRequest
        from pantheraml.worker.quantize import quantize

        model = {"path": str(self.folder / "base" / "model")}
        train = {"global_batch_size": self.size.batch}
        config = self._config(self.code, {"model": model, "method": {}, "train": train})
        run = written_run(self.folder / "quantize", config)
        run.write_config(config)
        run.write_plan(plan := choose(config, probe()))
        request = QuantizeRequest(run_dir=run.path, output=self._quantized, tokens=TOKENS)
        with open_world(plan, timeout_seconds=60) as world:
            done = quantize(run, request, world, silent)
        _free()
        return {"quantize_tokens": done.tokens, "quantize_seconds": done.seconds}

    @property
    def _quantized(self) -> Path:
        return self.folder / "quantized"

    def fine_tunes(self, precisions: Sequence[str], seed: int) -> list[dict[str, Any]]:
        """Fine-tune in each of `precisions` and compare with the first."""
        reference: dict[str, Any] | None = None
        compared = []
        for precision in precisions:
            row = self.fine_tune(precision, seed)
            reference = reference or row
            compared.append(_compare(row, reference))
            figures = {key: compared[-1][key] for key in ("precision", "seed", "eval_loss", "gradient_cosine")}
            print(figures, file=sys.stderr, flush=True)  # in case the run is cut short
        return compared

    def fine_tune(self, precision: str, seed: int) -> dict[str, Any]:
        """Run one fine-tune; also compute the gradients of its first step, with B zero and random (if there is a B)."""
        import torch

        lora = {"rank": self.size.rank, "alpha": 2 * self.size.rank} if self.method == "lora" else {}
        on_gpu = torch.cuda.is_available()
        packing = precision.removesuffix(QUANTIZED)
        base = self.folder / "base" / "model" if packing == precision else self._quantized
        # Fused layers train bf16 weights on a GPU, so the reference does too.
        weights = {"weights": "bf16", "optimizer": "adamw_bf16"} if self.method == "full" and on_gpu else {}
        config = self._config(
            self.code,
            {
                "model": {"path": str(base), "precision": packing},
                "method": {"kind": self.method, **lora},
                "train": {
                    "max_steps": self.size.steps,
                    "global_batch_size": self.size.batch,
                    "learning_rate": METHODS[self.method],
                    "warmup_steps": self.size.steps // 10,
                    "seed": seed,
                    # On a CPU, fp8 takes the same code path as on a GPU, with the reference kernels.
                    "fused": "auto" if on_gpu or precision == REFERENCE else "on",
                    **weights,
                },
            },
        )
        gradients = first_gradients(config, None), first_gradients(config, 0.02)
        unfused = None
        if packing == "nf4":  # unfused: bf16 matmuls over the same weights
            plain = config.train.model_copy(update={"fused": "off"})
            unfused = first_gradients(config.model_copy(update={"train": plain}), None)
        begin = time.perf_counter()
        events = train(self.folder / f"{precision}-{seed}", config)
        return {
            "precision": precision,
            "seed": seed,
            "train_loss": last_value(events, "train.step", "loss"),
            "eval_loss": last_value(events, "eval.done", "loss"),
            "seconds": time.perf_counter() - begin,
            "gradients": gradients,
            "unfused": unfused,
        }

    def _config(self, domain: corpus.Domain, sections: Mapping[str, dict[str, Any]]) -> Any:
        from pantheraml.specs.train import TrainConfig

        data = {
            "path": str(domain.train),
            "eval_path": str(domain.evaluation),
            "seq_len": self.size.seq_len,
            "cache_dir": str(self.folder / "tokens"),
        }
        train = {**sections["train"], "micro_batch_size": sections["train"]["global_batch_size"]}
        return TrainConfig.model_validate({**sections, "data": data, "train": train})

    def _write_start(self) -> None:
        """Write a tokenizer trained on both domains, and the model's config."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        size = self.size
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size.vocabulary,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        documents = (text for domain in (self.prose, self.code) for text in corpus.texts(domain.train))
        tokenizer.train_from_iterator(documents, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
        fast.save_pretrained(self.folder / "start")
        names = ("vocabulary", "hidden", "intermediate", "layers", "head_dim", "seq_len")
        shape = {name: getattr(size, name) for name in names}
        model_config(self.family, **shape).save_pretrained(self.folder / "start")


def last_value(events: Sequence[Any], kind: str, field: str) -> float:
    return float(next(getattr(event, field) for event in reversed(events) if event.kind == kind))


def train(folder: Path, config: Any) -> list[Any]:
    """Train in this process as `pantheraml train` does, and return the events of the run."""
    from pantheraml.base.event_stream import EventWriter, read_events
    from pantheraml.devices.probe import probe
    from pantheraml.engine.guard.watchdog import StopFlag
    from pantheraml.parallel.process_group import open_world
    from pantheraml.planner.choose import choose
    from pantheraml.worker.train import train_rank

    run_dir, plan = written_run(folder, config), choose(config, probe())
    with open_world(plan, timeout_seconds=60) as world, EventWriter(folder) as emit:
        train_rank(run_dir, config, plan, world, emit, StopFlag(run_dir.stop_file))
    _free()
    return read_events(folder)


def written_run(folder: Path, config: Any) -> Any:
    """Create a run folder with the prepared data of `config`, as the `prepare` task does."""
    from pantheraml.data.prepare import prepare
    from pantheraml.models.loader import load_tokenizer
    from pantheraml.specs.run_dir import RunDir

    run = RunDir(folder)
    run.mark()
    prepared = prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent)
    places = {"train": str(prepared.train), "eval": str(prepared.eval), "format": prepared.format}
    run.data_file.write_text(json.dumps(places))
    return run


def first_gradients(config: Any, random_up: float | None) -> dict[str, Any]:
    """Gradients of every trainable weight on the first global batch; `random_up`: standard deviation of a random B."""
    import torch

    from pantheraml.data.dataset import TokenDataset
    from pantheraml.data.prepare import prepare
    from pantheraml.devices.probe import probe
    from pantheraml.engine.step.feed import Feed
    from pantheraml.engine.step.step import Stepper
    from pantheraml.models.adapters import trainable_parameters
    from pantheraml.models.loader import load_tokenizer
    from pantheraml.parallel.process_group import open_world
    from pantheraml.planner.choose import choose
    from pantheraml.worker.train import build_model

    plan = choose(config, probe())
    prepared = prepare(config.data, tokenizer=load_tokenizer(config.model), emit=silent)
    with open_world(plan, timeout_seconds=60) as world:
        torch.manual_seed(config.train.seed)
        model = build_model(config, plan, world, silent)
        if random_up is not None:
            generator = torch.Generator().manual_seed(config.train.seed)
            with torch.no_grad():
                for name, parameter in trainable_parameters(model):
                    if "lora_B" in name:
                        parameter.copy_(random_up * torch.randn(parameter.shape, generator=generator))
        stepper = Stepper(model, config, world, plan.model_copy(update={"cuda_graph": False})).setup()
        model.train()
        size = config.train.global_batch_size
        feed = Feed(
            TokenDataset.open(prepared.train),
            world,
            seed=config.train.seed,
            global_batch=size,
            micro_batch=size,
            limit=None,
        )
        with feed:
            stepper.backward(feed.step(0), stop_requested=False)
        gradients = {name: part.grad.double().cpu() for name, part in stepper.parts if part.grad is not None}
    del model, stepper
    _free()
    return gradients


def _free() -> None:
    """Free the last model, which has reference cycles: the next one needs its memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Summarize the newest record of each method, family and size."""
    newest = {
        (facts.get("method", "lora"), facts.get("family", "llama"), facts["size"]): record
        for record in reversed(records)
        for facts in [record["parameters"]]
    }
    places = [place for place in itertools.product(METHODS, FAMILIES, SIZES) if place in newest]
    bounds = f"within {percent(LARGEST_DIFFERENCE)} and {SMALLEST_COSINE:g}"
    heads = ["model", "weights or matmuls", "mean eval loss", "bf16", "worst difference", "min. cosine", "random B"]
    rows = [row for place in places for row in _rows(place[0], newest[place])]
    return "\n".join([_about([newest[place] for place in places]), "", *markdown_table([*heads, bounds], rows)])


def _about(records: Sequence[Mapping[str, Any]]) -> str:
    facts = [record["parameters"] for record in records]
    steps, seeds = (sorted({each[name] for each in facts}) for name in ("steps", "seeds"))
    return (
        f"Bases trained on {_megabytes(facts, 'prose_bytes')} MB of docstrings, fine-tuned on"
        f" {_megabytes(facts, 'code_bytes')} MB of Python source for {' or '.join(map(str, steps))} steps,"
        f" {' or '.join(map(str, seeds))} seeds. nf4 and calibrated nf4 (`pantheraml quantize`) run fp8 matmuls."
    )


def _megabytes(facts: Sequence[Mapping[str, Any]], name: str) -> str:
    return " or ".join(dict.fromkeys(f"{each[name] / 1e6:.0f}" for each in facts))


def _rows(method: str, record: Mapping[str, Any]) -> list[list[str]]:
    """Means over the seeds, and whether every seed is within the bounds."""
    facts = record["parameters"]
    model = f"{FAMILIES[facts.get('family', 'llama')]}, {'LoRA' if method == 'lora' else 'full'}{_shape(facts)}"
    rows, means = [], {}
    for precision in facts["precisions"].split(","):
        own = [row for row in record["results"] if row["precision"] == precision]
        worst = max(own, key=lambda row: abs(row["relative_difference"]))["relative_difference"]
        cosines = [min(row[name] for row in own) for name in ("gradient_cosine", "gradient_cosine_random_up")]
        within = abs(worst) <= LARGEST_DIFFERENCE and min(cosines) >= SMALLEST_COSINE
        means[precision] = f"{statistics.mean(row['eval_loss'] for row in own):.4f}"
        if precision == REFERENCE:
            continue
        figures = [
            means[precision],
            means[REFERENCE],
            f"{100 * worst:+.2f} %",
            *(f"{c:.4f}" for c in cosines),
            "yes" if within else "no",
        ]
        rows.append([model, CALIBRATED.get(precision, precision), *figures])
    return rows


CALIBRATED = {f"nf4{QUANTIZED}": "nf4, calibrated"}


def _shape(facts: Mapping[str, Any]) -> str:
    return f", {facts['layers']} x {facts['hidden']}" if "layers" in facts else f", {facts['size']}"


TABLE = Table(
    title="Accuracy of quantization",
    how=(
        "Fine-tunes of small models (layers x width) trained on other text, relative to bf16 with the same seed: final"
        " evaluation loss, and cosine similarity of the trainable weights' gradients at the first step."
    ),
    columns=(
        Column("size", "parameters.size"),
        Column("method", "parameters.method"),
        Column("family", "parameters.family"),
        Column("weights or matmuls", "precision"),
        Column("seed", "seed"),
        Column("eval loss", "eval_loss", lambda value: f"{value:.4f}"),
        Column("relative to bf16", "relative_difference", lambda value: f"{100 * value:+.2f} %"),
        Column("gradient cosine", "gradient_cosine", lambda value: f"{value:.4f}"),
        Column("with random B", "gradient_cosine_random_up", lambda value: f"{value:.4f}"),
        Column("weights only", "cosine_of_weights", lambda value: f"{value:.4f}"),
        Column("matmuls only", "cosine_of_products", lambda value: f"{value:.4f}"),
    ),
    summary=summary,
)


if __name__ == "__main__":
    print(json.dumps(run(size="tiny"), indent=1))

"""Whether training over quantised weights comes to what training over bf16 weights comes to, on real text.

A small Llama is trained from scratch on prose (docstrings), then fine-tuned with LoRA on code (the standard library),
with the frozen weights in bf16 and in each quantised form, three seeds each, by the same code that `pantheraml train`
runs. Reported are the evaluation loss against bf16's with the same seed, and the cosine between the gradients of all
adapter weights at the first step: as it is (where the gradient of A is zero, since B is), and with a random B. For nf4,
whose products are in fp8, also both of its parts: what rounding the weights alone changes, with products as bf16 has
them, and what is ours, the products, over the same weights. `nf4-quantised` is nf4 over what `pantheraml quantise`
makes of the base with the text of the fine-tune. Or, with `method=full`, all weights are trained, by products in bf16
and in fp8.

    python benchmarks/run.py accuracy                     a GPU: some minutes
    python benchmarks/run.py accuracy --set method=full --set precisions=bf16,fp8
    python benchmarks/run.py accuracy --set size=cpu      a CPU: a quarter of an hour, by the kernels' references
    python benchmarks/run.py accuracy --set size=tiny     a CPU: a minute, to see that it works
"""

from __future__ import annotations

import gc
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
from table import Column, Table, markdown_table, percent

NEEDS_GPU = True

LARGEST_DIFFERENCE = 0.005
SMALLEST_COSINE = 0.99

QUANTISED = "-quantised"
PRECISIONS = ("bf16", "fp8", "nf4", f"nf4{QUANTISED}", "int8")
"""What frozen weights can be kept in, as `model.precision` names it; rounded by `pantheraml quantise` or as they are
loaded."""

REFERENCE = "bf16"

METHODS = {"lora": 5e-4, "full": 1e-4}
"""With their learning rates."""


@dataclass(frozen=True)
class Size:
    """How much of everything; widths are multiples of 128, so that every fused kernel applies."""

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
    precisions: str = "bf16,fp8,nf4,nf4-quantised,int8",
    workers: int = 1,
    method: str = "lora",
) -> dict[str, Any]:
    """`workers`: seeds that are fine-tuned beside each other; such a small model does not fill a GPU."""
    names = precisions.split(",")
    if names[0] != REFERENCE or not set(names) <= set(PRECISIONS):
        raise SystemExit(f"precisions begins with {REFERENCE}; known: {', '.join(PRECISIONS)}")
    if method not in METHODS:
        raise SystemExit(f"method is one of {', '.join(METHODS)}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), SIZES[size], method)
        facts = bench.train_base()
        if any(name.endswith(QUANTISED) for name in names):
            facts |= bench.quantise_base()
        if workers == 1:
            results = [row for seed in range(seeds) for row in bench.fine_tunes(names, seed)]
        else:
            with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
                done = pool.map(bench.fine_tunes, [names] * seeds, range(seeds))
                results = [row for rows in done for row in rows]
    asked = {"size": size, "method": method, "seeds": seeds, "precisions": precisions}
    parameters = {**asked, **asdict(SIZES[size]), **facts}
    return {"parameters": parameters, "results": results}


def _against(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The row with its gradients replaced by how they and the loss compare."""
    plain, random_up = row["gradients"]
    wanted, wanted_random_up = reference["gradients"]
    parts = {}
    if row["unfused"] is not None:
        parts = {
            "cosine_of_weights": cosine(row["unfused"], wanted),
            "cosine_of_products": cosine(plain, row["unfused"]),
        }
    return {
        **{name: value for name, value in row.items() if name not in ("gradients", "unfused")},
        **parts,
        "relative_difference": row["eval_loss"] / reference["eval_loss"] - 1,
        "gradient_cosine": cosine(plain, wanted),
        "gradient_cosine_random_up": cosine(random_up, wanted_random_up),
    }


def cosine(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Of all gradients as one long vector."""
    assert one.keys() == other.keys(), "the two models train other weights"
    product = math.fsum(float((one[name] * other[name]).sum()) for name in one)
    squares = (math.fsum(float(g.square().sum()) for g in gradients.values()) for gradients in (one, other))
    return product / math.sqrt(math.prod(squares))


class Bench:
    """The corpus, the base model, and runs on them, all in one folder."""

    def __init__(self, folder: Path, size: Size, method: str) -> None:
        self.folder, self.size, self.method = folder, size, method
        self.prose = corpus.write_prose(folder, int(size.prose_megabytes * 1e6))
        self.code = corpus.write_code(folder, int(size.code_megabytes * 1e6))
        self._write_start()

    def train_base(self) -> dict[str, Any]:
        """Train the base on prose; what there is to know about it."""
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
            "base_eval_loss": _last(events, "eval.done", "loss"),
            "base_seconds": time.perf_counter() - begin,
        }

    def quantise_base(self) -> dict[str, Any]:
        """As `pantheraml quantise` does with the text of the fine-tune; what there is to know about it."""
        from pantheraml.cli.quantise import TOKENS
        from pantheraml.devices.probe import probe
        from pantheraml.parallel.process_group import open_world
        from pantheraml.planner.choose import choose
        from pantheraml.specs.tasks import QuantiseRequest
        from pantheraml.worker.quantise import quantise

        model = {"path": str(self.folder / "base" / "model")}
        train = {"global_batch_size": self.size.batch}
        config = self._config(self.code, {"model": model, "method": {}, "train": train})
        run = written_run(self.folder / "quantise", config)
        run.write_config(config)
        run.write_plan(plan := choose(config, probe()))
        request = QuantiseRequest(run_dir=run.path, output=self._quantised, tokens=TOKENS)
        with open_world(plan, timeout_seconds=60) as world:
            done = quantise(run, request, world, _silent)
        _free()
        return {"quantise_tokens": done.tokens, "quantise_seconds": done.seconds}

    @property
    def _quantised(self) -> Path:
        return self.folder / "quantised"

    def fine_tunes(self, precisions: Sequence[str], seed: int) -> list[dict[str, Any]]:
        """One in each of `precisions`, compared with the first."""
        reference: dict[str, Any] | None = None
        compared = []
        for precision in precisions:
            row = self.fine_tune(precision, seed)
            reference = reference or row
            compared.append(_against(row, reference))
            told = {key: compared[-1][key] for key in ("precision", "seed", "eval_loss", "gradient_cosine")}
            print(told, file=sys.stderr, flush=True)  # minutes pass, and the machine may be taken away
        return compared

    def fine_tune(self, precision: str, seed: int) -> dict[str, Any]:
        """One fine-tune, and the gradients of its first step, without and with a random B (if there is one)."""
        import torch

        lora = {"rank": self.size.rank, "alpha": 2 * self.size.rank} if self.method == "lora" else {}
        on_gpu = torch.cuda.is_available()
        packing = precision.removesuffix(QUANTISED)
        base = self.folder / "base" / "model" if packing == precision else self._quantised
        # Fused layers train weights in bf16 there, so the reference does, too.
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
                    # On a CPU, too, fp8 takes the way that it takes on a GPU, by the kernels' references.
                    "fused": "auto" if on_gpu or precision == REFERENCE else "on",
                    **weights,
                },
            },
        )
        gradients = first_gradients(config, None), first_gradients(config, 0.02)
        unfused = None
        if packing == "nf4":  # which then multiplies as bf16 does, over the same weights
            plain = config.train.model_copy(update={"fused": "off"})
            unfused = first_gradients(config.model_copy(update={"train": plain}), None)
        begin = time.perf_counter()
        events = train(self.folder / f"{precision}-{seed}", config)
        return {
            "precision": precision,
            "seed": seed,
            "train_loss": _last(events, "train.step", "loss"),
            "eval_loss": _last(events, "eval.done", "loss"),
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
        """A tokenizer trained on both domains, and the model's shape."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import LlamaConfig, PreTrainedTokenizerFast

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
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.hidden // size.head_dim,
            num_key_value_heads=max(1, size.hidden // size.head_dim // 3),
            head_dim=size.head_dim,
            max_position_embeddings=size.seq_len,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        ).save_pretrained(self.folder / "start")


def _last(events: Sequence[Mapping[str, Any]], kind: str, field: str) -> float:
    return float(next(event[field] for event in reversed(events) if event["kind"] == kind))


def _silent(kind: str, /, **fields: Any) -> None:
    """An Emit for those who do not listen."""


def train(folder: Path, config: Any) -> list[dict[str, Any]]:
    """What `pantheraml train` does, in this process: the events of the run."""
    from pantheraml.base.events import EventWriter, read_events
    from pantheraml.devices.probe import probe
    from pantheraml.engine.guard.signals import StopFlag
    from pantheraml.parallel.process_group import open_world
    from pantheraml.planner.choose import choose
    from pantheraml.worker.train import train_rank

    run_dir, plan = written_run(folder, config), choose(config, probe())
    with open_world(plan, timeout_seconds=60) as world, EventWriter(folder) as emit:
        train_rank(run_dir, config, plan, world, emit, StopFlag(run_dir.stop_file))
    _free()
    return read_events(folder)


def written_run(folder: Path, config: Any) -> Any:
    """A run folder with the data of `config`, as the `prepare` task leaves it."""
    from pantheraml.data.prepare import prepare
    from pantheraml.models.loader import load_tokenizer
    from pantheraml.specs.run_dir import RunDir

    run = RunDir(folder)
    run.mark()
    prepared = prepare(config.data, tokenizer=load_tokenizer(config.model), emit=_silent)
    places = {"train": str(prepared.train), "eval": str(prepared.eval), "format": prepared.format}
    run.data_file.write_text(json.dumps(places))
    return run


def first_gradients(config: Any, random_up: float | None) -> dict[str, Any]:
    """Of every trained weight, on the first global batch; `random_up` is the spread of a B that is not zero."""
    import torch

    from pantheraml.data.dataset import TokenDataset
    from pantheraml.data.prepare import prepare
    from pantheraml.devices.probe import probe
    from pantheraml.engine.feed import Feed
    from pantheraml.engine.step import Stepper
    from pantheraml.models.adapters import trainable_parameters
    from pantheraml.models.loader import load_tokenizer
    from pantheraml.parallel.process_group import open_world
    from pantheraml.planner.choose import choose
    from pantheraml.worker.train import build_model

    plan = choose(config, probe())
    prepared = prepare(config.data, tokenizer=load_tokenizer(config.model), emit=_silent)
    with open_world(plan, timeout_seconds=60) as world:
        torch.manual_seed(config.train.seed)
        model = build_model(config, plan, world, _silent)
        if random_up is not None:
            generator = torch.Generator().manual_seed(config.train.seed)
            with torch.no_grad():
                for name, parameter in trainable_parameters(model):
                    if "lora_B" in name:
                        parameter.copy_(random_up * torch.randn(parameter.shape, generator=generator))
        stepper = Stepper(model, config, world, plan.model_copy(update={"cuda_graph": False}))
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
    """A model holds itself in cycles; the next one needs its memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Of the newest for each method and size."""
    newest = {
        (facts.get("method", "lora"), facts["size"]): record
        for record in reversed(records)
        for facts in [record["parameters"]]
    }
    places = [(method, size) for method in METHODS for size in SIZES if (method, size) in newest]
    return "\n\n".join(_summary(method, newest[method, size]) for method, size in places)


def _summary(method: str, record: Mapping[str, Any]) -> str:
    """Means over the seeds, and whether every seed keeps within the bounds."""
    rows = []
    for precision in record["parameters"]["precisions"].split(","):
        own = [row for row in record["results"] if row["precision"] == precision]
        worst = max(own, key=lambda row: abs(row["relative_difference"]))["relative_difference"]
        cosines = [min(row[name] for row in own) for name in ("gradient_cosine", "gradient_cosine_random_up")]
        kept = abs(worst) <= LARGEST_DIFFERENCE and min(cosines) >= SMALLEST_COSINE
        mean = f"{statistics.mean(row['eval_loss'] for row in own):.4f}"
        rows.append([precision, mean, f"{100 * worst:+.2f} %", *(f"{c:.4f}" for c in cosines), "yes" if kept else "no"])
    heads = [
        "frozen weights" if method == "lora" else "products",
        "mean eval loss",
        "worst difference to bf16",
        "least cosine",
        "least cosine, random B",
    ]
    bounds = f"within {percent(LARGEST_DIFFERENCE)} and {SMALLEST_COSINE:g}"
    facts = record["parameters"]
    what = "LoRA" if method == "lora" else "Full fine-tune"
    about = (
        f"{what}, newest run of size {facts['size']}{_shape(facts)}:"
        f" base trained on {facts['prose_bytes'] / 1e6:.1f} MB of docstrings"
        f" to an evaluation loss of {facts['base_eval_loss']:.3f}, fine-tuned on {facts['code_bytes'] / 1e6:.1f} MB of"
        f" Python source for {facts['steps']} steps, {facts['seeds']} seeds."
    )
    return "\n".join([about, "", *markdown_table([*heads, bounds], rows), *_parts(record)])


ROUNDING = {
    "nf4": "Rounding each weight to the nearest value that nf4 has",
    f"nf4{QUANTISED}": "Rounding by the text of the fine-tune (`pantheraml quantise`)",
}


def _shape(facts: Mapping[str, Any]) -> str:
    return f" ({facts['layers']} layers of {facts['hidden']})" if "layers" in facts else ""


def _parts(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for precision, rounding in ROUNDING.items():
        own = [row for row in record["results"] if row["precision"] == precision and "cosine_of_weights" in row]
        if own:
            weights, products = (min(row[name] for row in own) for name in ("cosine_of_weights", "cosine_of_products"))
            lines += [
                "",
                f"{rounding}, with products as bf16 has them, gives a cosine of {weights:.4f} at least. Our products"
                f" over the same weights have {products:.4f} with those.",
            ]
    return lines


TABLE = Table(
    title="Accuracy of quantised weights and products",
    how=(
        "Fine-tunes of a small Llama that was trained on other text, each against bf16 with the same seed: the"
        " evaluation loss at the end, and the cosine of the trained weights' gradients at the first step."
    ),
    columns=(
        Column("size", "parameters.size"),
        Column("method", "parameters.method"),
        Column("weights or products", "precision"),
        Column("seed", "seed"),
        Column("eval loss", "eval_loss", lambda value: f"{value:.4f}"),
        Column("against bf16", "relative_difference", lambda value: f"{100 * value:+.2f} %"),
        Column("gradient cosine", "gradient_cosine", lambda value: f"{value:.4f}"),
        Column("with random B", "gradient_cosine_random_up", lambda value: f"{value:.4f}"),
        Column("of the weights alone", "cosine_of_weights", lambda value: f"{value:.4f}"),
        Column("of the products alone", "cosine_of_products", lambda value: f"{value:.4f}"),
    ),
    summary=summary,
)


if __name__ == "__main__":
    print(json.dumps(run(size="tiny"), indent=1))

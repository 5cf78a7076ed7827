"""Overhead of our training loop over a bare PyTorch loop that does the same work.

The same small Llama, batches, loss function and optimizer. The bare loop only computes; the engine also reads and
collates batches, checks the step (guard) and writes an event per step. Steps of the two alternate, so that both see the
same load; the result is their ratio. Runs on the GPU if there is one, else on the CPU.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from table import Column, Table, milliseconds, percent

TABLE = Table(
    title="Engine overhead",
    how="Median step of our loop relative to a bare PyTorch loop on the same model and batches, alternating.",
    columns=(
        Column("device", "device"),
        Column("parameters", "parameters", lambda value: f"{value / 1e6:.1f} M"),
        Column("tokens per step", "tokens_per_step"),
        Column("bare loop", "bare_seconds", milliseconds),
        Column("engine", "engine_seconds", milliseconds),
        Column("overhead", "overhead", percent),
    ),
)


def run(*, steps: int = 60, hidden: int = 256, layers: int = 4, seq_len: int = 256, batch: int = 8) -> dict[str, Any]:
    parameters = {"steps": steps, "hidden": hidden, "layers": layers, "seq_len": seq_len, "batch": batch}
    with tempfile.TemporaryDirectory() as name:
        return {"parameters": parameters, "results": _measure(Path(name), **parameters)}


def _measure(folder: Path, *, steps: int, hidden: int, layers: int, seq_len: int, batch: int) -> dict[str, Any]:
    import torch

    from pantheraml.base.event_stream import EventWriter
    from pantheraml.data.dataset import TokenDataset
    from pantheraml.engine.guard.watchdog import StopFlag
    from pantheraml.engine.job import Job
    from pantheraml.engine.loop import TrainingLoop
    from pantheraml.engine.step.step import Stepper
    from pantheraml.parallel.process_group import World
    from pantheraml.specs.run_dir import RunDir

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = World(rank=0, size=1, device=device)
    config, plan, data = _run_parts(folder, steps=2 * steps, seq_len=seq_len, batch=batch, device=device.type)
    dataset = TokenDataset.open(data)
    model = _model(hidden, layers, seq_len).to(device)
    stepper = Stepper(model, config, world, plan).setup()
    bare = _BareLoop(hidden, layers, seq_len, device, plan.precision)
    bare.take(dataset, batch)
    engine_times: list[float] = []
    bare_times: list[float] = []
    with EventWriter(folder) as emit:
        job = Job(
            config=config,
            plan=plan,
            run_dir=folder,
            stepper=stepper,
            train_data=dataset,
            eval_data=None,
            model_fingerprint="",
            emit=emit,
            stop=StopFlag(RunDir(folder).stop_file),
        )
        loop = TrainingLoop(job)
        with loop._feed() as feed:
            for _ in range(steps):
                begin = time.perf_counter()
                loop._step(feed)
                loop._evaluate_and_save()
                _synchronize(device)
                middle = time.perf_counter()
                bare.step()
                _synchronize(device)
                engine_times.append(middle - begin)
                bare_times.append(time.perf_counter() - middle)
    engine, plain = (statistics.median(times[5:]) for times in (engine_times, bare_times))
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": batch * seq_len,
        "engine_seconds": engine,
        "bare_seconds": plain,
        "overhead": engine / plain - 1,
    }


class _BareLoop:
    """Hand-written loop: forward, backward, clip, step."""

    def __init__(self, hidden: int, layers: int, seq_len: int, device: Any, precision: str) -> None:
        import torch

        from pantheraml.engine.step.loss import LossModel
        from pantheraml.engine.step.step import AUTOCAST

        self.device, self.dtype = device, AUTOCAST.get(precision)
        self.model = LossModel(_model(hidden, layers, seq_len).to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def take(self, dataset: Any, batch: int) -> None:
        from pantheraml.data.batch import collate

        sequences = [dataset.sequence(i) for i in range(batch)]
        self.batch = collate(sequences, pad_id=dataset.pad_id, width=dataset.seq_len).to(self.device)
        self.targets = int((self.batch.targets >= 0).sum())

    def step(self) -> None:
        import torch

        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            loss = self.model(self.batch.input_ids, self.batch.position_ids, self.batch.targets) / self.targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _model(hidden: int, layers: int, seq_len: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=seq_len,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _run_parts(folder: Path, *, steps: int, seq_len: int, batch: int, device: str) -> tuple[Any, Any, Path]:
    """Return a configuration, its plan, and prepared data: full-length sequences of random words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from pantheraml.data.prepare import prepare
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.specs.train import TrainConfig

    vocabulary = {f"w{i}": i for i in range(4094)} | {"<unk>": 4094, "<eos>": 4095}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    rng = random.Random(0)
    lines = [json.dumps({"text": " ".join(f"w{rng.randrange(4094)}" for _ in range(seq_len - 1))}) for _ in range(64)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    config = TrainConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"path": str(folder / "data.jsonl"), "seq_len": seq_len, "cache_dir": str(folder / "cache")},
            "method": {"kind": "full"},
            "train": {"global_batch_size": batch, "micro_batch_size": batch, "max_steps": steps, "learning_rate": 1e-4},
            "device": device,
        }
    )
    prepared = prepare(config.data, tokenizer=tokenizer, emit=lambda event: None)
    return config, choose(config, probe()), prepared.train


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))

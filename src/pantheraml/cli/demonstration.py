"""The steps of `pantheraml demo`: two ordinary training runs, with held-out completions generated before and after.

Its output is the run folder of the fine-tune, plus what led to it:

    data/       the generated data: base.jsonl, train.jsonl, held-out.jsonl
    start/      tokenizer and config.json of the model, without weights
    base-run/   the run that trained the base model
    base/       the base model
    adapter/, run.json, report.html, ...   as in any run folder

Hyperparameters and data were tuned together: see `data/synthetic.py` for why such a small model learns this fast.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pantheraml.base.errors import RunDirectoryError, TrainingError
from pantheraml.base.folders import committed_folder
from pantheraml.cli.generate import complete
from pantheraml.cli.screen import progress
from pantheraml.data import synthetic
from pantheraml.data.synthetic import Example
from pantheraml.devices.probe import probe
from pantheraml.readers import number_format as figures
from pantheraml.readers.report import Section, write_report
from pantheraml.readers.summary import write_run_json
from pantheraml.runs.session import run_training
from pantheraml.specs.config_file import validate
from pantheraml.specs.run_dir import RunDir, remove_contents
from pantheraml.specs.train import TrainConfig

SEED = 0
BASE_EXAMPLES, TRAIN_EXAMPLES, HELD_OUT_EXAMPLES = 20_000, 2_000, 200
VOCABULARY, HIDDEN_SIZE, LAYERS, HEADS, SEQ_LEN = 512, 128, 3, 4, 256
PROCESSES = 2
LONGEST_ANSWER = 64
LEARNED = 0.9
"""Minimum exact-match score; below it the demo fails."""
SHOWN_EXAMPLES = 3
INPUTS = ("data", "start", "base-run", "base", "cache")
"""Subfolders that the demo adds to its run folder."""
TRY_PROMPT = "Payment to JSON: Elena Novak paid 365 EUR on 29 February 2024."

BASE_TRAINING = {"max_steps": 600, "learning_rate": 3e-3, "warmup_steps": 20}
ADAPTER = {"kind": "lora", "rank": 16, "alpha": 32}
FINE_TUNING = {"max_steps": 180, "learning_rate": 5e-3, "warmup_steps": 10}


@dataclass(frozen=True)
class Answers:
    """Return completions of the held-out prompts."""

    examples: list[Example]
    texts: list[str]

    @property
    def exact_match(self) -> float:
        pairs = zip(self.examples, self.texts, strict=True)
        return sum(text == example.completion for example, text in pairs) / len(self.examples)


def demonstrate(output: Path) -> dict[str, Any]:
    """Run the demo in `output`, print its results, and return the content of run.json."""
    begin = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    processes = min(PROCESSES, probe().cpu_count)
    base_config, config = training_configs(output.absolute(), processes)
    claim_folder(output, config)

    _headline(console, 1, "Creating a tokenizer, a model config and data")
    held_out = make_inputs(output)
    _headline(console, 2, f"Training the base model on {len(synthetic.BASE_TASKS)} tasks, {_process_count(processes)}")
    base_run = output / "base-run"
    base = run_training(base_config, base_run, readers=progress(f"train {base_run}"))
    with committed_folder(output / "base") as folder:
        shutil.copytree(RunDir(base_run).trained(), folder, dirs_exist_ok=True)
    before = _answers(base_run, held_out)
    console.print(f"New task, {synthetic.TARGET_TASK.description}: {_score(before)}")

    _headline(console, 3, "Fine-tuning the base model on that task with LoRA")
    # The folder is the demo's own and has no checkpoint yet, so resuming starts from the beginning.
    run_training(config, output, resume=True, readers=progress(f"train {output}"))
    after = _answers(output, held_out)

    _headline(console, 4, "Before and after")
    results = {
        "exact_match_before": before.exact_match,
        "exact_match_after": after.exact_match,
        "held_out_examples": len(held_out),
        "base": {name: base[name] for name in ("steps", "final_loss", "tokens", "seconds", "tokens_per_second")},
        "demo_seconds": time.monotonic() - begin,
    }
    summary = write_run_json(output, results)
    _write_report(output, before, after)
    _show(console, output, summary, before, after)
    if after.exact_match < LEARNED:
        raise TrainingError(
            f"The demo did not learn its task: {_score(after)}, expected at least {LEARNED:.0%}.",
            where=str(output),
            fix="Please report this with the folder's events.jsonl: the demo should succeed everywhere.",
        )
    return summary


def training_configs(output: Path, processes: int) -> tuple[TrainConfig, TrainConfig]:
    """Return the configurations of the base training and of the fine-tune."""

    def config(model: Path, init: str, data: str, method: dict[str, Any], recipe: dict[str, Any]) -> TrainConfig:
        return validate(
            {
                "model": {"path": str(model), "init": init},
                "data": {"path": str(output / "data" / data), "seq_len": SEQ_LEN, "cache_dir": str(output / "cache")},
                "method": method,
                "train": {"global_batch_size": 4, "beta2": 0.99, "seed": SEED, **recipe},
                "parallel": {"world_size": processes},
                "device": "cpu",
            }
        )

    return (
        config(output / "start", "random", "base.jsonl", {"kind": "full"}, BASE_TRAINING),
        config(output / "base", "pretrained", "train.jsonl", ADAPTER, FINE_TUNING),
    )


def claim_folder(output: Path, config: TrainConfig) -> None:
    """Create the folder, replacing an earlier demo; any other content is an error."""
    run = RunDir(output)
    earlier = run.holds_run() and run.config_file.is_file() and run.config().model.path == config.model.path
    if earlier:
        remove_contents(output)
        for name in INPUTS:
            shutil.rmtree(output / name, ignore_errors=True)
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunDirectoryError(f"The folder {output} contains other files.", fix="Choose another --output.")
    run.mark()
    run.write_config(config)


def make_inputs(output: Path) -> list[Example]:
    """Write data, tokenizer and model config, and return the held-out examples."""
    for name in ("data", "start"):
        (output / name).mkdir()
    base = synthetic.base_examples(BASE_EXAMPLES, seed=SEED)
    target = synthetic.split_examples(
        synthetic.TARGET_TASK, train=TRAIN_EXAMPLES, held_out=HELD_OUT_EXAMPLES, seed=SEED
    )
    synthetic.write_examples(output / "data" / "base.jsonl", base)
    synthetic.write_examples(output / "data" / "train.jsonl", target.train)
    synthetic.write_examples(output / "data" / "held-out.jsonl", target.held_out)
    size = synthetic.write_tokenizer(output / "start", base, vocab_size=VOCABULARY)
    synthetic.write_model_config(
        output / "start", vocab_size=size, hidden_size=HIDDEN_SIZE, layers=LAYERS, heads=HEADS, longest=SEQ_LEN
    )
    return target.held_out


def _answers(run_dir: Path, examples: list[Example]) -> Answers:
    prompts = [example.prompt for example in examples]
    return Answers(
        examples,
        complete(
            run_dir, prompts, readers=progress(f"generate {run_dir}"), device="cpu", max_new_tokens=LONGEST_ANSWER
        ),
    )


def _score(answers: Answers) -> str:
    right = round(answers.exact_match * len(answers.examples))
    return f"{right} of {len(answers.examples)} held-out examples exactly right ({figures.share(answers.exact_match)})"


def _write_report(output: Path, before: Answers, after: Answers) -> None:
    rows = [
        (example.prompt, example.completion.strip(), old.strip(), new.strip())
        for example, old, new in zip(before.examples, before.texts, after.texts, strict=True)
    ]
    section = Section(
        title="Held-out examples",
        text="Held-out prompts, the expected answer, and the model's answers before and after fine-tuning.",
        columns=("Prompt", "Expected", "Before", "After"),
        rows=rows[:20],
    )
    scores = [
        ("Exact match before", figures.share(before.exact_match)),
        ("Exact match after", figures.share(after.exact_match)),
    ]
    write_report(output, extra=[section], extra_figures=scores)


def _process_count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _headline(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold]{number}/4  {text}[/bold]")


def _show(console: Console, output: Path, summary: dict[str, Any], before: Answers, after: Answers) -> None:
    examples = zip(before.examples[:SHOWN_EXAMPLES], before.texts, after.texts, strict=False)
    for example, old, new in examples:
        console.print(Text(example.prompt, style="bold"))
        console.print(Text(f"  before  {old.strip()}", style="red"))
        console.print(Text(f"  after   {new.strip()}", style="green" if new == example.completion else "red"))
    console.print()
    command = f"{program()} generate {shlex.quote(str(output))} --prompt {shlex.quote(TRY_PROMPT)}"
    for name, value in (
        ("exact match before", _score(before)),
        ("exact match after", _score(after)),
        ("fine-tuning speed", f"{figures.count(summary['tokens_per_second'])} tokens/s"),
        ("peak memory", f"{figures.size(summary['peak_memory_bytes'])} per process"),
        ("time", f"{figures.duration(summary['demo_seconds'])} total"),
        ("report", str(output / "report.html")),
        ("adapter", str(output / "adapter")),
        ("base model", str(output / "base")),
        ("try it", command),
    ):
        console.print(Text(f"{name:<20}", style="bold").append(value, style="not bold"))


def program() -> str:
    """Return the command as the user can call it: `make demo` installs it outside of the PATH."""
    started = Path(sys.argv[0])
    if shutil.which("pantheraml") is not None or started.name != "pantheraml":
        return "pantheraml"
    here = started.absolute()
    return shlex.quote(str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here))

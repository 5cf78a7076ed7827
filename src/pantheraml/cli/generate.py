"""`pantheraml generate`: complete prompts with the model of a run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import ConfigError, DataError
from pantheraml.base.text import printable
from pantheraml.cli.consent_flags import add_consent, consent_from

if TYPE_CHECKING:
    from pantheraml.readers.follow import Reader
    from pantheraml.specs.consent import Consent
    from pantheraml.specs.plan import DeviceSpec, Plan
    from pantheraml.specs.train import TrainConfig


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate", help="generate text with a trained model", description="Complete prompts with the model of a run."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", help="text file with one prompt per line")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="maximum length of a completion (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0, greedy)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="sampling seed")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device to run on")
    parser.add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="processes, each with a copy of the model and a GPU of its own",
    )
    parser.add_argument("--base", action="store_true", help="use the base model, as it was before training")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line: prompt, completion")
    add_consent(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.screen import progress

    prompts = [*arguments.prompt, *_from_file(arguments.prompts)]
    if not prompts:
        raise ConfigError("No prompt given.", fix='Add --prompt "..." or --prompts FILE.')
    if arguments.nproc < 1:
        raise ConfigError("--nproc must be at least 1.")
    if arguments.max_new_tokens < 1 or not 0 <= arguments.temperature < math.inf:
        raise ConfigError("--max-new-tokens must be at least 1, and --temperature a number from 0.")
    if not 0 <= arguments.seed < 1 << 64:
        raise ConfigError("--seed must be at least 0 and below 2^64.")
    quiet = arguments.json or not sys.stderr.isatty()
    answers = complete(
        Path(arguments.run_dir),
        prompts,
        readers=progress(f"generate {arguments.run_dir}", quiet=quiet),
        weights="base" if arguments.base else "trained",
        device=arguments.device,
        processes=arguments.nproc,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        consent=consent_from(arguments),
    )
    # A model may write terminal control sequences: escape them on a terminal, not in files and pipes.
    on_terminal = sys.stdout.isatty()
    for prompt, answer in zip(prompts, answers, strict=True):
        if arguments.json:
            print(json.dumps({"prompt": prompt, "completion": answer}, ensure_ascii=on_terminal))
        else:
            text = f"{prompt}{answer}" if len(prompts) > 1 else answer
            print(printable(text) if on_terminal else text)
    return 0


def _from_file(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        return [line for line in Path(name).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(
            f"Cannot read the prompts file {name}: {err}.", fix="Give a UTF-8 text file with one prompt per line."
        ) from err


def complete(
    run_dir: Path,
    prompts: list[str],
    *,
    readers: Sequence[Reader],
    weights: str = "trained",
    device: str = "auto",
    processes: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    consent: Consent | None = None,
) -> list[str]:
    """Complete `prompts` with the model of a run, in worker processes. `consent` None: no consent."""
    from pantheraml.runs.tasks import messages, run_request
    from pantheraml.specs.consent import Consent
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import GenerateRequest

    run = RunDir(run_dir)
    consent = consent or Consent()
    config = run.received_config(consent)
    if weights == "trained":
        run.trained()
    plan = _planned(config, device, min(processes, len(prompts)))
    request = GenerateRequest.model_validate(
        {
            "run_dir": run_dir.absolute(),
            "consent": consent,
            "prompts": prompts,
            "weights": weights,
            "device": plan.device,
            "precision": plan.precision,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "batch_size": 64,
        }
    )

    def read_answers(folder: Path) -> list[str]:
        if not readers:  # otherwise a reader has printed them
            for notice in messages(folder):
                print(printable(notice), file=sys.stderr)
        found = [""] * len(prompts)
        for rank in range(plan.world_size):
            lines = (folder / f"answers-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            found[rank :: plan.world_size] = [json.loads(line)["completion"] for line in lines]
        return found

    answers: list[str] = run_request("generate", request, plan=plan, readers=readers, answer=read_answers)
    return answers


def _planned(config: TrainConfig, device: str, processes: int) -> Plan:
    """Plan device and precision as for training, but for one process; then put the plan on that many ranks."""
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.specs.multi_gpu import MultiGPUConfig

    one = MultiGPUConfig(world_size=1, device_ids=config.parallel.device_ids if device != "cpu" else None)
    changes = {"device_map": None, "max_memory": None} | ({"precision": "auto"} if device != "auto" else {})
    here = {"device": device, "parallel": one, "model": config.model.model_copy(update=changes)}
    devices = probe()
    return _on_ranks(choose(config.model_copy(update=here), devices), devices, processes)


def _on_ranks(plan: Plan, devices: DeviceSpec, processes: int) -> Plan:
    """`plan`, which is for one process, for that many."""
    from pantheraml.base.errors import DeviceError
    from pantheraml.specs.parallel import ParallelDims

    if processes == 1:
        return plan
    gpus = tuple(gpu.index for gpu in devices.gpus) if plan.device == "cuda" else ()
    if plan.device == "cuda" and processes > len(gpus):
        raise DeviceError(
            f"{processes} processes were requested, but {len(gpus)} GPU(s) are visible.", fix="Lower --nproc."
        )
    changes = {"world_size": processes, "dims": ParallelDims(replicate=processes), "device_ids": gpus[:processes]}
    return plan.model_copy(update={**changes, "threads_per_process": max(1, devices.cpu_count // processes)})

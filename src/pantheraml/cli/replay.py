"""`pantheraml replay INCIDENT`: rerun a bad step with hooks on every module, and compare with the recorded incident."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.text import printable
from pantheraml.cli.consent_flags import add_consent, consent_from

if TYPE_CHECKING:
    from pantheraml.specs.consent import Consent
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import ReplayResult


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="rerun a bad step and locate the fault",
        description="Rerun the step of an incident in one process, with a hook on every module, and compare the result"
        " with what was recorded.",
    )
    parser.add_argument("incident", metavar="INCIDENT", help="RUN_DIR/incidents/step-N.json")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="device to run on (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_consent(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.errors import TrainingError

    result = replay(Path(arguments.incident), arguments.device, consent_from(arguments), quiet=arguments.json)
    if arguments.json:
        print(result.model_dump_json(indent=1))
    else:
        print(printable(f"step {result.step}: {result.cause}"))
        print(printable(f"recorded: {result.recorded}"))
        print(printable(f"replayed: {result.found} (loss {result.loss}, with {result.weights})"))
    if not result.same:
        raise TrainingError(
            "The replay did not reproduce the recorded incident.",
            where=arguments.incident,
            fix="Check whether weights and device are the same as in the run; if they are, the fault is intermittent:"
            " suspect the hardware.",
        )
    return 0


def replay(incident: Path, device: str | None, consent: Consent, *, quiet: bool) -> ReplayResult:
    from pantheraml.base.errors import RunDirectoryError
    from pantheraml.cli.screen import progress
    from pantheraml.runs.tasks import run_request
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import ReplayRequest, ReplayResult

    run = RunDir(incident.absolute().parent.parent)
    if not incident.is_file() or not run.config_file.is_file():
        raise RunDirectoryError(
            f"{incident} is not an incident of a run.",
            fix="Pass a file from a run folder: RUN_DIR/incidents/step-N.json.",
        )
    plan = _plan(run, device, consent)
    request = ReplayRequest(run_dir=run.path, consent=consent, incident=incident.absolute(), plan=plan)
    result: ReplayResult = run_request(
        "replay",
        request,
        plan=plan,
        readers=progress(f"replay {incident}", quiet=quiet),
        answer=lambda folder: ReplayResult.model_validate_json((folder / "replay.json").read_text()),
    )
    return result


def _plan(run: RunDir, device: str | None, consent: Consent) -> Any:
    """Return the run's plan, for one process without CUDA graphs and compilation, so that module hooks run."""
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.specs.multi_gpu import MultiGPUConfig

    config, original = run.received_config(consent), run.plan()
    here = device or original.device
    one = MultiGPUConfig(world_size=1, device_ids=config.parallel.device_ids if here != "cpu" else None)
    train = config.train.model_copy(update={"cuda_graph": "off", "compile": "off"})
    changes: dict[str, Any] = {"device": here, "parallel": one, "train": train}
    if here != original.device:
        changes["model"] = config.model.model_copy(update={"precision": "auto"})
    plan = choose(config.model_copy(update=changes), probe())
    same: dict[str, Any] = {"micro_batch_size": original.micro_batch_size}
    if here == original.device:  # chosen by comparing plans, perhaps; these rules alone could choose others
        same |= {
            "frozen_weights": original.frozen_weights,
            "activation_checkpointing": original.activation_checkpointing,
        }
    return plan.model_copy(update=same)

"""`pantheraml jobs ...`: jobs of a service (`pantheraml serve`), here or elsewhere.

The key comes from PANTHERAML_API_KEY alone: other users of the host can read flags.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import ConfigError, InterruptedRunError, TrainingError
from pantheraml.base.text import printable

if TYPE_CHECKING:
    from pydantic import BaseModel

    from pantheraml.client import Client, Job, Submission


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "jobs",
        help="jobs of a fine-tuning service",
        description="Submit jobs to a service (`pantheraml serve`), watch and change them, fetch their results. The key"
        " is read from PANTHERAML_API_KEY.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, help="what to do")
    _add_submit(actions.add_parser("submit", help="upload data, queue a job and print its id"))
    listed = actions.add_parser("list", help="list jobs, newest first")
    listed.add_argument("--limit", type=int, default=20, metavar="N", help="maximum number of jobs (20)")
    for name, text in (
        ("show", "everything about a job"),
        ("watch", "follow a job until it ends; Ctrl-C leaves it alone"),
        ("pause", "save a job's state and free its devices"),
        ("resume", "put a paused job back into the queue"),
        ("cancel", "end a job"),
    ):
        actions.add_parser(name, help=text).add_argument("job", metavar="JOB", help="id of the job")
    logs = actions.add_parser("logs", help="output of a job's processes")
    logs.add_argument("job", metavar="JOB", help="id of the job")
    logs.add_argument("--follow", action="store_true", help="follow until the job ends")
    logs.add_argument("--bytes", type=int, metavar="N", help="only the last N bytes")
    download = actions.add_parser("download", help="fetch what a job has written; continues an interrupted download")
    download.add_argument("job", metavar="JOB", help="id of the job")
    download.add_argument("names", metavar="NAME", nargs="*", help="files, as `show` lists them (all)")
    download.add_argument("--merged", action="store_true", help="have the adapter merged into its base, and fetch that")
    download.add_argument("--output", metavar="DIR", help="folder to write to (the job's id)")
    for action in actions.choices.values():
        action.add_argument(
            "--url", metavar="URL", help="URL of the service (PANTHERAML_URL, else http://127.0.0.1:8000)"
        )
        action.add_argument("--json", action="store_true", help="print as JSON")
    return parser


def _add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help="a model that the service has")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSON Lines, or the id of an uploaded file")
    parser.add_argument("--eval-data", metavar="FILE", help="evaluation data, likewise")
    parser.add_argument("--suffix", metavar="NAME", help="part of the name of the fine-tuned model")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data")
    parser.add_argument("--batch-size", type=int, metavar="N", help="rows per step")
    parser.add_argument("--learning-rate-multiplier", type=float, metavar="X", help="factor on the learning rate")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the data order and the new weights")
    parser.add_argument("--nproc", type=int, metavar="N", help="GPUs or, without any, processes")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="-100 to 100 (0)")
    parser.add_argument("--hold", action="store_true", help="submit it paused")
    parser.add_argument(
        "--max-runtime", type=float, metavar="SECONDS", help="cancel the job after this much running time"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the run, as method.rank=8; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan; queue nothing")


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.client import Client

    with Client(arguments.url) as client:
        return int(_ACTIONS[arguments.action](client, arguments))


def _submit(client: Client, arguments: argparse.Namespace) -> int:
    from pantheraml.cli.jobs_view import plan_lines

    submission = _submission(client, arguments)
    if arguments.dry_run:
        plan = client.jobs.plan(submission)
        _print(plan, plan_lines(plan), as_json=arguments.json)
        return 0
    job = client.jobs.submit(submission)
    _print(job, [job.id], as_json=arguments.json)
    return 0


def _submission(client: Client, arguments: argparse.Namespace) -> Submission:
    from pantheraml.client import Submission
    from pantheraml.specs.config_file import parse_overrides, put_value

    config: dict[str, Any] = {}
    for key, value in parse_overrides(arguments.overrides).items():
        put_value(config, key, value)
    return Submission(
        model=arguments.model,
        training_file=_file(client, arguments.data),
        validation_file=None if arguments.eval_data is None else _file(client, arguments.eval_data),
        suffix=arguments.suffix,
        seed=arguments.seed,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        learning_rate_multiplier=arguments.learning_rate_multiplier,
        processes=arguments.nproc,
        priority=arguments.priority,
        hold=arguments.hold,
        max_runtime_seconds=arguments.max_runtime,
        config=config,
    )


def _file(client: Client, name: str) -> str:
    """Return the file's id; a path is uploaded first."""
    if name.startswith("file-") and not Path(name).exists():
        return name
    return client.files.upload(name).id


def _list(client: Client, arguments: argparse.Namespace) -> int:
    from pantheraml.cli.jobs_view import job_rows

    if arguments.limit < 1:
        raise ConfigError("--limit must be at least 1.")
    jobs = client.jobs.list(arguments.limit)
    _print(jobs, job_rows(jobs), as_json=arguments.json)
    return 0


def _show(client: Client, arguments: argparse.Namespace) -> int:
    from pantheraml.cli.jobs_view import job_lines

    job, artifacts = client.jobs.get(arguments.job), client.jobs.artifacts(arguments.job)
    if arguments.json:
        print(json.dumps({**job.model_dump(mode="json"), "artifacts": [each.model_dump() for each in artifacts]}))
    else:
        print("\n".join(job_lines(job, artifacts)))
    return 0


def _watch(client: Client, arguments: argparse.Namespace) -> int:
    """Exit with 0 if the job succeeded, otherwise with the code of a failed or an interrupted run."""
    from pantheraml.cli.jobs_view import showing

    try:
        with showing(sys.stdout.isatty() and not arguments.json) as show:
            for event in client.jobs.stream(arguments.job):
                if arguments.json:
                    print(event.model_dump_json(), flush=True)
                else:
                    show(event)
    except KeyboardInterrupt:
        print("The job continues.", file=sys.stderr)
        return 0
    job = client.jobs.get(arguments.job)
    if not arguments.json:
        print(_ending(job))
    codes = {"succeeded": 0, "cancelled": InterruptedRunError.exit_code}
    return codes.get(job.state, TrainingError.exit_code)


def _ending(job: Job) -> str:
    told = job.fine_tuned_model if job.error is None else job.error.message
    return printable(f"{job.id} {job.state}{f': {told}' if told else ''}")


def _logs(client: Client, arguments: argparse.Namespace) -> int:
    if arguments.follow and (arguments.json or arguments.bytes is not None):
        raise ConfigError(
            "--follow goes with neither --json nor --bytes.", fix="Leave out --follow, or --json and --bytes."
        )
    if arguments.bytes is not None and arguments.bytes < 1:
        raise ConfigError("--bytes must be at least 1.")
    if arguments.follow:
        for text in client.jobs.follow_logs(arguments.job):
            print(printable(text), end="", flush=True)
        return 0
    text = client.jobs.logs(arguments.job, arguments.bytes)
    print(json.dumps({"job": arguments.job, "log": text}) if arguments.json else printable(text), end="")
    return 0


def _pause(client: Client, arguments: argparse.Namespace) -> int:
    return _changed(client.jobs.pause(arguments.job), arguments)


def _resume(client: Client, arguments: argparse.Namespace) -> int:
    return _changed(client.jobs.resume(arguments.job), arguments)


def _cancel(client: Client, arguments: argparse.Namespace) -> int:
    return _changed(client.jobs.cancel(arguments.job), arguments)


def _changed(job: Job, arguments: argparse.Namespace) -> int:
    _print(job, [f"{job.id} {job.state}"], as_json=arguments.json)
    return 0


def _download(client: Client, arguments: argparse.Namespace) -> int:
    if arguments.merged:
        client.jobs.merge(arguments.job)
    known = [artifact.name for artifact in client.jobs.artifacts(arguments.job)]
    names = arguments.names or [name for name in known if name.startswith("merged/") or not arguments.merged]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"The job has no file {unknown!r}.", fix=f"It has: {', '.join(known) or 'none yet'}.")
    if not names:
        raise ConfigError("The job has written nothing yet.", fix="Wait for it: pantheraml jobs watch JOB")
    folder = Path(arguments.output or arguments.job)
    fetched = [client.jobs.download(arguments.job, name, _below(folder, name)) for name in names]
    if arguments.json:
        print(json.dumps([str(path) for path in fetched]))
    else:
        print(printable("\n".join(map(str, fetched))))
    return 0


def _below(folder: Path, name: str) -> Path:
    """Return the target path of a file. ConfigError if the service's name for it leads outside of the folder."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(
            f"The service names a file that would lie outside of {folder}: {name!r}.",
            fix="Nothing was written for it. Tell the operator of the service.",
        )
    return path


def _print(answer: BaseModel | Iterable[BaseModel], lines: Iterable[str], *, as_json: bool) -> None:
    from pydantic import BaseModel

    if not as_json:
        print(printable("\n".join(lines)))
    elif isinstance(answer, BaseModel):
        print(answer.model_dump_json())
    else:
        print(json.dumps([each.model_dump(mode="json") for each in answer]))


_ACTIONS = {
    "submit": _submit,
    "list": _list,
    "show": _show,
    "watch": _watch,
    "logs": _logs,
    "pause": _pause,
    "resume": _resume,
    "cancel": _cancel,
    "download": _download,
}

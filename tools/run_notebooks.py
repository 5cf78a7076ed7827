"""Run a folder of notebooks written for Unsloth, with the import changed to pantheraml, on a CPU.

    git clone https://github.com/unslothai/notebooks
    pip install --no-deps torchvision timm langid scikit-learn scipy joblib threadpoolctl
    python tools/run_notebooks.py notebooks/nb --output results.json --table results.md

Models are tiny and random, data sets synthetic, steps few; loading, adapters, trainers, generation and saving are the
real ones. Notebooks that are copies of each other run once. Results: ok (every training trained), an error of ours, not
supported by design (an error of ours said so), or not possible with this tool (a package or data set that is not here,
time, memory). `--summary` and `--page` write tools/notebooks/results.json and the section of docs/migrating.md.
Results are written after every notebook; `--resume` runs only those that results.json does not have, `--failed` also
those that ended with an error or a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.notebooks import execute, stand_ins
from tools.notebooks.cells import Notebook, distinct_notebooks
from tools.notebooks.local_hub import LocalHub, hub_names
from tools.notebooks.report import category_table, reasons_table
from tools.notebooks.summary import page_section, summarize, with_section
from tools.notebooks.verdicts import OUTCOMES, Result

_POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    notebooks = [nb for nb in distinct_notebooks(options.folder) if re.search(options.only, nb.name, re.IGNORECASE)]
    if not notebooks:
        print(f"no notebook in {options.folder} matches {options.only!r}", file=sys.stderr)
        return 2
    kept = kept_results(notebooks, options)
    names = {result.name for result in kept}
    with tempfile.TemporaryDirectory(prefix="notebooks-") as scratch:
        work = options.keep or Path(scratch)
        hub = LocalHub((options.models or work / "models").resolve())
        prepare_process(hub)
        results = run_all([nb for nb in notebooks if nb.name not in names], hub, work.resolve() / "runs", options, kept)
    tables = as_markdown(results)
    if options.table:
        options.table.write_text(tables)
    if options.summary:
        options.summary.write_text(json.dumps(summarize(results, options.commit), indent=1) + "\n")
    if options.page:
        section = page_section(summarize(results, options.commit))
        options.page.write_text(with_section(options.page.read_text(), section))
    print(tables)
    return 1 if options.strict and any(result.outcome == "error" for result in results) else 0


def kept_results(notebooks: Sequence[Notebook], options: argparse.Namespace) -> list[Result]:
    """Return the results of an earlier run that `--resume` or `--failed` keep."""
    if not (options.resume or options.failed) or not options.output or not options.output.exists():
        return []
    names = {notebook.name for notebook in notebooks}
    results = [Result(**fields) for fields in json.loads(options.output.read_text())["results"]]
    done = ("ok", "unsupported") if options.failed else OUTCOMES
    return [result for result in results if result.name in names and result.outcome in done]


def prepare_process(hub: LocalHub) -> None:
    """Set the environment that children inherit, then import what they share."""
    os.environ.update(
        HF_HUB_CACHE=str(hub.cache), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(hub.folder),
        TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", WANDB_DISABLED="true", HF_HUB_DISABLE_PROGRESS_BARS="1",
    )  # fmt: skip
    stand_ins.define_torchvision_ops()
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import transformers
    import trl

    transformers.logging.set_verbosity_error()
    for name in ("SFTTrainer", "GRPOTrainer", "DPOTrainer"):  # TRL imports its trainers at first use
        getattr(trl, name)


def run_all(
    notebooks: Sequence[Notebook], hub: LocalHub, folder: Path, options: argparse.Namespace, kept: Sequence[Result]
) -> list[Result]:
    """Run the notebooks and return their results with the kept ones, by name."""
    bounds = execute.Bounds(options.timeout, options.memory)
    waiting, running, results = list(notebooks), [], list(kept)
    while waiting or running:
        while waiting and len(running) < options.jobs:
            notebook = waiting.pop(0)
            result = execute.not_run(notebook)
            if result is None:
                provide_models(hub, hub_names_of(notebook))
                running.append(execute.start(notebook, folder / re.sub(r"[^\w.-]+", "_", notebook.name)))
            else:
                results.append(result)
        for each in list(running):
            result = execute.poll(each, bounds)
            if result is not None:
                running.remove(each)
                results.append(result)
                print(f"{result.outcome:12}{result.seconds:6.1f} s  {result.name}  {result.reason[:150]}", flush=True)
                save(results, options.output)
        time.sleep(_POLL_SECONDS)
    save(results, options.output)
    return sorted(results, key=lambda result: result.name.lower())


def save(results: Sequence[Result], output: Path | None) -> None:
    """Write what is known so far, whole or not at all, so that an interrupted run can be resumed."""
    if output is not None:
        partial = output.with_name(output.name + ".partial")
        partial.write_text(as_json(sorted(results, key=lambda result: result.name.lower())))
        partial.replace(output)


def provide_models(hub: LocalHub, names: Sequence[str]) -> None:
    """Build models in a child: torch's thread pool of a process that has computed something does not survive a fork."""
    missing = [name for name in names if not hub.has(name)]
    if not missing:
        return
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            failed = [name for name in missing if not _provided(hub, name)]
            if failed:
                print(f"no tiny model for {', '.join(failed)}", file=sys.stderr, flush=True)
            status = 0
        finally:
            os._exit(status)
    os.waitpid(pid, 0)


def _provided(hub: LocalHub, name: str) -> bool:
    try:
        hub.provide(name)
    except Exception:  # noqa: BLE001 - a notebook that loads it will report that it is missing
        traceback.print_exc()
        return False
    return True


def hub_names_of(notebook: Notebook) -> list[str]:
    from tools.notebooks.cells import python_of

    return sorted({name for cell in notebook.cells for name in hub_names(python_of(cell))})


def as_json(results: Sequence[Result]) -> str:
    return json.dumps({"results": [result.as_dict() for result in results]}, indent=1) + "\n"


def as_markdown(results: Sequence[Result]) -> str:
    parts = [category_table(results)]
    for outcome, title in (
        ("error", "Errors of ours"),
        ("unsupported", "Not supported by design"),
        ("limit", "Limits"),
    ):
        parts.append(f"### {title}\n\n{reasons_table(results, outcome=outcome)}")
    return "\n\n".join(parts) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with .ipynb files")
    parser.add_argument("--only", default="", help="regular expression: run the notebooks whose names match")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks at the same time")
    parser.add_argument("--timeout", type=float, default=180, help="seconds per notebook")
    parser.add_argument("--memory", type=float, default=6, help="GiB per notebook")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--resume", action="store_true", help="keep the results that --output already has")
    parser.add_argument("--failed", action="store_true", help="as --resume, but run errors and limits again")
    parser.add_argument("--table", type=Path, help="write the tables as Markdown")
    parser.add_argument("--summary", type=Path, help="write counts, reasons and versions as JSON")
    parser.add_argument("--page", type=Path, help="write the summary into this page, between its markers")
    parser.add_argument("--commit", default="unknown", help="commit of the notebooks, for the summary")
    parser.add_argument("--models", type=Path, help="keep the tiny models in this folder, to reuse them")
    parser.add_argument("--keep", type=Path, help="keep each notebook's output and files in this folder")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if any notebook ends with an error of ours")
    return parser


if __name__ == "__main__":
    sys.exit(main())

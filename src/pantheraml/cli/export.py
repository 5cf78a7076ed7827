"""`pantheraml export`: write the trained model as a standard Hugging Face folder, or as a GGUF file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ConfigError, RunDirectoryError
from pantheraml.base.text import printable
from pantheraml.cli.consent_flags import add_consent, consent_from


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="write the trained model as a standard Hugging Face folder or a GGUF file",
        description="Merge a run's adapter into its base model and write a standard Hugging Face folder, or a GGUF"
        " file for llama.cpp.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into the base model's weights")
    parser.add_argument(
        "--gguf",
        metavar="KIND",
        help="write a GGUF file instead, with the adapter merged: f32, f16, bf16, q8_0; or any kind of llama-quantize,"
        " if that is on the path",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", metavar="PATH", required=True, help="folder to write (must be empty), or GGUF file")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="dtype of the written weights (default: the run's)"
    )
    parser.add_argument(
        "--base",
        choices=["trained", "plain"],
        default="trained",
        help="weights a QLoRA adapter is merged into: the 4-bit ones it was trained on (default), or unquantized ones",
    )
    add_consent(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.folders import no_scratch_left, require_empty
    from pantheraml.runs.tasks import messages, run_request
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import ExportRequest

    run_dir, output = Path(arguments.run_dir), Path(arguments.output)
    run = RunDir(run_dir)
    consent = consent_from(arguments)
    config = run.received_config(consent)
    adapter = run.trained()
    if arguments.gguf is None:
        require_empty(output)
    else:
        _check_gguf(arguments, output)
    if not arguments.merge and arguments.gguf is None and adapter.name == "adapter":
        raise ConfigError(
            "Without --merge, export would only copy the adapter.",
            fix=f"Add --merge for a standard model, or use the PEFT adapter itself: {adapter}.",
        )
    if arguments.base == "plain" and config.method.kind == "full":
        raise ConfigError("--base plain is for adapters, but this run trained every weight.", fix="Remove it.")
    precision = arguments.precision or run.plan().precision
    request = ExportRequest(
        run_dir=run_dir.absolute(),
        consent=consent,
        output=output.absolute(),
        precision=precision,
        base=arguments.base,
        gguf=arguments.gguf,
    )
    with no_scratch_left(request.output):
        notices = run_request("export", request, answer=messages)
    written = arguments.gguf or precision
    if arguments.json:
        print(json.dumps({"output": str(output.absolute()), "precision": written, "notices": notices}))
        return 0
    for notice in notices:
        print(printable(f"{notice[0].upper()}{notice[1:]}."))
    print(f"Exported to {output} ({written}).")
    return 0


def _check_gguf(arguments: argparse.Namespace, output: Path) -> None:
    from pantheraml.base.roots import require_allowed

    require_allowed(output, key="--output")
    if arguments.precision is not None:
        raise ConfigError("--precision is for Hugging Face folders.", fix="Remove it: --gguf names the number format.")
    if output.exists():
        raise RunDirectoryError(f"{output} exists already.", fix="Choose another --output, a file.")

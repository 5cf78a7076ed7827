"""`pantheraml COMMAND`: parse the command line, run the command, turn errors into a message and an exit code.

Each command is a module with `add(subparsers)`, which declares its options, and `run(arguments)`, which imports what it
needs. Nothing heavy is imported before the command is known, so `--help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError, PantheraError, WorkerError
from pantheraml.base.text import printable


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that usage errors are handled like all others."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message[0].upper()}{message[1:]}.", fix=f"See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the nearest value instead of listing many."""
        close = difflib.get_close_matches(str(value), map(str, action.choices or ()), n=1)
        if close and value not in (action.choices or ()):
            name = "/".join(action.option_strings) or action.metavar
            raise ConfigError(
                f"Argument {name}: {value!r} is not a choice.",
                fix=f"Did you mean {close[0]}? See `{self.prog} --help`.",
            )
        super()._check_value(action, value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; the error for an unknown flag suggests a similar flag or configuration key."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(_with_current_name(sys.argv[1:] if argv is None else argv))
    if unknown:
        command = f"pantheraml {arguments.command}" if arguments.command else "pantheraml"
        raise ConfigError(
            f"Unrecognized arguments: {' '.join(unknown)}.",
            fix=f"{_suggestion(parser, arguments.command, unknown[0])}See `{command} --help`.",
        )
    return arguments


def _with_current_name(argv: Sequence[str]) -> list[str]:
    """Replace a deprecated command name by its current one."""
    from pantheraml.specs.legacy_aliases import COMMANDS

    if not argv or argv[0] not in COMMANDS:
        return list(argv)
    print(f"`pantheraml {argv[0]}` is deprecated: use `pantheraml {COMMANDS[argv[0]]}`.", file=sys.stderr)
    return [COMMANDS[argv[0]], *argv[1:]]


def _suggestion(parser: argparse.ArgumentParser, command: str | None, unknown: str) -> str:
    from pantheraml.specs.config_file import all_keys, nearest_key

    name = unknown.partition("=")[0]
    if not name.startswith("--"):
        return ""
    chosen = [action.choices[command] for action in parser._actions if isinstance(action.choices, dict) and command]
    flags = [flag for each in (parser, *chosen) for action in each._actions for flag in action.option_strings]
    if close := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
        return f"Did you mean {close[0]}? "
    if name == "--config" and any(action.dest == "config" for each in chosen for action in each._actions):
        return f"The config file needs no flag: pantheraml {command} FILE. "
    words = name[2:].replace("-", "_")
    of_adapters = ("method", words.removeprefix("lora_"))
    known = words.startswith("lora_") and of_adapters in all_keys()
    key = ".".join(of_adapters) if known else nearest_key((words,))
    takes_keys = "--set" in flags and key is not None and "." in key
    return f"Keys without a flag are set with --set {key}=VALUE. " if takes_keys else ""


def build_parser() -> argparse.ArgumentParser:
    from pantheraml.cli import (
        bench,
        compare,
        demo,
        doctor,
        export,
        generate,
        gpus,
        import_config,
        jobs,
        keys,
        plan,
        profile,
        quantize,
        replay,
        report,
        resume,
        schema,
        serve,
        train,
        verify,
        watch,
    )

    parser = _Parser(prog="pantheraml", description="Fine-tune language models on one, several or many GPUs.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    running, results = (demo, train, resume, plan, profile, verify, replay, generate), (export, quantize)
    reading = (watch, report, compare)
    for module in (*running, *reading, *results, serve, jobs, keys, doctor, gpus, schema, import_config, bench):
        command = module.add(commands)
        command.set_defaults(run=module.run)
        command.add_argument("--debug", action="store_true", help="show tracebacks and the full log")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    debug = env.debug_requested()
    try:
        arguments = parse(argv)
        if arguments.version:
            from pantheraml import __version__

            print(__version__)
            return 0
        if arguments.command is None:
            build_parser().print_help()
            return ConfigError.exit_code
        debug = debug or arguments.debug
        if debug:
            env.set_for_this_process("PANTHERAML_DEBUG", "1")  # workers inherit it
            log.start(debug=True)
        return int(arguments.run(arguments))
    except PantheraError as err:
        if debug:
            raise
        print(f"{type(err).__name__}: {err}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) closed it, which is not an error. Buffered output is discarded at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as err:
        if debug:
            raise
        print(printable(f"WorkerError: Unexpected exception: {type(err).__name__}: {err}"), file=sys.stderr)
        print("  fix: Rerun with --debug and report the traceback.", file=sys.stderr)
        return WorkerError.exit_code


if __name__ == "__main__":
    sys.exit(main())

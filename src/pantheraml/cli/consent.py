"""The flags by which a command that reads a run folder is told that code from it may run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pantheraml.specs.consent import Consent


def add_consent(parser: argparse.ArgumentParser) -> None:
    asked = "; without it, a folder whose config.yaml asks for that is refused"
    parser.add_argument(
        "--trust-remote-code", action="store_true", help=f"run Python code that comes with the run's model{asked}"
    )
    parser.add_argument("--allow-pickle", action="store_true", help=f"load pickled weights of the run's model{asked}")


def consent_from(arguments: argparse.Namespace) -> Consent:
    from pantheraml.specs.consent import Consent

    return Consent(trust_remote_code=arguments.trust_remote_code, allow_pickle=arguments.allow_pickle)

"""Flags for consent to run code that comes with a run folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pantheraml.specs.consent import Consent


def add_consent(parser: argparse.ArgumentParser) -> None:
    otherwise = "; without it, a run whose config.yaml requires that is rejected"
    parser.add_argument(
        "--trust-remote-code", action="store_true", help=f"run Python code that comes with the run's model{otherwise}"
    )
    parser.add_argument(
        "--allow-pickle", action="store_true", help=f"load pickled weights of the run's model{otherwise}"
    )


def consent_from(arguments: argparse.Namespace) -> Consent:
    from pantheraml.specs.consent import Consent

    return Consent(trust_remote_code=arguments.trust_remote_code, allow_pickle=arguments.allow_pickle)

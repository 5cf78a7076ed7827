"""Hooks for the fuzzer: an existing model and file, so that some of its jobs are accepted; they stay on hold."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

FILE = "FUZZED_FILE"
"""Environment variable: id of the file."""
ENDED = "FUZZED_ENDED_JOB"
"""Environment variable: id of a job that has ended, and whose stream ends, too."""


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if context.operation.path != "/v1/fine_tuning/jobs" or not isinstance(body, dict):
        return body
    own = body.get("pantheraml")
    held = {**own, "hold": True} if isinstance(own, dict) else {"hold": True}
    known = {"model": "tiny", "training_file": os.environ[FILE], "pantheraml": held}
    return {**{name: value for name, value in body.items() if name != "validation_file"}, **known}


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    """A test of devices trains for seconds: nobody waits for it."""
    return {**(query or {}), "wait": False} if context.operation.path.endswith("/gpu/test") else query


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """The stream of a job that waits would not end."""
    if not context.operation.path.endswith("/stream") or not path_parameters:
        return path_parameters
    known = str(path_parameters.get("job_id")).startswith("ftjob-")
    return {**path_parameters, "job_id": os.environ[ENDED]} if known else path_parameters

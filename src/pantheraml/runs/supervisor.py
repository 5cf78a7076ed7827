"""`python -m pantheraml.runs.supervisor FOLDER TOKEN`: run the training that a job's folder asks for (`supervised`).

Never imports torch. It writes its identity first and how the run ended last; signals mean what they mean to
`pantheraml train`: SIGTERM saves a checkpoint and ends, SIGTERM and SIGINT end at once.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import psutil

from pantheraml.base.errors import PantheraError
from pantheraml.base.folders import write_text
from pantheraml.runs.errors import status_of
from pantheraml.runs.process_identity import ProcessIdentity
from pantheraml.runs.session import run_training
from pantheraml.runs.supervised import RunExit, RunRequest, SupervisedRun, SupervisorRecord
from pantheraml.specs.config_file import validate


def main(folder: Path, token: int) -> int:
    job = SupervisedRun(folder, "")
    if _current(job) != token:
        return 0
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    record = SupervisorRecord(token=token, identity=identity)
    write_text(folder / "supervisor.json", record.model_dump_json())
    ended = _run(job, token)
    if _current(job) == token:
        write_text(folder / "exit.json", ended.model_dump_json())
    return 0


def _current(job: SupervisedRun) -> int:
    return RunRequest.model_validate_json(job.request_file.read_text(encoding="utf-8")).token


def _run(job: SupervisedRun, token: int) -> RunExit:
    try:
        request = RunRequest.model_validate_json(job.request_file.read_text(encoding="utf-8"))
        if request.cores:
            psutil.Process().cpu_affinity(request.cores)  # and so of the workers, which have a thread for each of them
        run_training(validate(request.config), job.run_dir.path, resume=True)
    except PantheraError as err:
        traceback.print_exc()
        error = {"error": type(err).__name__, "what": err.what, "where": err.where, "fix": err.fix}
        return RunExit(token=token, status=status_of(err), time=time.time(), **error)
    except Exception as err:  # noqa: BLE001 - whatever it is, who asked for the run must learn of it
        traceback.print_exc()  # into supervisor.log
        what = f"Unexpected exception: {type(err).__name__}: {err}"
        return RunExit(token=token, status="crashed", error="WorkerError", what=what, time=time.time())
    return RunExit(token=token, status="succeeded", time=time.time())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

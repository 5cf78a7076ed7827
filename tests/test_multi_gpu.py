"""`python tests/test_multi_gpu.py [PYTEST ARGUMENT ...]`: the tests about several GPUs, on CPU processes and on GPUs.

It calls pytest on the files below and exits with its code. They are part of `make test` and `make test-all`; this file
has no tests of its own, so that collecting it runs nothing twice. Tests that need a GPU are skipped without one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = {
    "GPU detection and setup": ["tests/unit/devices/test_devices_probe.py", "tests/unit/runs/test_runs_doctor.py"],
    "imports": ["tests/unit/api/test_api_fast_language_model.py"],
    "model loading": ["tests/unit/api/test_api_device_map.py", "tests/gpu/test_gpu_device_map.py"],
    "trainers": [
        "tests/distributed/test_trainer.py",
        "tests/distributed/test_trainer_settings.py",
        "tests/distributed/test_module_trainer.py",
    ],
    "memory and communication": ["tests/unit/test_distributed_face.py", "tests/gpu/test_gpu_collectives.py"],
    "one process and several": ["tests/distributed/test_distributed_equality.py"],
}


def main(arguments: list[str]) -> int:
    files = [str(ROOT / file) for group in SUITE.values() for file in group]
    return int(pytest.main([f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", *arguments, *files]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

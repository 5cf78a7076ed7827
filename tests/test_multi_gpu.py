"""Run the tests of multi-GPU support as a script: `python tests/test_multi_gpu.py`, with any arguments of pytest.

They are in the folders beside this file, and pytest finds them there; here is only the list.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "detection": ["unit/devices/test_devices_probe.py", "unit/planner/test_planner_choose.py"],
    "imports": ["unit/hooks/test_hooks_registry.py", "unit/cli/test_cli_options.py"],
    "loading": ["unit/api/test_api_device_map.py", "unit/api/test_api_fast_language_model.py"],
    "trainers": ["unit/api/test_api_trainer.py", "unit/test_seed_blocks_models.py", "distributed/test_trainer.py"],
    "memory": ["unit/test_distributed_face.py", "unit/engine/test_engine_batch_size.py"],
    "on GPUs": ["gpu/test_gpu_device_map.py", "gpu/test_gpu_own_loop.py", "gpu/test_gpu_seed_blocks.py"],
}


def main(arguments: list[str]) -> int:
    files = [str(ROOT / "tests" / name) for names in FILES.values() for name in names]
    return subprocess.call([sys.executable, "-m", "pytest", *arguments, *files], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

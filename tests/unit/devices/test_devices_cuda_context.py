"""CUDA context without torch: no error without a GPU, and torch is not imported."""

from __future__ import annotations

import subprocess
import sys

from pantheraml.base import env

CODE = """
import os, sys
from pantheraml.devices.cuda_context import open_context
print(open_context(0), os.environ["CUDA_MODULE_LOADING"], "torch" in sys.modules)
"""


def test_open_context_without_a_gpu_returns_false() -> None:
    environment = env.child_environment(CUDA_VISIBLE_DEVICES="", CUDA_MODULE_LOADING=None)
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "LAZY", "False"], done.stderr

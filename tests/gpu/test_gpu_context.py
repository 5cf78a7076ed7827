"""A CUDA context created before torch is imported is the one that torch uses."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import ctypes
from pantheraml.devices.cuda_context import DRIVER, open_context
def active():
    flags, state = ctypes.c_uint(), ctypes.c_int()
    assert ctypes.CDLL(DRIVER).cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(state)) == 0
    return state.value
print(open_context(0), active())
import torch
print(torch.ones(3, device="cuda").sum().item())
"""


def test_torch_uses_the_existing_cuda_context() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "1", "3.0"], done.stderr

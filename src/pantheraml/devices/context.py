"""A GPU's CUDA context, made through the driver itself, without torch.

To make it takes seconds, in which Python has nothing to do: a thread can do so while the imports run, since ctypes
releases the interpreter meanwhile. Torch uses the context that it finds.
"""

from __future__ import annotations

import ctypes

from pantheraml.base import env

DRIVER = "libcuda.so.1"
SUCCESS = 0


def open_context(ordinal: int) -> bool:
    """Make the context of the GPU that CUDA shows under this number (counted round, as ranks are); whether it is there.

    It stays as long as the process. What is wrong with a driver or a device is not told here: torch meets it again, and
    says so.
    """
    # As torch sets it before its own first call: the driver looks only once, and might load every kernel there is.
    env.suggest_for_this_process("CUDA_MODULE_LOADING", "LAZY")
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) != SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != SUCCESS or count.value == 0:
        return False
    if driver.cuDeviceGet(ctypes.byref(device), ordinal % count.value) != SUCCESS:
        return False
    return int(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)) == SUCCESS

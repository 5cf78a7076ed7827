"""Create a GPU's primary CUDA context through the driver API, without torch.

Creating it takes seconds. ctypes releases the GIL during the call, so a thread can do it while the imports run; torch
then uses the existing primary context.
"""

from __future__ import annotations

import ctypes

from pantheraml.base import env

DRIVER = "libcuda.so.1"
SUCCESS = 0


def open_context(ordinal: int) -> bool:
    """Create the primary context of CUDA device `ordinal` modulo the device count; return True on success.

    It lives as long as the process. Driver and device errors are not reported here: torch hits and reports them.
    """
    # Torch sets this before its first call, too: the driver reads it only once, and may load every kernel otherwise.
    env.set_default_for_this_process("CUDA_MODULE_LOADING", "LAZY")
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

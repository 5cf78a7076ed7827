from __future__ import annotations

import psutil
import pytest

from pantheraml.devices.probe import probe, visible_indices

UUIDS: list[str | None] = ["GPU-aa11", "GPU-bb22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-bb33, 0", [2, 0]),
        ("0,7,1", [0]),  # CUDA stops at the first entry it cannot use
        ("GPU-bb", []),  # ambiguous
        ("1,1", [1]),
        ("-1", []),
    ],
)
def test_cuda_visible_devices(variable: str | None, shown: list[int]) -> None:
    assert visible_indices(variable, UUIDS) == shown


@pytest.mark.seed("S2-006", "S3-044", "S3-052", "S0-085")
def test_probe_reports_local_hardware() -> None:
    spec = probe()
    assert 1 <= spec.cpu_count <= (psutil.cpu_count() or 1)
    assert spec.ram_bytes == psutil.virtual_memory().total
    assert spec.gpus or spec.note

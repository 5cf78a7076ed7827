"""Time and memory to load a quantized model from disk to the device, streamed or through host memory.

A model of known shape with random weights is written as bf16 safetensors; each method then loads it in its own process.
"Through the host" is what transformers offers: load the whole model on the CPU, then quantize it layer by layer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from table import Column, Table

TABLE = Table(
    title="Model loading",
    how="From safetensors on a local disk to the device, each method in its own process, after the imports. Warm: the"
    " files are in the page cache; cold: they are not. Host growth: anonymous memory of the process.",
    columns=(
        Column("shape", "parameters.shape"),
        Column("format", "packing"),
        Column("page cache", "files"),
        Column("streamed", "streamed_seconds", lambda value: f"{value:.1f} s"),
        Column("through the host", "whole_seconds", lambda value: f"{value:.1f} s"),
        Column("model size", "model_bytes", lambda value: f"{value / 2**30:.2f} GiB"),
        Column("device peak, streamed", "streamed_device_peak", lambda value: f"{value / 2**30:.2f} GiB"),
        Column("host growth, streamed", "streamed_host_growth", lambda value: f"{value / 2**30:.2f} GiB"),
        Column("host growth, through the host", "whole_host_growth", lambda value: f"{value / 2**30:.2f} GiB"),
    ),
)

NEEDS_GPU = True

CHILD = "import sys; sys.path.insert(0, sys.argv[1]); import load_model; load_model.child(*sys.argv[2:])"


def run(*, shape: str = "8b", packings: tuple[str, ...] = ("fp8", "nf4"), cold: bool = True) -> dict[str, Any]:
    from inputs import write_model

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_model(folder, shape)
        for packing in packings:
            for files in ("warm", "cold") if cold else ("warm",):
                row: dict[str, Any] = {"packing": packing, "files": files}
                for way in ("streamed", "whole"):
                    _prepare(folder, cold=files == "cold")
                    row |= _measured(folder, packing, way)
                rows.append(row)
    return {"parameters": {"shape": shape, "packings": list(packings), "cold": cold}, "results": rows}


def _prepare(folder: Path, *, cold: bool) -> None:
    """Read all weight files; for a cold start, drop them from the page cache again."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            while os.read(descriptor, 1 << 26):
                pass
            if cold:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _measured(folder: Path, packing: str, way: str) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(folder), packing, way]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(folder: str, packing: str, way: str) -> None:
    """Load the model and print time and memory. Runs in its own process."""
    import threading
    import time

    import torch
    from transformers import AutoModelForCausalLM

    from pantheraml.models.loader import load_model
    from pantheraml.models.quantize.quantized_linear import quantize_linears
    from pantheraml.specs.train import ModelConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)  # initialize the device before timing
    done, seen = threading.Event(), [_anonymous()]

    def watch() -> None:
        while not done.wait(0.01):
            seen.append(_anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    try:
        if way == "streamed":
            config = ModelConfig(path=folder)
            model: Any = load_model(config, dtype=torch.bfloat16, device=device, quantize=packing)  # type: ignore[arg-type]
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            quantize_linears(model, packing, dtype=torch.bfloat16, device=device)  # type: ignore[arg-type]
            model.to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    finally:
        done.set()
        watcher.join()
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    found = {"seconds": seconds, "device_peak": peak, "host_growth": max(seen) - seen[0]}
    print(json.dumps({"model_bytes": size} | {f"{way}_{name}": value for name, value in found.items()}))


def _anonymous() -> int:
    """Anonymous resident memory of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))

"""Benchmark our kernels against the torch reference, eager and compiled, and other libraries' kernels.

For each op and implementation: time (forward and backward, if differentiable), memory on top of the inputs, and error
against the float32 reference. A custom kernel is kept only if it is at least 5 % better. The ops are in kernel_ops.py.

    python benchmarks/run.py kernels                              all ops, on a GPU
    python benchmarks/run.py kernels --set only=rms_norm          ops whose name starts with this
    python benchmarks/run.py kernels --set size=tiny              smoke test on any device
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from kernel_op import Implementation, Inputs, Layer, Op
from kernel_ops import OPS
from recorded_calls import recorded
from table import Column, Table

NEEDS_GPU = True

REPEATS = {"full": 20, "tiny": 2}
CALLS_A_REPEAT = 5


def run(*, size: str = "full", only: str | None = None) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if size == "full" and device == "cpu":
        raise SystemExit("the full size needs a GPU; --set size=tiny runs anywhere")
    rows = []
    for name, make in OPS.items():
        if only is None or name.startswith(only):
            rows += measure_op(name, make(Layer(size, device)), REPEATS[size])
    if not rows:
        raise SystemExit(f"there is no op {only!r}; known: {', '.join(OPS)}")
    return {"parameters": {"size": size}, "results": rows}


def measure_op(name: str, op: Op, repeats: int) -> list[dict[str, Any]]:
    import torch

    exact = results(op.exact or op.reference, {key: _float32(value) for key, value in op.inputs.items()}, op)
    factories: dict[str, Callable[[], Implementation]] = {"ours": lambda: op.ours, "torch, eager": lambda: op.reference}
    if torch.cuda.is_available():
        factories["torch, compiled"] = lambda: torch.compile(op.reference)
    rows = []
    if torch.cuda.is_available() and op.not_compiled is not None:
        del factories["torch, compiled"]
        rows.append({"op": name, "implementation": "torch, compiled", "reason": op.not_compiled})
    for implementation, make in {**factories, **op.others}.items():
        row: dict[str, Any] = {"op": name, "implementation": implementation, "shapes": shapes(op.inputs)}
        try:
            rows.append(row | measure(make(), op, exact, repeats))
        except ImportError as err:
            rows.append(row | {"reason": f"not installed: {err.msg.partition(' (')[0]}"})
        except torch.OutOfMemoryError:
            rows.append(row | {"reason": "out of memory"})
        torch.compiler.reset()
    return rows


def _float32(value: Any) -> Any:
    """Detach floating-point tensors and cast them to float32; return anything else unchanged."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().float().requires_grad_(value.requires_grad)


def shapes(inputs: Inputs) -> str:
    import torch

    actual = ["x".join(map(str, value.shape)) for value in inputs.values() if isinstance(value, torch.Tensor)]
    return ", ".join(shape for shape in actual if shape)


def call(implementation: Implementation, inputs: Inputs) -> tuple[Any, tuple[Any, ...]]:
    """Output, and gradients of the inputs that require one, for a fixed output gradient."""
    import torch

    differentiated = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    out = implementation(inputs)
    if not differentiated:
        return out, ()
    output_grad = (
        torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape) if out.ndim else None
    )
    return out, torch.autograd.grad(out, differentiated, output_grad)


def results(implementation: Implementation, inputs: Inputs, op: Op) -> list[Any]:
    """Outputs and gradients as float32 tensors."""
    out, gradients = call(implementation, inputs)
    return [value.detach().float() for value in (*op.read(out), *gradients)]


def measure(implementation: Implementation, op: Op, exact: list[Any], repeats: int) -> dict[str, float | None]:
    import torch

    cuda = torch.cuda.is_available()
    actual = results(implementation, op.inputs, op)  # also triggers compilation and autotuning
    error = max(relative_error(*each) for each in zip(actual, exact, strict=True))
    del actual
    peak = None
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(implementation, op.inputs)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    several = functools.partial(calls, implementation, op)
    graph = recorded(several)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        (graph or several)()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CALLS_A_REPEAT)
    return {
        "milliseconds": 1000 * statistics.median(times),
        "peak_gib": peak,
        "relative_error": error,
        "recorded": graph is not None,
    }


def calls(implementation: Implementation, op: Op) -> None:
    for _ in range(CALLS_A_REPEAT):
        call(implementation, op.inputs)


def relative_error(actual: Any, exact: Any) -> float:
    """Norm of the difference divided by the norm of the exact tensor."""
    return float((actual - exact).norm() / exact.norm())


TABLE = Table(
    title="Kernels",
    how=(
        "Median time, forward and backward together if an op is differentiable; recorded: replayed as a CUDA graph, so"
        " that kernel launches from Python do not count; memory on top of the inputs; the largest relative error (whole"
        " tensor) of outputs and gradients against the float32 reference."
    ),
    columns=(
        Column("op", "op"),
        Column("shapes", "shapes"),
        Column("implementation", "implementation"),
        Column("time", "milliseconds", lambda value: f"{value:.2f} ms"),
        Column("memory", "peak_gib", lambda value: f"{value:.2f} GiB"),
        Column("recorded", "recorded", lambda value: "yes" if value else "no"),
        Column("error", "relative_error", lambda value: f"{value:.1e}"),
        Column("not measured", "reason"),
    ),
)


if __name__ == "__main__":
    print(run(size="tiny"))

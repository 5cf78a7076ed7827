"""Rates of GPUs that were not calibrated on this host: measured ones where there are any, and those derived from them.

The H200's come from our own records. Other GPUs take matmul rates that were published as achieved, not data-sheet
peaks, and reach the share of their data-sheet bandwidths that the H200 reaches of its own. GPUs without a published
matmul rate have none, so their times are not predicted; `peak_rates` gives the fastest that they could be.
"""

from __future__ import annotations

from pantheraml.planner.rates import MachineRates, load_rates
from pantheraml.specs.gpu_table import GPUModel, by_driver_name

H200 = MachineRates(
    device="NVIDIA H200",
    matmul_tflops={"bf16": 700.0, "fp8": 1394.0},
    attention_tflops=372.0,
    copy_gb_s=3832.0,
    launch_us=53.0,
    watts=700.0,
    link_gb_s=345.0,
    source="matmul, attention, copy: benchmarks/results kernels-20261116T162053Z, packed_attention-20261116T105805Z;"
    " launch: ablation-20261118T210646Z; watts: power limit",
)
"""A product of 8192 x 4096 x 14336 and its backward; attention over four rows of 2,048 tokens; a copy of rows. Launch:
host time of a 1B model's step without CUDA graphs, per kernel of `step_time`. Link: NCCL all-gather over 8 GPUs."""

PUBLISHED_BF16 = {"A100": 271.0, "H100": 794.0, "H200": 794.0, "B200": 1745.0, "MI300X": 668.0}
"""Achieved dense bf16 TFLOP/s of large matmuls; products of a layer's size reach less, on the H200 0.88 of it."""

H200_BANDWIDTH, H200_NVLINK = 4800.0, 450.0
"""Data sheet, GB/s; per direction."""


def known_rates(model: GPUModel) -> MachineRates:
    """Known rates of a GPU of the table. An unknown rate is None, or missing."""
    if model.name == "H200":
        return H200
    published = PUBLISHED_BF16.get(model.name)
    bf16 = None if published is None else published * H200.matmul_tflops["bf16"] / PUBLISHED_BF16["H200"]
    assert H200.copy_gb_s is not None
    assert H200.attention_tflops is not None
    assert H200.link_gb_s is not None
    matmul = {} if bf16 is None else {"bf16": bf16}
    if bf16 is not None and model.fp8_tflops is not None and model.capability is not None:
        matmul["fp8"] = bf16 * H200.matmul_tflops["fp8"] / H200.matmul_tflops["bf16"]
    basis = "no achieved matmul rate is known" if bf16 is None else "published bf16 matmul rate, times 0.88"
    bandwidth, nvlink = model.bandwidth_gb_s, model.nvlink_gb_s if model.nvlink else None
    of_matmul = H200.attention_tflops / H200.matmul_tflops["bf16"]
    return MachineRates(
        device=model.text,
        matmul_tflops=matmul,
        attention_tflops=None if bf16 is None else bf16 * of_matmul,
        copy_gb_s=None if bandwidth is None else bandwidth * H200.copy_gb_s / H200_BANDWIDTH,
        launch_us=H200.launch_us,
        link_gb_s=None if nvlink is None else nvlink * H200.link_gb_s / H200_NVLINK,
        watts=None if model.watts is None else float(model.watts),
        source=f"{model.text}: {basis}; the rest as the H200's shares of its own, and launches as on its host",
    )


def peak_rates(model: GPUModel) -> MachineRates:
    """Data-sheet peaks, which no program reaches: times from these are lower bounds, good for comparing plans."""
    matmul = {} if model.bf16_tflops is None else {"bf16" if model.bf16 else "fp16": model.bf16_tflops}
    if model.fp8_tflops is not None:
        matmul["fp8"] = model.fp8_tflops
    return MachineRates(
        device=model.text,
        matmul_tflops=matmul,
        attention_tflops=model.bf16_tflops,
        copy_gb_s=model.bandwidth_gb_s,
        link_gb_s=model.nvlink_gb_s if model.nvlink else None,
        watts=None if model.watts is None else float(model.watts),
        source=f"{model.text}: data-sheet peaks, which bound the time from below",
    )


def rates_of(device: str) -> MachineRates | None:
    """Rates of a device by the driver's name: its stored calibration, else what is known of its model."""
    model = by_driver_name(device)
    return load_rates(device, otherwise=None if model is None else known_rates(model))

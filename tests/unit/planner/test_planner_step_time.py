from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.planner.facts import device_facts
from pantheraml.planner.known_models import known_config
from pantheraml.planner.known_rates import H200, known_rates, peak_rates, rates_of
from pantheraml.planner.layer_sizes import LayerSizes, layer_sizes
from pantheraml.planner.links import Links
from pantheraml.planner.memory.reserved import CONTEXT_BYTES
from pantheraml.planner.model_shapes import ModelShapes, Weight, shapes_of_config
from pantheraml.planner.rates import MachineRates, rates_as_json, rates_file
from pantheraml.planner.setting import Setting
from pantheraml.planner.step_time import StepTime, TimeInputs, least_seconds, predict_time, why_no_time
from pantheraml.specs.gpu_table import TABLE, by_text
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import GPU

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
BASE = Setting(frozen_weights="fp8", fused=True, cuda_graph=True, micro_batch=4, seq_len=2048)
NODE = Links(ranks_per_node=8, link_gb_s=345.0)


def inputs(setting: Setting, rates: MachineRates, links: Links | None) -> TimeInputs:
    given = TimeInputs.of(shapes_of_config(LLAMA_8B), setting, rates, links)
    assert given is not None
    return given


def predict(
    setting: Setting = BASE, rates: MachineRates = H200, links: Links | None = NODE, **changes: Any
) -> StepTime:
    setting = setting.model_copy(update=changes)
    time = predict_time(setting, inputs(setting, rates, links))
    assert time is not None
    return time


def test_widths_follow_from_the_weights() -> None:
    sizes = layer_sizes(shapes_of_config(LLAMA_8B))
    assert sizes == LayerSizes(
        layers=32,
        hidden=4096,
        vocab=128_256,
        queries=4096,
        qkv=6144,
        inner=14_336,
        gated=True,
        linear_parameters=218_103_808,
        norms=2,
        tied=False,
        head_size=128,
    )
    gpt2 = {"model_type": "gpt2", "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    small = layer_sizes(shapes_of_config(gpt2))
    assert small is not None
    assert (small.queries, small.qkv, small.inner, small.gated, small.vocab) == (768, 2304, 3072, False, 50_257)
    assert layer_sizes(ModelShapes((Weight("odd.weight", (4, 4), "other"),), tied=True)) is None


def test_the_h200s_rates_are_those_of_the_records() -> None:
    kernels = json.loads((RESULTS / "kernels-20261116T162053Z.json").read_text())["results"]
    took = {(row["op"], row["implementation"]): row["milliseconds"] / 1e3 for row in kernels if "milliseconds" in row}
    product = 2 * 8192 * 4096 * 14_336
    plain = took["fp8_product", "torch, compiled"] + took["fp8_product, backward", "torch, compiled"]
    assert 2 * product / plain == pytest.approx(H200.matmul_tflops["bf16"] * 1e12, rel=0.01)
    fp8 = took["fp8_product", "ours"] + took["fp8_product, backward", "ours"]
    assert 2 * product / fp8 == pytest.approx(H200.matmul_tflops["fp8"] * 1e12, rel=0.01)
    assert H200.copy_gb_s is not None
    assert H200.attention_tflops is not None
    assert 2 * 2 * 8192 * 4096 / took["copy_rows", "ours"] == pytest.approx(H200.copy_gb_s * 1e9, rel=0.01)
    rows = json.loads((RESULTS / "packed_attention-20261116T105805Z.json").read_text())["results"]
    (chosen,) = [row for row in rows if row["attention"] == "rows: as chosen"]
    assert 7 * 4 * 2048**2 * 4096 / chosen["seconds"] == pytest.approx(H200.attention_tflops * 1e12, rel=0.01)


def test_rates_that_nobody_measured_stay_unknown() -> None:
    """`?` of a data sheet is no number, and a data-sheet peak is no achieved rate."""
    for model in TABLE:
        rates = known_rates(model)
        assert (rates.link_gb_s is None) == (not model.nvlink or model.nvlink_gb_s is None)
        if model.name not in ("A100", "H100", "H200", "B200", "MI300X"):
            assert rates.matmul_tflops == {}
            assert rates.attention_tflops is None
    reason = why_no_time(BASE, inputs(BASE, known_rates(by_text("RTX 4090")), None))
    assert reason is not None
    assert "matmul_tflops.fp8" in reason
    assert "--calibrate" in reason
    assert "fp8" not in peak_rates(by_text("A100")).matmul_tflops
    assert rates_of("Some future GPU") is None


def test_each_part_grows_with_what_it_depends_on() -> None:
    base = predict()
    assert base.limited_by == "compute"
    assert predict(accumulation=2).seconds == pytest.approx(2 * base.seconds, rel=0.01)
    longer = predict(seq_len=4096, micro_batch=2)
    assert 1.4 < longer.parts["attention"] / base.parts["attention"] < 2, "twice the keys, fewer starts"
    row, double = (predict(seq_len=seq, micro_batch=1).parts["attention"] for seq in (65_536, 131_072))
    assert double == pytest.approx(4 * row, rel=0.03)
    assert longer.parts["matmul"] == pytest.approx(base.parts["matmul"])
    assert predict(frozen_weights=None).parts["matmul"] == pytest.approx(2 * base.parts["matmul"], rel=0.02)
    full = predict(method="full", frozen_weights=None, fused=False, compile=True)
    assert full.parts["matmul"] == pytest.approx(1.5 * predict(frozen_weights=None).parts["matmul"], rel=0.05)
    assert full.parts["optimizer"] > 100 * base.parts["optimizer"]
    recomputed = predict(activation_checkpointing="full")
    assert 1.3 * base.seconds < recomputed.seconds < 1.5 * base.seconds
    selective = predict(activation_checkpointing="selective")
    assert base.seconds < selective.seconds < recomputed.seconds
    assert predict(fused=False, frozen_weights=None).parts["memory"] > 2 * predict(frozen_weights=None).parts["memory"]


def test_a_small_step_without_a_graph_waits_for_the_host() -> None:
    tiny = predict(micro_batch=1, seq_len=256, cuda_graph=False)
    assert tiny.limited_by == "launch"
    assert tiny.seconds > 2 * predict(micro_batch=1, seq_len=256).seconds


@pytest.mark.parametrize("dimension", ["replicate", "shard", "tensor", "context", "pipeline"])
def test_every_kind_of_parallelism_waits(dimension: str) -> None:
    dims = ParallelDims(**{dimension: 8})
    time = predict(dims=dims, frozen_weights=None, fused=False, accumulation=8)
    assert time.parts["communication"] > 0
    assert (time.parts["bubble"] > 0) == (dimension == "pipeline")
    setting = BASE.model_copy(update={"dims": dims})
    reason = why_no_time(setting, inputs(setting, H200, Links(ranks_per_node=8, link_gb_s=None)))
    assert reason is not None
    assert dimension in reason


def test_groups_across_nodes_share_the_network() -> None:
    links = Links(ranks_per_node=8, link_gb_s=345.0, network_gb_s=400.0)
    dims = ParallelDims(replicate=4, tensor=8)
    assert links.bandwidth(dims, "tensor") == 345e9
    assert links.bandwidth(dims, "replicate") == pytest.approx(400e9 * 0.97 / 8)
    whole = ParallelDims(shard=32)
    assert links.bandwidth(whole, "shard") == 345e9
    slow = Links(ranks_per_node=8, link_gb_s=345.0, network_gb_s=50.0)
    assert slow.bandwidth(whole, "shard") == pytest.approx(50e9 * 0.97)
    assert Links(ranks_per_node=8, link_gb_s=345.0).bandwidth(whole, "shard") is None
    half = ParallelDims(replicate=2, shard=2)
    assert Links(ranks_per_node=4, link_gb_s=100.0).gather_seconds(half, "shard", 2e9) == pytest.approx(0.01, rel=0.01)
    assert links.gather_seconds(half, "tensor", 1e9) == 0.0


def test_nodes_that_plan_for_themselves_see_the_same_memory() -> None:
    """Drivers keep a little memory for themselves, and calibrations lie on single nodes."""
    totals = (85_520_809_984, 85_520_809_984 - 300_000_000)
    names = ("NVIDIA H100 80GB HBM3", "Some GPU")
    for name in names:
        gpus = [
            GPU(index=0, name=name, total_bytes=total, free_bytes=total // 2, compute_capability=(9, 0))
            for total in totals
        ]
        shared = {device_facts([gpu], total_memory=True, calibrated=False).capacity_bytes for gpu in gpus}
        assert len(shared) == 1
        assert device_facts([gpus[0]]).capacity_bytes == totals[0] // 2
        of_torch = device_facts([gpus[0]], memory_fraction=0.25).capacity_bytes
        assert of_torch == totals[0] // 4 + CONTEXT_BYTES, "torch does not count CUDA's own"


def test_a_calibration_of_this_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    path = rates_file("NVIDIA H200")
    path.parent.mkdir(parents=True)
    slow = MachineRates(device="NVIDIA H200", matmul_tflops={"fp8": 697.0}, source="measured here")
    path.write_text(rates_as_json(slow))
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    assert rates.matmul_tflops == {"bf16": 700.0, "fp8": 697.0}
    assert predict(rates=rates).parts["matmul"] == pytest.approx(2 * predict().parts["matmul"])
    assert any("measured here" in source for source in predict(rates=rates).sources)


def test_unfused_layers_are_not_predicted_to_be_launched_faster_than_fused_ones() -> None:
    """Only fused ones were measured. Eight GPUs with short rows once were to shard LoRA's weights for that."""
    short: dict[str, Any] = {"micro_batch": 1, "seq_len": 256, "cuda_graph": False, "frozen_weights": None}
    fused, unfused = predict(**short), predict(**short, fused=False)
    assert fused.limited_by == unfused.limited_by == "launch"
    assert unfused.seconds >= predict(**short | {"frozen_weights": "fp8"}).seconds > fused.seconds
    told = [predict(**short, fused=each).sources for each in (True, False)]
    assert [any("unfused layers was not measured" in source for source in each) for each in told] == [False, True]


def test_a_lower_bound_is_one() -> None:
    """No share of the peaks is taken, no gap counted, and no communication, which work may hide."""
    peaks = MachineRates(
        device="X", matmul_tflops={"bf16": 100.0}, attention_tflops=100.0, copy_gb_s=1e6, source="data sheet"
    )
    dims = ParallelDims(replicate=8)
    for seq_len in (512, 32_768):
        setting = Setting(fused=False, dims=dims, seq_len=seq_len)
        given = inputs(setting, peaks, NODE)
        least, likely = least_seconds(setting, given), predict_time(setting, given)
        assert least is not None
        assert likely is not None
        weights = 32 * 218_103_808 + 128_256 * 4096
        attention = 32 * 7 * seq_len**2 * 4096
        assert least == pytest.approx((4 * seq_len * weights + attention) / 100e12, rel=0.01)
        if seq_len < 2048:
            assert least < likely.seconds


def test_fsdp_shares_weights_with_context_parallel_ranks_and_reduces_in_fp32() -> None:
    """parallel.fsdp: the mesh of shards includes the context dimension; gradients travel in float32 at least."""
    few = Setting(method="full", trained_weights="bf16", micro_batch=1, seq_len=64, dims=ParallelDims(shard=8))
    mixed = few.model_copy(update={"dims": ParallelDims(shard=2, context=4)})
    alone, shared = (predict_time(each, inputs(each, H200, NODE)) for each in (few, mixed))
    assert alone is not None
    assert shared is not None
    assert shared.parts["optimizer"] == pytest.approx(alone.parts["optimizer"])
    parameters = shapes_of_config(LLAMA_8B).parameters
    sent = parameters * (2 * 2 + 4) * 7 / 8 / 345e9
    hidden = 2 * (alone.seconds - alone.parts["communication"])  # by the work of a pass, at most
    assert sent - hidden < alone.parts["communication"] < 1.2 * sent
    assert shared.parts["communication"] > sent - hidden


def test_what_a_predicted_time_leaves_out_is_told() -> None:
    def told(word: str, sizes: dict[str, Any] = LLAMA_8B, **changes: Any) -> bool:
        setting = BASE.model_copy(update={"micro_batch": 1, **changes})
        given = TimeInputs.of(shapes_of_config(sizes), setting, H200)
        time = None if given is None else predict_time(setting, given)
        assert time is not None
        return any(word in source for source in time.sources)

    assert told("packed rows", seq_len=32_768)
    assert not told("packed rows", seq_len=2048)
    assert not told("packed rows", seq_len=32_768, packed=False)
    assert told("DoRA", method="dora", fused=False, frozen_weights=None)
    assert not told("DoRA")
    mistral = known_config("mistralai/Mistral-7B-v0.1")
    assert mistral is not None
    assert told("a window of 4,096", mistral, seq_len=8192)
    assert not told("a window", mistral, seq_len=4096)
    assert not told("a window", {**mistral, "model_type": "qwen3"}, seq_len=8192)
    assert told("a window", {**mistral, "model_type": "qwen3", "use_sliding_window": True}, seq_len=8192)

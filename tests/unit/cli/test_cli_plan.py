"""`pantheraml plan` on clusters that are only described, from one laptop GPU to 64 x 8 H100."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.cli.main import main
from pantheraml.planner import plan_run
from pantheraml.planner.facts import ModelFacts
from pantheraml.planner.known_models import known_config
from pantheraml.planner.model_shapes import shapes_of_config
from pantheraml.specs.plan import GPU, DeviceSpec, Plan
from pantheraml.specs.train import TrainConfig
from tests import toy

LARGE = "64x8xH100-80GB nvlink, 3200Gb"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Plans by the command line; each argument of `settings` is a --set."""

    def run(model: str, gpus: str, *arguments: str, **settings: object) -> Plan:
        given = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
        assert main(["plan", "--model", model, "--gpus", gpus, "--json", *arguments, *given]) == 0
        return Plan.model_validate(json.loads(capsys.readouterr().out))

    return run


def dims(plan: Plan) -> str:
    return str(plan.dims)


def laptop(gibibytes: int) -> DeviceSpec:
    size = gibibytes << 30
    gpu = GPU(index=0, name="Some Laptop GPU", total_bytes=size, free_bytes=size, compute_capability=(8, 9))
    return DeviceSpec(gpus=(gpu,), cpu_count=8, ram_bytes=None, driver=None)


def config(model: str, **train: object) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": model}, "data": {"path": "d"}, "train": train})


def test_cluster_1_a_laptop_gpu_gets_4_bit_weights_only_if_it_must() -> None:
    """8 GiB: a 1B model in bf16 with recomputation, an 8B model in 4 bits."""
    small = plan_run.plan_run(config("Llama-3.2-1B"), laptop(8))
    assert small.frozen_weights is None
    assert small.micro_batch_size < 8
    large = plan_run.plan_run(config("Llama-3.1-8B"), laptop(8))
    assert large.frozen_weights == "nf4"
    assert "of 8.0 GiB" in large.reason("frozen_weights") or "would not fit" in large.reason("frozen_weights")
    for each in (small, large):
        assert each.prediction is not None
        assert each.prediction.memory is not None
        assert each.prediction.memory.allocated_bytes < 8 << 30
        assert each.prediction.step_seconds is None, "nobody measured this GPU"
        assert any("--calibrate" in source for source in each.prediction.sources)


def test_cluster_2_a_consumer_card_recomputes(plan: Any) -> None:
    found = plan("Llama-3.1-8B", "1xRTX4090")
    assert found.activation_checkpointing in ("full", "offload")
    assert found.frozen_weights is None, "bf16 weights fit, so nothing is quantized"
    assert "of 23.5 GiB" in found.reason("train.activation_checkpointing")
    assert found.global_batch_size == 16


def test_cluster_3_one_h200_keeps_the_measured_defaults(plan: Any) -> None:
    """The headline case of docs/performance.md: 4 x 2048 tokens, nothing recomputed, fp8, one CUDA graph."""
    found = plan("Llama-3.1-8B", "1xH200", train__global_batch_size=4)
    assert (found.micro_batch_size, found.activation_checkpointing) == (4, "none")
    assert (found.frozen_weights, found.fused, found.cuda_graph) == ("fp8", True, True)
    assert found.prediction.step_seconds == pytest.approx(8192 / 29148, rel=0.05)
    assert found.prediction.memory.allocated_bytes == pytest.approx(31.92 * 2**30, rel=0.06)
    assert any(each.changes.get("train.activation_checkpointing") == "full" for each in found.alternatives)


def test_cluster_4_a_model_that_fits_is_replicated(plan: Any) -> None:
    for gpus in ("4xL40S", "8xH100-80GB"):
        found = plan("Llama-3.1-8B", gpus)
        assert found.dims.replicate == found.world_size
        assert found.reason("parallel").startswith("DDP")


def test_cluster_5_a_full_fine_tune_is_sharded_within_the_node(plan: Any) -> None:
    found = plan("Llama-3.1-8B", "8xH100-80GB", "--method", "full")
    assert dims(found) == "shard 8"
    assert found.activation_checkpointing == "none"
    assert "replicate 8" in found.reason("parallel")
    assert "of 79.2 GiB" in found.reason("parallel")


def test_cluster_6_a_large_frozen_model_is_sharded(plan: Any) -> None:
    found = plan("Llama-3.1-70B", "8xH100-80GB")
    assert dims(found) == "shard 8"
    assert found.frozen_weights is None
    refused = [each for each in found.alternatives if each.fits is False]
    assert refused
    assert all(each.limited_by == "memory" and "needs" in each.reason for each in refused)
    assert len({each.name.partition(",")[0] for each in refused}) == len(refused), "each another parallelism"


def test_cluster_7_slow_links_and_little_memory_mean_a_pipeline(plan: Any) -> None:
    found = plan("Llama-3.1-70B", "2x4xRTX4090, 100Gb")
    assert dims(found) == "pipeline 8"
    assert found.global_batch_size == 16


@pytest.mark.parametrize(("gpus", "expected"), [("4xRTX4090", "pipeline 4"), ("4xL40S", "shard 4")])
def test_plans_are_compared_by_peaks_where_no_rate_is_known(plan: Any, gpus: str, expected: str) -> None:
    """Over PCIe, a split of every layer would wait for its sums all the time."""
    found = plan("Qwen3-32B", gpus)
    assert dims(found) == expected
    assert found.prediction.step_seconds is None
    assert any("plans are compared by the peaks of the data sheets" in each for each in found.prediction.sources)
    assert any(
        re.match(r"predicted to take|a step would take|about as fast", each.reason) for each in found.alternatives
    )
    assert not any("which is faster is not known" in each.reason for each in found.alternatives)


def test_cluster_8_nodes_replicate_what_a_node_shards(plan: Any) -> None:
    found = plan("Llama-3.1-8B", LARGE, "--method", "full", train__global_batch_size=1024)
    assert dims(found) == "replicate 64 x shard 8"
    large = plan("Llama-3.1-70B", LARGE, "--method", "full", train__global_batch_size=1024)
    assert large.dims.shard > 8
    assert large.activation_checkpointing == "full"
    for each in (found, large):
        assert each.world_size == 512
        assert each.global_batch_size == 1024
        assert each.prediction.time_parts["communication"] >= 0


@pytest.mark.seed("S0-074", "S3-064", "S3-071", "S4-033", "S4-157")
def test_micro_batches_follow_the_memory_that_is_free() -> None:
    given = config("Llama-3.1-8B", activation_checkpointing="none")
    given.model.precision = "bf16"
    sizes = []
    for free in (30, 40, 80):
        gpu = laptop(80).gpus[0].model_copy(update={"free_bytes": free << 30})
        found = plan_run.plan_run(given, laptop(80).model_copy(update={"gpus": (gpu,)}))
        assert found.global_batch_size == 16
        sizes.append(found.micro_batch_size)
    assert sizes == [1, 2, 4]
    with pytest.raises(OutOfMemoryError, match=r"activation_checkpointing=full|at least"):
        plan_run.plan_run(given, laptop(20))


def test_weights_that_do_not_fit_are_seen_where_nothing_else_is_predicted(plan: Any) -> None:
    """A T4 attends in other ways, whose memory is not known."""
    small, large = plan("Qwen2.5-1.5B", "1xT4"), plan("Llama-3.1-8B", "1xT4")
    assert small.prediction.memory is None
    assert (small.frozen_weights, small.activation_checkpointing) == (None, "none")
    assert (large.frozen_weights, large.activation_checkpointing) == ("nf4", "full")
    assert large.reason("frozen_weights") == "the weights alone need 15.0 GiB of 14.9 GiB"
    assert any("weights together take 5.3 GiB as this plan stores them" in each for each in large.prediction.sources)
    assert main(["plan", "--model", "Llama-3.1-70B", "--gpus", "1xT4"]) != 0
    assert main(["plan", "--model", "Llama-3.1-8B", "--gpus", "1xT4", "--method", "full"]) != 0


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Qwen/Qwen3-30B-A3B", ("a mixture of experts", "do not run fused", "all weights together take 56.0 GiB")),
        ("openai/gpt-oss-20b", ("a mixture of experts", "do not run fused", "all weights together take 38.4 GiB")),
        ("google/gemma-3-4b-it", ("a vision part", "all weights together take ")),
        (
            "google/gemma-2-2b",
            ("layers of gemma2 do not run fused (capped attention scores)", "Time     not predicted"),
        ),
    ],
)
def test_what_is_not_predicted_of_a_known_model_is_told(
    model: str, told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", model, "--gpus", "1xH100-80GB"]) == 0
    shown = capsys.readouterr().out
    assert "billion parameters" in shown
    assert "by hidden size" in shown
    assert [part for part in told if part not in shown] == []


def test_no_time_is_shown_of_layers_that_run_other_kernels(plan: Any) -> None:
    """Times are those of fused layers in fp8, replayed as a CUDA graph, which these families have none of."""
    shapes = shapes_of_config(known_config("Llama-3.1-8B") or {})
    gpu = laptop(80).gpus[0].model_copy(update={"name": "NVIDIA H100 80GB HBM3", "compute_capability": (9, 0)})
    devices = laptop(80).model_copy(update={"gpus": (gpu,)})

    def found(family: str, *, fused: Literal["auto", "off"] = "auto") -> Plan:
        given = config("Llama-3.1-8B")
        given.train.fused = fused
        facts = ModelFacts(replace(shapes, decoder=None), family=family)
        return plan_run.plan_run(given, devices, model=facts)

    def seconds(made: Plan) -> float | None:
        assert made.prediction is not None
        return made.prediction.step_seconds

    starcoder = found("starcoder2")
    assert starcoder.fused
    assert seconds(starcoder) is None
    assert starcoder.prediction is not None
    assert any("whether layers of starcoder2 run fused" in each for each in starcoder.prediction.sources)
    assert seconds(found("starcoder2", fused="off")) is not None
    assert seconds(found("gemma2", fused="off")) is None, "scores of its attention are capped"
    assert seconds(found("gpt2")) is None
    assert seconds(found("olmo2")) is not None


def test_experts_stay_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding to 4 bits does not make a mixture of experts fit; its linear layers alone are quantized."""
    assert main(["plan", "--model", "Qwen/Qwen3-30B-A3B", "--gpus", "1xRTX4090"]) == 15
    assert "the weights alone need 55.6 GiB" in capsys.readouterr().err


def test_what_the_user_set_stays(plan: Any) -> None:
    found = plan("Llama-3.1-8B", "1xRTX4090", train__micro_batch_size=1, train__activation_checkpointing="offload")
    assert (found.micro_batch_size, found.activation_checkpointing) == (1, "offload")
    assert found.reason("train.activation_checkpointing") == "as configured"
    assert found.alternatives == ()
    sharded = plan("Llama-3.1-8B", "8xH100-80GB", parallel__tensor=2)
    assert dims(sharded) == "replicate 4 x tensor 2"


@pytest.mark.parametrize(("model", "gpus"), [("Llama-3.1-8B", "1xRTX4090"), ("Llama-3.1-70B", "8xH100-80GB")])
def test_the_settings_of_an_alternative_lead_to_it(model: str, gpus: str, plan: Any) -> None:
    alternatives = [each for each in plan(model, gpus).alternatives if each.fits]
    assert alternatives
    for each in alternatives:
        changes = {name.replace(".", "__"): value for name, value in each.changes.items()}
        found = plan(model, gpus, **changes)
        assert found.prediction.step_seconds == each.step_seconds
        assert found.prediction.memory == each.memory


@pytest.mark.seed("S0-106", "S3-064", "S3-071")
def test_what_cannot_fit_is_refused_with_changes_that_would(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "Llama-3.1-70B", "--method", "full", "--gpus", "1xH200"]
    assert main(arguments) != 0
    error = capsys.readouterr().err
    assert error.startswith("OutOfMemoryError: This run does not fit into the GPU's memory: at least")
    assert "method.kind=qlora" in error
    assert "parallel.shard=" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "Llama-3.1-8B", "--gpus", "8xH300"], "Did you mean H"),
        (["--model", "Llama-3.1-9B", "--gpus", "1xH200"], "llama-3.1-8b"),
        (["--model", "Llama-3.1-8B", "--gpus", "0xH200"], "does not describe a cluster"),
        (["--model", "Llama-3.1-8B", "--gpus", "1xH200", "--price", "-1"], "--price must be more than 0"),
        (["--model", "Llama-3.1-8B", "--gpus", "1xH200", "--price", "inf"], "finite, not inf"),
        (["--model", "Llama-3.1-8B", "--gpus", "1xH200", "--set", "data.seq_len=0"], "data.seq_len"),
        (["--model", "Llama-3.1-8B", "--gpus", LARGE], "too small for 512 processes"),
        (["--gpus", "1xH200"], "Nothing to plan: pass a config file, or --model."),
        (["--model", "Llama-3.1-8B", "--gpus", "2xA100-40GB+1xH100"], "several kinds of GPU"),
        (["--model", "Llama-3.3-70B", "--method", "qlora", "--gpus", "1xT4"], "fix: Use parallel.shard=N"),
    ],
)
def test_bad_input_is_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) not in (0, 1)
    assert told in capsys.readouterr().err


def test_a_model_without_a_config_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tmp_path), "--gpus", "1xH200"]) == 4
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"num_hidden_layers": -1, "vocab_size": -5},
        {"num_attention_heads": 0, "head_dim": None},
        {"hidden_size": "x"},
        {"intermediate_size": None},
        {"num_key_value_heads": [8]},
    ],
)
def test_impossible_sizes_are_told(change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps((known_config("llama-3.2-1b") or {}) | change))
    assert main(["plan", "--model", str(tmp_path), "--gpus", "1xH200"]) == 4
    error = capsys.readouterr().err
    assert "ModelError: The model cannot be planned: its config.json has" in error
    given = TrainConfig.model_validate({"model": {"path": str(tmp_path)}, "data": {"path": "d"}})
    assert plan_run.plan_run(given, laptop(8)).predicted_memory_bytes is None, "the run itself says what is wrong"


def test_an_uneven_global_batch_stays_what_it_is(plan: Any) -> None:
    found = plan("Llama-3.1-8B", "8xH100-80GB", train__global_batch_size=13)
    assert found.global_batch_size == 13
    assert found.micro_batch_size * 8 >= 13


def test_gpus_of_unlike_memory_share_what_fits_the_smallest() -> None:
    sizes = (80 << 30, 24 << 30)
    gpus = tuple(
        GPU(index=i, name="NVIDIA A100-SXM4-80GB", total_bytes=size, free_bytes=size, compute_capability=(8, 0))
        for i, size in enumerate(sizes)
    )
    devices = DeviceSpec(gpus=gpus, cpu_count=8, ram_bytes=None, driver=None)
    found = plan_run.plan_run(config("Llama-3.1-8B"), devices)
    assert found.prediction is not None
    assert found.prediction.memory is not None
    assert found.prediction.memory.capacity_bytes == 24 << 30
    assert any("unlike memory (24.0 GiB to 80.0 GiB)" in warning for warning in found.warnings)


def test_unlike_gpus_are_as_fast_as_the_slowest() -> None:
    def planned(*names: str) -> Plan:
        gpus = tuple(
            GPU(index=i, name=name, total_bytes=80 << 30, free_bytes=80 << 30, compute_capability=capability)
            for i, name in enumerate(names)
            for capability in [(9, 0) if "H100" in name else (8, 0)]
        )
        return plan_run.plan_run(
            config("Llama-3.1-8B"), DeviceSpec(gpus=gpus, cpu_count=8, ram_bytes=None, driver=None)
        )

    fast, slow = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    both, other_way, alike = planned(fast, slow), planned(slow, fast), planned(slow, slow)
    times = [each.prediction.step_seconds for each in (both, other_way, alike) if each.prediction is not None]
    assert times[0] == times[1]
    assert times[0] == pytest.approx(times[2], rel=0.1), "some rates are published ones of either"
    assert any("the GPUs are unlike (NVIDIA H100 80GB HBM3 and NVIDIA A100" in text for text in both.warnings)
    assert alike.warnings == ()
    assert planned(fast, "Some Laptop GPU").prediction.step_seconds is None  # type: ignore[union-attr]


@pytest.mark.seed("S0-113", "S4-145")
def test_time_energy_and_cost_to_the_end(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan("Llama-3.1-8B", "8xH100-80GB", "--price", "2.5", train__max_steps=1000)
    prediction = found.prediction
    assert prediction.total_seconds == pytest.approx(1000 * prediction.step_seconds)
    assert found.predicted_seconds == prediction.total_seconds
    assert prediction.dollars == pytest.approx(8 * 2.5 * prediction.total_seconds / 3600)
    assert prediction.energy_kwh == pytest.approx(8 * 0.7 * prediction.total_seconds / 3600)
    assert sum(prediction.time_parts.values()) == pytest.approx(prediction.step_seconds)
    assert sum(prediction.memory.parts.values()) == prediction.memory.allocated_bytes
    assert plan("Llama-3.1-8B", "8xH100-80GB", train__max_steps=1000).prediction.dollars is None, "no price is invented"
    shown = ["plan", "--model", "Llama-3.1-8B", "--gpus", "8xH100-80GB", "--price", "2.5", "--explain"]
    assert main([*shown, "--set", "train.max_steps=1000"]) == 0
    text = capsys.readouterr().out
    for word in ("Memory", "activations", "Time", "1,000 steps", "Energy", "Cost", "Not chosen:", "Note: rates"):
        assert word in text


def test_described_hardware_is_not_said_to_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> dict[str, str]:
        assert main(["plan", "--model", "Llama-3.1-8B", "--set", "train.global_batch_size=1024", *words]) == 0
        return {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}

    lines = shown("--gpus", LARGE)
    assert lines["device"].endswith(f"described: {LARGE}")
    assert lines["parallel.world_size"].endswith("512           64 nodes of 8 GPU(s)")
    assert "threads_per_process" not in lines, "nobody told how many cores there are"
    assert shown("--gpus", "8xH100, 64 cores")["threads_per_process"].endswith("64 cores for 8 process(es)")
    asked = shown("--gpus", LARGE, "--set", "parallel.world_size=256", "--device", "cuda")
    assert asked["parallel.world_size"].endswith("as configured")
    assert asked["device"].endswith("as configured")


IMPORTED = """
import sys
from pantheraml.cli.main import main
assert main(["plan", "--model", sys.argv[1], "--gpus", "8xH100"]) == 0
print(sorted({"torch", "transformers", "huggingface_hub", "numpy"} & sys.modules.keys()))
"""


def test_planning_imports_nothing_heavy(tmp_path: Path) -> None:
    """The command takes longer to import than to plan; the hub's client alone was half of that."""
    (tmp_path / "config.json").write_text(json.dumps(known_config("llama-3.2-1b")))
    (tmp_path / "tokenizer.json").write_text("{}")
    command = [sys.executable, "-c", IMPORTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_planning_is_fast(plan: Any) -> None:
    """One machine in 0.3 s, and 4,096 GPUs in 2 s, of a core: other processes do not count."""
    plan("Llama-3.1-8B", "1xH200")  # imports
    for gpus, batch, limit in (("8xH100-80GB", 16, 0.3), ("512x8xH100-80GB nvlink, 3200Gb", 4096, 2.0)):
        took = []
        for _ in range(3):
            start = time.process_time()
            plan("Llama-3.1-70B", gpus, train__global_batch_size=batch)
            took.append(time.process_time() - start)
        assert min(took) < limit


def test_weights_in_4_bits_that_nobody_asked_for_are_not_said_to_be_configured(plan: Any) -> None:
    reasons = {choice.name: choice.reason for choice in plan("Llama-3.1-8B", "1xT4").choices}
    assert reasons["model.precision"] == reasons["frozen_weights"] == "the weights alone need 15.0 GiB of 14.9 GiB"


@pytest.mark.parametrize(
    ("model", "gpus", "arguments"),
    [
        ("Llama-3.1-8B", "1xRTX4090", ["--method", "full"]),
        ("Llama-3.1-8B", "1xRTX4090", ["--set", "data.seq_len=131072"]),
        ("Qwen3-4B", "2xRTX4090", ["--method", "full"]),
    ],
)
def test_what_is_said_to_fit_fits(
    model: str, gpus: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each change of an error, made; one names more GPUs, and no two of them do."""
    assert main(["plan", "--model", model, "--gpus", gpus, *arguments]) == 15
    listed = capsys.readouterr().err.partition("These would fit: ")[2].strip().removesuffix(".").split("; ")
    assert sum("such GPUs" in each for each in listed) <= 1 <= len(listed)
    for each in listed:
        more = re.search(r"on (\d+) such GPUs", each)
        hardware = gpus if more is None else f"{more[1]}x{gpus.partition('x')[2]}"
        changes = [word for key in re.findall(r"\w+\.\w+=\w+", each) for word in ("--set", key)]
        assert main(["plan", "--model", model, "--gpus", hardware, *arguments, *changes]) == 0, each


def test_a_close_call_says_what_would_fit(plan: Any) -> None:
    made = plan("Llama-3.1-8B", "1xRTX4090", "--method", "qlora", parallel__memory_fraction=0.28)
    (warning,) = [each for each in made.warnings if "memory is short" in each]
    assert "these would fit: parallel.shard=" in warning


@pytest.mark.parametrize(
    ("words", "seq_len", "told"),
    [
        (100, 512, "the data has a row of some 201 tokens, which would end the run at once"),
        (None, 512, "a longer document would end the run at once"),
        (50, 512, None),
        (100, 128, None),
    ],
)
def test_documents_that_are_longer_than_the_model(
    plan: Any, tmp_path: Path, words: int | None, seq_len: int, told: str | None
) -> None:
    model = toy.write_llama(tmp_path / "model", max_position_embeddings=128)
    data = [] if words is None else ["--data", str(toy.write_jsonl(tmp_path / "d.jsonl", [{"text": "1 " * words}]))]
    warnings = plan(str(model), "1xH200", *data, data__seq_len=seq_len).warnings
    found = [each for each in warnings if "positions" in each]
    assert found == ([] if told is None else [f"data.seq_len=512 is above the model's 128 positions: {told}"])


@pytest.mark.parametrize("positions", ["many", -1, None, [128], True, 1e400])
def test_positions_that_are_no_number_are_not_known(plan: Any, tmp_path: Path, positions: object) -> None:
    model = toy.write_llama(tmp_path / "model")
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "max_position_embeddings": positions}))
    warnings = plan(str(model), "1xH200", data__seq_len=512).warnings
    assert not any("positions" in each for each in warnings)

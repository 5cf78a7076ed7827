from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.planner.choose import choose
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.train import TrainConfig


def machine(gpus: int = 0, capability: tuple[int, int] | None = (9, 0), cores: int = 8) -> DeviceSpec:
    found = [
        GPU(index=i, name="Test GPU", total_bytes=80 << 30, free_bytes=79 << 30, compute_capability=capability)
        for i in range(gpus)
    ]
    return DeviceSpec(
        gpus=tuple(found), cpu_count=cores, ram_bytes=1 << 36, driver=None, note="no driver" if not gpus else None
    )


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


@pytest.mark.seed("S2-001", "S4-116")
def test_without_gpus_one_process_uses_all_cores() -> None:
    plan = choose(config(), machine())
    assert (plan.device, plan.world_size, plan.backend, plan.precision) == ("cpu", 1, "gloo", "fp32")
    assert plan.threads_per_process == 8
    assert plan.reason("device") == "no driver"


@pytest.mark.seed(
    *("S0-033", "S0-068", "S1-006", "S2-001", "S2-006", "S3-052", "S3-066", "S4-002", "S4-035", "S4-106", "C3"),
    *("S1-017", "S4-115"),
)
def test_one_process_per_gpu() -> None:
    plan = choose(config(), machine(gpus=4))
    assert (plan.device, plan.world_size, plan.backend, plan.precision) == ("cuda", 4, "nccl", "bf16")
    assert plan.device_ids == (0, 1, 2, 3)


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "fp16"), ((8, 0), "bf16"), (None, "fp32")])
def test_precision_follows_the_hardware(capability: tuple[int, int] | None, precision: str) -> None:
    assert choose(config(), machine(gpus=1, capability=capability)).precision == precision


def test_oversubscribed_cpu_cores_give_a_warning() -> None:
    """Three or four ranks on a laptop are a common way to try a configuration."""
    plan = choose(config(parallel={"world_size": 4}), machine(cores=2))
    assert (plan.world_size, plan.threads_per_process) == (4, 1)
    (reason,) = [choice.reason for choice in plan.choices if choice.name == "threads_per_process"]
    assert reason == "2 cores for 4 process(es), oversubscribed"
    (warning,) = plan.warnings
    assert "4 processes share 2 CPU core(s)" in warning
    four = config(parallel={"world_size": 4})
    assert choose(four, machine(cores=4)).warnings == ()
    assert choose(four, machine(cores=2), ProcessRank(0, 0, 4, 2)).warnings == (), "the others are on another node"
    assert choose(config(parallel={"world_size": 2}), machine(gpus=2, cores=1)).warnings == ()


@pytest.mark.seed("S0-006")
def test_every_automatic_choice_has_a_reason() -> None:
    for devices in (machine(), machine(gpus=2)):
        for choice in choose(config(), devices).choices:
            assert choice.reason
            assert choice.automatic == (choice.reason != "as configured")


@pytest.mark.seed("S0-074")
def test_micro_batches_fill_the_share_evenly() -> None:
    plan = choose(config(data={"path": "d", "seq_len": 2048}, train={"global_batch_size": 36}), machine(gpus=2))
    assert plan.micro_batch_size == 6  # 18 each, at most 8 per micro-batch: 3 of 6
    plan = choose(config(train={"global_batch_size": 2, "micro_batch_size": 1}), machine())
    assert plan.micro_batch_size == 1


@pytest.mark.seed("S1-015", "S4-107")
def test_device_ids_choose_and_order_gpus() -> None:
    plan = choose(config(parallel={"device_ids": [3, 1]}), machine(gpus=4))
    assert plan.device_ids == (3, 1)
    assert plan.world_size == 2
    for wrong in ([4], [1, 1], []):
        with pytest.raises(DeviceError, match="device_ids"):
            choose(config(parallel={"device_ids": wrong}), machine(gpus=4))


def test_a_small_batch_leaves_gpus_idle_rather_than_failing() -> None:
    plan = choose(config(train={"global_batch_size": 2}), machine(gpus=4))
    assert plan.world_size == 2
    assert "keeps only 2 busy" in plan.reason("parallel.world_size")


@pytest.mark.parametrize(
    ("sections", "gpus", "error", "message"),
    [
        ({"device": "cuda"}, 0, DeviceError, "no usable GPU"),
        ({"parallel": {"world_size": 5}}, 4, DeviceError, "there are 4 GPU"),
        ({"parallel": {"world_size": 33}}, 0, DeviceError, "there are 8 CPU core"),
        ({"parallel": {"world_size": 2, "mode": "none"}}, 4, ConfigError, "mode=none"),
        (
            {"parallel": {"world_size": 4}, "train": {"global_batch_size": 2}},
            4,
            ConfigError,
            "too small for 4 processes",
        ),
        ({"train": {"global_batch_size": 8, "micro_batch_size": 5}}, 2, ConfigError, "micro_batch_size=5"),
        ({"model": {"path": "m", "precision": "fp16"}}, 0, DeviceError, "fp16 needs a GPU"),
        ({"parallel": {"mode": "distributed"}}, 0, ConfigError, "needs a number of processes"),
        ({"parallel": {"mode": "distributed"}}, 1, DeviceError, "at least two processes"),
        ({"parallel": {"device_ids": [0]}, "device": "cpu"}, 1, ConfigError, "device_ids names GPUs"),
    ],
)
def test_impossible_settings_are_refused(sections: Any, gpus: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose(config(**sections), machine(gpus=gpus))


@pytest.mark.seed("S0-086", "S1-017", "S4-130")
def test_backend_and_mode_are_honored() -> None:
    assert choose(config(parallel={"backend": "gloo"}), machine(gpus=2)).backend == "gloo"
    assert choose(config(parallel={"mode": "none"}), machine(gpus=2)).world_size == 1
    assert choose(config(parallel={"mode": "distributed"}), machine(gpus=2)).world_size == 2


def test_frozen_weights_follow_method_and_precision() -> None:
    fp8 = config(model={"path": "m", "precision": "fp8"})
    assert choose(config(method={"kind": "qlora"}), machine(gpus=1)).frozen_weights == "nf4"
    assert (choose(fp8, machine(gpus=1)).frozen_weights, choose(fp8, machine(gpus=1)).precision) == ("fp8", "bf16")
    assert choose(fp8, machine()).frozen_weights == "fp8", "the reference implementation runs anywhere"
    with pytest.raises(DeviceError, match="compute capability"):
        choose(fp8, machine(gpus=1, capability=(8, 0)))


def test_fp8_in_a_full_fine_tune_means_fp8_matmuls() -> None:
    full = config(model={"path": "m", "precision": "fp8"}, method={"kind": "full"})
    plan = choose(full, machine(gpus=1))
    assert (plan.fp8_matmuls, plan.frozen_weights, plan.precision, plan.compile) == (True, None, "bf16", True)
    assert "forward and input gradients" in plan.reason("fp8_matmuls")
    assert not choose(config(method={"kind": "full"}), machine(gpus=1)).fp8_matmuls, "it must be requested"
    with pytest.raises(DeviceError, match="compute capability"):
        choose(full, machine(gpus=1, capability=(8, 0)))


@pytest.mark.parametrize(
    ("sections", "gpus", "capability", "expected", "reason"),
    [
        ({}, 1, (9, 0), "fp8", "fp8 tensor cores"),
        ({"parallel": {"mode": "distributed"}}, 2, (9, 0), "fp8", "fp8 tensor cores"),
        ({}, 1, (8, 0), None, "compute capability 9.0"),
        ({"method": {"kind": "dora"}}, 1, (9, 0), None, "only with fused layers"),
        ({"method": {"dropout": 0.1}}, 1, (9, 0), None, "only with fused layers"),
        ({"train": {"fused": "off"}}, 1, (9, 0), None, "only with fused layers"),
        ({"parallel": {"mode": "distributed", "shard": 2}}, 2, (9, 0), None, "the model is sharded"),
        ({"model": {"path": "m", "precision": "bf16"}}, 1, (9, 0), None, None),
        ({"method": {"kind": "full"}}, 1, (9, 0), None, None),
        ({}, 0, (9, 0), None, None),
    ],
)
def test_precision_auto_chooses_fp8_where_it_was_measured(
    sections: dict[str, Any], gpus: int, capability: tuple[int, int], expected: str | None, reason: str | None
) -> None:
    plan = choose(config(**sections), machine(gpus=gpus, capability=capability))
    assert plan.frozen_weights == expected
    reasons = [choice.reason for choice in plan.choices if choice.name == "frozen_weights"]
    assert (reason is None and not reasons) or (reason is not None and reason in reasons[0])


@pytest.mark.parametrize("quantized", ["int8", "nf4"])
def test_compute_precision_of_int8_and_nf4_follows_the_hardware(quantized: str) -> None:
    requested = config(model={"path": "m", "precision": quantized})
    for devices, compute in (
        (machine(), "fp32"),
        (machine(gpus=1, capability=(7, 5)), "fp16"),
        (machine(gpus=1, capability=(8, 0)), "bf16"),
    ):
        plan = choose(requested, devices)
        assert (plan.frozen_weights, plan.precision) == (quantized, compute)
        assert plan.reason("frozen_weights") == f"model.precision is {quantized}"
        assert plan.reason("model.precision") == "as configured"
        assert "as configured" not in plan.reason("compute_precision")


@pytest.mark.parametrize(
    ("precision", "kind", "allowed"),
    [
        ("nf4", "lora", True),
        ("nf4", "qlora", True),
        ("nf4", "full", False),
        ("nf4", "dora", False),
        ("int8", "lora", True),
        ("int8", "qlora", False),
        ("int8", "full", False),
        ("fp8", "qlora", False),
    ],
)
def test_quantized_weights_need_lora(precision: str, kind: str, allowed: bool) -> None:
    sections = {"model": {"path": "m", "precision": precision}, "method": {"kind": kind}}
    if allowed:
        assert choose(config(**sections), machine(gpus=1)).frozen_weights == precision
        return
    with pytest.raises(ValueError, match=f"model.precision={precision} quantizes LoRA's frozen weights to {precision}"):
        config(**sections)


@pytest.mark.parametrize("sections", [{"method": {"kind": "qlora"}}, {"model": {"path": "m", "precision": "nf4"}}])
def test_nf4_is_fused_on_gpus_with_fp8_matmuls(sections: Any) -> None:
    plan = choose(config(**sections), machine(gpus=2))
    assert (plan.frozen_weights, plan.fused, plan.compile) == ("nf4", True, False)
    assert "read nf4 weights directly" in plan.reason("train.fused")
    for capability, reason in (((8, 9), "compute capability 9.0"), ((7, 5), "fp16"), (None, "fp32")):
        older = machine(gpus=1, capability=capability)
        assert not choose(config(**sections), older).fused
        assert reason in choose(config(**sections), older).reason("train.fused")
        assert not choose(config(**sections, train={"fused": "off"}), older).fused
        with pytest.raises(DeviceError, match=r"train\.fused=on"):
            choose(config(**sections, train={"fused": "on"}), older)
    assert not choose(config(**sections), machine()).fused
    assert choose(config(**sections, train={"fused": "on"}), machine()).fused, (
        "the reference implementations run anywhere"
    )


def test_fused_layers_need_fp8_support_only_for_nf4() -> None:
    assert choose(config(), machine(gpus=1, capability=(8, 0))).fused
    assert "read nf4 weights directly" not in choose(config(), machine(gpus=1)).reason("train.fused")
    exact = config(model={"path": "m", "precision": "fp32"}, method={"kind": "qlora"})
    assert not choose(exact, machine(gpus=1)).fused
    assert "compute precision is fp32" in choose(exact, machine(gpus=1)).reason("train.fused")
    assert not choose(config(model={"path": "m", "precision": "fp32"}), machine(gpus=1)).fused
    assert not choose(config(method={"dropout": 0.1}), machine(gpus=1)).fused
    assert not choose(config(method={"kind": "dora"}), machine(gpus=1)).fused


def test_full_fine_tunes_are_fused_where_that_is_faster() -> None:
    def full(precision: str = "fp8", **train: str) -> TrainConfig:
        model = {"path": "m", "precision": precision}
        return config(model=model, method={"kind": "full"}, train={"weights": "bf16", **train})

    plan = choose(full(), machine(gpus=1))
    assert (plan.fp8_matmuls, plan.fused, plan.cuda_graph) == (True, True, True)
    assert "layers with the same input share one matmul" in plan.reason("train.fused")
    assert choose(full(), machine(gpus=2)).fused
    plain = choose(full("bf16"), machine(gpus=1))
    assert (plain.fused, plain.compile) == (False, True)
    assert "compiled layers were faster" in plain.reason("train.fused")
    assert choose(full("bf16", fused="on"), machine(gpus=1, capability=(8, 0))).fused
    lean = choose(full("bf16", activation_checkpointing="offload"), machine(gpus=1))
    assert (lean.fused, lean.compile, lean.cuda_graph) == (True, False, False), "recomputed layers are not compiled"
    assert "gradients reuse the memory of activations" in lean.reason("train.fused")
    assert not choose(full("bf16", activation_checkpointing="offload", weights="fp32"), machine(gpus=1)).fused
    compiled = choose(full("bf16", activation_checkpointing="offload", compile="on"), machine(gpus=1))
    assert (compiled.fused, compiled.compile) == (False, True)
    recomputed = choose(full("bf16", activation_checkpointing="full"), machine(gpus=1))
    assert (recomputed.fused, recomputed.compile) == (False, False)
    assert "not measured for bf16 matmuls with activation_checkpointing=full" in recomputed.reason("train.fused")
    wide = choose(full(weights="fp32"), machine(gpus=1))
    assert not wide.fused
    assert "train.weights is fp32" in wide.reason("train.fused")
    with pytest.raises(DeviceError, match=r"train\.fused=on is not possible here.*train\.weights is fp32"):
        choose(full(weights="fp32", fused="on"), machine(gpus=1))
    assert not choose(full(), machine()).fused
    assert choose(full(weights="fp32", fused="on"), machine()).fused, "the reference implementations run anywhere"


def test_cuda_graph_needs_fixed_shapes_and_one_gpu() -> None:
    plan = choose(config(), machine(gpus=1))
    assert plan.cuda_graph
    assert "one shape" in plan.reason("train.cuda_graph")
    assert not choose(config(), machine(gpus=2)).cuda_graph
    assert not choose(config(), machine()).cuda_graph
    assert not choose(config(data={"path": "d", "packing": False}), machine(gpus=1)).cuda_graph
    assert choose(config(method={"kind": "full"}), machine(gpus=1)).cuda_graph
    dora = choose(config(method={"kind": "dora"}), machine(gpus=1))
    assert not dora.cuda_graph
    assert "fused or compiled" in dora.reason("train.cuda_graph")
    assert choose(config(method={"kind": "dora"}, train={"cuda_graph": "on"}), machine(gpus=1)).cuda_graph
    assert not choose(config(train={"activation_checkpointing": "offload"}), machine(gpus=1)).cuda_graph
    for impossible in ({"activation_checkpointing": "offload"}, {}):
        with pytest.raises(ConfigError, match=r"train\.cuda_graph=on is not possible"):
            choose(config(train={"cuda_graph": "on", **impossible}), machine(gpus=1 if impossible else 2))


def test_switches_accept_booleans() -> None:
    assert not choose(config(train={"fused": False}), machine(gpus=1)).fused
    assert choose(config(train={"fused": True}), machine()).fused


def test_compile_is_chosen_where_it_was_measured() -> None:
    unfused = {"fused": "off"}
    assert choose(config(train=unfused), machine(gpus=1)).compile
    fused = choose(config(), machine(gpus=1))
    assert (fused.fused, fused.compile) == (True, True)
    assert "fused layers are not compiled" in fused.reason("train.compile")
    assert not choose(config(train=unfused), machine()).compile
    assert not choose(config(train=unfused), machine(gpus=2)).compile
    assert choose(config(method={"kind": "full"}), machine(gpus=1)).compile
    assert not choose(config(method={"kind": "dora"}), machine(gpus=1)).compile
    assert not choose(config(train={**unfused, "activation_checkpointing": "full"}), machine(gpus=1)).compile
    assert not choose(config(train=unfused, data={"path": "d", "packing": False}), machine(gpus=1)).compile
    assert choose(config(train={"compile": "on"}), machine()).compile
    assert not choose(config(train={"compile": "off"}), machine(gpus=1)).compile


def test_bf16_weights_need_bf16_compute() -> None:
    full = {"method": {"kind": "full"}}
    lean = config(**full, train={"weights": "bf16"})
    assert choose(lean, machine()).precision == "bf16"
    assert choose(lean, machine()).reason("model.precision") == "train.weights is bf16"
    assert choose(lean, machine(gpus=1)).reason("train.weights") == "as configured"
    assert choose(config(**full), machine()).precision == "fp32"
    with pytest.raises(DeviceError, match="compute in fp16"):
        choose(lean, machine(gpus=1, capability=(7, 5)))


@pytest.mark.parametrize("mode", ["none", "selective", "full", "offload"])
def test_checkpointing_is_planned_as_configured(mode: str) -> None:
    plan = choose(config(train={"activation_checkpointing": mode}), machine(gpus=1))
    assert plan.activation_checkpointing == mode
    assert plan.reason("train.activation_checkpointing") == "as configured"


@pytest.mark.seed("C3", "S1-109", "S1-110")
@pytest.mark.parametrize(
    ("gpus", "mode", "processes"), [(0, "none", 1), (1, "none", 1), (2, "dataparallel", 1), (4, "dataparallel", 1),
                                    (5, "distributed", 5)]
)  # fmt: skip
def test_auto_policy_simple(gpus: int, mode: str, processes: int) -> None:
    plan = choose(config(parallel={"auto_policy": "simple"}, train={"global_batch_size": 8}), machine(gpus=gpus))
    chosen = next(choice for choice in plan.choices if choice.name == "parallel.mode")
    assert (chosen.value, plan.world_size, plan.copies) == (mode, processes, mode == "dataparallel")
    assert chosen.reason == f"auto_policy=simple with {gpus} GPU(s)"
    assert choose(config(train={"global_batch_size": 8}), machine(gpus=4)).world_size == 4


def test_ranks_on_other_nodes_need_no_local_gpu() -> None:
    run = config(parallel={"world_size": 4})
    with pytest.raises(DeviceError, match=r"4 processes were requested, but there are 2 GPU\(s\)"):
        choose(run, machine(gpus=2))
    plan = choose(run, machine(gpus=2), ProcessRank(rank=3, local_rank=1, world_size=4, local_world_size=2))
    assert (plan.world_size, plan.dims.replicate, plan.device_ids) == (4, 4, (0, 1))
    assert plan.threads_per_process == 4
    with pytest.raises(DeviceError, match="3 processes were requested"):
        choose(run, machine(gpus=2), ProcessRank(rank=3, local_rank=1, world_size=4, local_world_size=3))


def test_rank_needs_its_own_gpu_if_local_world_size_is_unknown() -> None:
    run = config(parallel={"world_size": 4})
    assert choose(run, machine(gpus=2), ProcessRank(rank=3, local_rank=1, world_size=4)).device_ids == (0, 1)
    with pytest.raises(DeviceError, match="3 processes were requested"):
        choose(run, machine(gpus=2), ProcessRank(rank=2, local_rank=2, world_size=4))

"""A plan's setting: what memory and time of a step depend on."""

from __future__ import annotations

from pantheraml.planner.choose import choose
from pantheraml.planner.setting import Setting, setting_of
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.train import TrainConfig

H200 = GPU(index=0, name="NVIDIA H200", total_bytes=None, free_bytes=None, compute_capability=(9, 0))


def devices(count: int) -> DeviceSpec:
    gpus = tuple(H200.model_copy(update={"index": index}) for index in range(count))
    return DeviceSpec(gpus=gpus, cpu_count=16, ram_bytes=None, driver="580")


def test_a_plan_gives_its_setting() -> None:
    config = TrainConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"path": "data.jsonl", "seq_len": 4096},
            "method": {"kind": "qlora", "rank": 8, "target_modules": ["q_proj", "v_proj"]},
            "train": {"global_batch_size": 20, "micro_batch_size": 2, "activation_checkpointing": "offload"},
        }
    )
    plan = choose(config, devices(4))
    assert setting_of(config, plan) == Setting(
        method="lora",
        lora_rank=8,
        lora_targets=("q_proj", "v_proj"),
        frozen_weights="nf4",
        fused=True,
        activation_checkpointing="offload",
        dims=plan.dims,
        micro_batch=2,
        accumulation=3,
        seq_len=4096,
    )


def test_tokens_are_those_of_one_forward_pass_of_a_process() -> None:
    setting = Setting(micro_batch=3, seq_len=1001)
    assert setting.tokens == 3003
    split = setting.dims.model_copy(update={"context": 2})
    assert setting.model_copy(update={"dims": split}).tokens == 3 * 501

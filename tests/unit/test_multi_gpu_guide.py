"""docs/Multi-GPU-Guide.md: its blocks run, its messages are those of the product, and it has every name people know."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pantheraml
from pantheraml import multigpu
from pantheraml.base import env
from pantheraml.base.errors import PantheraError
from pantheraml.cli.main import parse
from pantheraml.hooks import multi_gpu, trainer_checks, trainer_settings
from pantheraml.hooks import peft as peft_hooks
from pantheraml.hooks import trl as trl_hooks
from pantheraml.hooks.trainer_memory import explain_memory
from pantheraml.launch.local import killed_message
from pantheraml.launch.script import relaunch
from pantheraml.multi_gpu_config import ConfigManager
from pantheraml.parallel import consistency, device_map
from pantheraml.planner.out_of_memory import MemoryUse, Shortage, memory_error
from pantheraml.rendezvous.join_store import join_store
from pantheraml.runs import errors
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.stability import create_training_wrapper
from tests import toy
from tests.harness import make_plan
from tests.ports import reserved_port

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/Multi-GPU-Guide.md"
GIB = 1 << 30
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.50 GiB is free."
)
NO_DRIVER = "no NVIDIA driver: NVML Shared Library Not Found"


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    multi_gpu.revert()
    trl_hooks.revert()
    peft_hooks.revert()
    os.environ.clear()
    os.environ.update(before)


class Host:
    """What a provocation may use: a host with GPUs that are not there, the environment, a folder, the log."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = patch, folder

    def with_gpus(self, count: int) -> None:
        gpu = {"name": "NVIDIA H200", "total_bytes": 140 * GIB, "free_bytes": 139 * GIB, "compute_capability": (9, 0)}
        gpus = tuple(GPU(index=index, **gpu) for index in range(count))  # type: ignore[arg-type]
        note = None if gpus else NO_DRIVER
        spec = DeviceSpec(gpus=gpus, cpu_count=16, ram_bytes=GIB, driver="580.1" if gpus else None, note=note)
        self.patch.setattr(multigpu, "probe", lambda: spec)

    def as_rank(self, world_size: int) -> None:
        values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        for name, value in values.items():
            self.patch.setenv(name, str(value))


def no_gpu(host: Host) -> None:
    host.with_gpus(0)
    pantheraml.enable_multi_gpu()


def no_relaunch(host: Host) -> None:
    host.with_gpus(4)
    host.patch.setenv("PANTHERAML_RELAUNCH", "0")
    pantheraml.enable_multi_gpu()


def falls_back(host: Host) -> None:
    host.with_gpus(1)
    reason = "rank 2 cannot use its device: CUDA error: uncorrectable ECC error encountered"
    host.patch.setenv("PANTHERAML_FALLBACK", f"4:{reason}")
    pantheraml.enable_multi_gpu()


def relaunches(host: Host) -> None:
    host.with_gpus(4)
    host.patch.setattr(multigpu, "relaunch", lambda processes: None)
    pantheraml.enable_multi_gpu()


def enabled(host: Host) -> None:
    host.as_rank(4)
    pantheraml.enable_multi_gpu(num_gpus=4, batch_size_per_gpu=8, gradient_aggregation="mean")


def on_one_gpu(host: Host) -> None:
    host.patch.setattr(trainer_checks, "fast_model", lambda model: model)
    trainer = SimpleNamespace(args=SimpleNamespace(n_gpu=4, _n_gpu=4, train_batch_size=8), model=object())
    trainer_checks._on_one_gpu(lambda self: None)(trainer)


def too_many(host: Host) -> None:
    host.with_gpus(2)
    pantheraml.enable_multi_gpu(num_gpus=4)


def other_number_launched(host: Host) -> None:
    host.as_rank(2)
    pantheraml.enable_multi_gpu(num_gpus=4)


def half_a_launcher(host: Host) -> None:
    host.patch.setenv("RANK", "0")
    pantheraml.enable_multi_gpu()


def in_a_notebook(host: Host) -> None:
    host.patch.setattr(sys, "ps1", ">>> ", raising=False)
    relaunch(4)


def too_late(host: Host) -> None:
    host.patch.setattr(torch.distributed, "is_initialized", lambda: True)
    pantheraml.enable_multi_gpu()


def a_rank_is_missing(host: Host) -> None:
    with reserved_port() as port:
        address = env.StoreAddress("127.0.0.1", port, hosted_by_agent=False, attempt=0)
        join_store(env.ProcessRank(0, 0, 2), address, timeout_seconds=1, max_retries=0)


def a_rank_hangs(host: Host) -> None:
    run = RunDir(host.folder / "runs/first")
    run.stacks.mkdir(parents=True)
    loop = '  File "/x/pantheraml/engine/loop.py", line 2 in _step\n'
    for rank, frame in enumerate(("torch/distributed/distributed_c10d.py", "pantheraml/data/dataset.py")):
        function = ("all_gather", "sequence")[rank]
        text = f'Thread 0x1 (most recent call first):\n  File "/x/{frame}", line 40 in {function}\n{loop}'
        (run.stacks / f"rank-{rank}.txt").write_text(text)
    raise errors.hang(run)


def a_rank_is_killed(host: Host) -> None:
    import signal

    logging.getLogger("pantheraml").error(killed_message("Rank 1", signal.SIGKILL))


def trainer_out_of_memory(host: Host) -> None:
    args = SimpleNamespace(
        device=torch.device("cuda"), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_length=2048,
        gradient_checkpointing=False, optim="adamw_torch_fused", eval_strategy="no",
    )  # fmt: skip
    with explain_memory(args):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def run_out_of_memory(host: Host) -> None:
    config = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})
    use = MemoryUse(
        frozen_weights=15 * GIB, trained_weights=GIB // 8, gradients=GIB // 8,
        optimizer_states=GIB // 4, activations=60 * GIB, trainable_params=2**25,
    )  # fmt: skip
    plan = make_plan(config, device="cuda", precision="bf16", micro=8)
    raise memory_error(Shortage(2 * GIB, GIB, 80 * GIB, (8, 0)), use, config, plan)


def planned_out_of_memory(host: Host) -> None:
    host.with_gpus(0)
    ConfigManager().get_optimal_config(model_size="70B", available_memory="24GB", load_in_4bit=False)


def split_out_of_memory(host: Host) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False, dtype=torch.bfloat16) for _ in range(16)))
    device_map.place(model, "auto", {0: 3 * GIB, 1: 3 * GIB})


def map_names_other_gpus(host: Host) -> None:
    device_map.place_in_group({"model.layers.0": 0, "model.layers.1": 1}, 1)


def frozen(host: Host) -> None:
    host.patch.setattr(trainer_checks, "fast_model", lambda model: model)
    trainer = SimpleNamespace(model=nn.Linear(1, 1).requires_grad_(False))
    trainer_checks._if_trainable(lambda self: None)(trainer)


def not_a_number(host: Host) -> None:
    model = nn.Linear(2, 1)
    wrapper = create_training_wrapper()
    wrapper(model, model(torch.full((1, 2), torch.nan)).sum(), torch.optim.SGD(model.parameters(), lr=0.1))


def ranks_drift(host: Host) -> None:
    raise consistency._drift([(1, 5), (1, 5), (1, 6), (1, 5)], ["the weight a", "the weight lora_A"], range(4), 100)


def rows_repeat(host: Host) -> None:
    args = SimpleNamespace(train_batch_size=8, world_size=4, dataloader_drop_last=False)
    trainer_settings.say_if_rows_repeat(args, [0] * 1000)  # type: ignore[arg-type]


Provocation = Callable[[Host], None]
PROVOCATIONS: tuple[Provocation, ...] = (
    no_gpu, no_relaunch, falls_back, relaunches, enabled, on_one_gpu, too_many, other_number_launched, half_a_launcher,
    in_a_notebook, too_late, a_rank_is_missing, a_rank_hangs, a_rank_is_killed, trainer_out_of_memory,
    run_out_of_memory, planned_out_of_memory, split_out_of_memory, map_names_other_gpus, frozen, not_a_number,
    ranks_drift, rows_repeat,
)  # fmt: skip


def said(provoke: Provocation, host: Host, log: pytest.LogCaptureFixture) -> str:
    """The message as a terminal shows it: a line of the log, or an error by its class."""
    log.set_level(logging.INFO, logger="pantheraml")
    host.patch.setattr(logging.getLogger("pantheraml"), "propagate", True)
    try:
        provoke(host)
    except PantheraError as err:
        return f"{type(err).__name__}: {err}".replace(f"{host.folder}/", "")
    (record,) = [record for record in log.records if record.name.startswith("pantheraml")]
    return record.getMessage()


@pytest.mark.seed(
    "S0-021", "S0-075", "S0-105", "S0-106", "S0-107", "S0-115", "S2-005", "S2-006", "S2-008", "S2-009", "S2-030",
    "S2-031", "S2-050", "S2-051", "S2-052", "S2-053", "S2-055", "S2-056", "S2-059", "S2-082", "S3-014", "S3-015",
    "S3-016", "S3-017", "S3-061",
)  # fmt: skip
@pytest.mark.parametrize("provoke", PROVOCATIONS, ids=lambda each: each.__name__)
def test_the_guide_shows_what_is_printed(
    provoke: Provocation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "PANTHERAML_NPROC",
        "PANTHERAML_RELAUNCH",
        "PANTHERAML_RELAUNCHED",
    ):
        monkeypatch.delenv(name, raising=False)
    message = said(provoke, Host(monkeypatch, tmp_path), caplog)
    assert " ".join(message.split()) in " ".join(GUIDE.read_text().split()), message


def test_there_is_no_message_that_nothing_prints() -> None:
    """Each indented error of the page is one of those above."""
    classes = re.findall(r"^    (\w+Error): ", GUIDE.read_text(), re.MULTILINE)
    logged = (no_gpu, no_relaunch, falls_back, relaunches, enabled, on_one_gpu, rows_repeat, a_rank_is_killed)
    assert classes.count("RuntimeError") == 1, "torch's own"
    assert len(classes) - 1 == len(PROVOCATIONS) - len(logged)


BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.seed(
    "S0-017", "S0-018", "S0-019", "S0-049", "S0-050", "S0-051", "S0-052", "S0-053", "S0-055", "S0-056", "S0-088",
    "S0-090", "S0-091", "S2-016", "S2-017", "S2-041", "S2-043", "S2-045", "S2-046", "S2-048", "S3-029", "S3-034",
)  # fmt: skip
@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANTHERAML_RELAUNCH", "0")
    if "from_pretrained" in code:
        toy.write_llama(tmp_path / "my-model", hidden_size=64, max_position_embeddings=2048)
        toy.write_jsonl(tmp_path / "my-data.jsonl", toy.arithmetic(8))
    names: dict[str, Any] = {}
    exec(compile(code, "Multi-GPU-Guide.md", "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 3, "one step for each of three epochs"


@pytest.mark.seed("S0-116", "S2-062", "S3-092")
def test_commands_exist() -> None:
    text = GUIDE.read_text()
    commands = re.findall(r"^    (pantheraml [^#\n]+)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        parse(shlex.split(command)[1:])
    assert len(re.findall(r"`examples/\w+\.py`", text)) >= 5
    for script in re.findall(r"python ((?:examples|tests)/\w+\.py)", text):
        assert (ROOT / script).is_file(), script


@pytest.mark.seed("S0-020", "S2-042", "S2-044", "S2-045", "S2-046", "S2-047", "S2-048", "S2-049")
def test_tips_name_the_arguments_of_trl() -> None:
    import dataclasses

    from trl import SFTConfig

    (tips,) = re.findall(r"^## Performance tips$(.*?)^## ", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    named = re.findall(r"^\| `(\w+)", tips, re.MULTILINE)
    assert {"per_device_train_batch_size", "bf16", "optim", "ddp_find_unused_parameters"} <= set(named)
    assert set(named) <= {field.name for field in dataclasses.fields(SFTConfig)}


NAMES = """
    PantheraMLTrainer PantheraMLDistributedTrainer UnslothTrainer FastLanguageModel MultiGPUConfig MultiGPUTrainer
    AggregationMethod ConfigManager DeviceManager get_optimal_config get_available_devices optimal_config model_size
    available_memory enable_multi_gpu disable_multi_gpu get_multi_gpu_config unsloth_train trainer_stats epoch_stats
    num_gpus batch_size_per_gpu gradient_aggregation use_multi_gpu auto_device_map device_map max_memory
    use_gradient_checkpointing find_unused_parameters backend multi_gpu_config load_in_4bit load_in_8bit dtype
    target_modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lora_alpha lora_dropout
    per_device_train_batch_size gradient_accumulation_steps bf16 adamw_8bit ddp_find_unused_parameters balanced
    sequential UNSLOTH_ENABLE_MULTIGPU UNSLOTH_DISABLE_DDP_STATIC_GRAPH LOCAL_RANK WORLD_SIZE
    setup_multi_gpu cleanup_multi_gpu distributed_context create_device_map get_optimal_device_map all_reduce_scalar
    broadcast_object get_rank get_world_size get_local_rank is_main_process is_distributed_available barrier
    get_gpu_memory_info clear_gpu_cache get_current_gpu_index set_gpu_device torch.cuda.device_count nproc_per_node
    unsloth_multigpu_prototype unsloth_multigpu unsloth.models._utils DDP_GRADIENT_CHECKPOINTING_FIX.md test_ddp_fix.py
    core/multi_gpu_manager.py core/batch_sharding.py core/gradient_aggregator.py core/multi_gpu_trainer.py
    core/memory_manager.py hooks/training_hooks.py hooks/loader_hooks.py hooks/trainer_hooks.py utils/device_utils.py
    utils/logging_utils.py utils/config_utils.py pantheraml/distributed.py pantheraml/trainer.py
    pantheraml/models/loader.py pantheraml/kernels/utils.py pantheraml/models/_utils.py pantheraml/__init__.py
    examples/quick_start.py examples/advanced_config.py examples/direct_trainer_usage.py
    examples/verify_installation.py examples/multi_gpu_training.py examples/multi_gpu_training_example.py
    examples/custom_loop.py tests/test_multi_gpu.py tests/run_all_tests.py unsloth/llama-2-7b-bnb-4bit
    unsloth/llama-2-7b-chat-bnb-4bit
"""


@pytest.mark.seed("S2-072", "S2-075")
def test_the_names_of_the_documents_are_found_in_the_documentation() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md") if page.name != "conformance.md")
    assert not [name for name in re.findall(r"\S+", NAMES) if name not in text]


ADVICE = {
    "S2-056": "network connectivity",
    "S2-057": "processes can access the same dataset",
    "S2-058": "environment is not consistent across processes",
    "S2-059": "every GPU has sufficient memory",
    "S2-060": "CUDA compatibility",
    "S2-061": '`device_map="sequential"` is the simplest placement to debug',
    "S2-047": "similar memory capacity",
    "S2-049": "balance the batch across devices",
    "S2-028": "One process per GPU is fastest",
    "S4-109": "Start with a small batch",
    "S4-111": "Watch memory while it trains",
    "S4-112": "Mixed precision",
    "S4-113": "A memory fraction** of 0.8 to 0.9",
    "S4-133": "Watch memory while it trains (`pantheraml watch`, `get_gpu_stats()`)",
    "S3-079": "existing code: the hook",
    "S1-120": "get_optimal_batch_size(16)",
    "S1-121": "config.enable_gradient_checkpointing = True",
    "S1-122": "torch.cuda.empty_cache()",
}


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=pytest.mark.seed(item), id=item) for item, words in ADVICE.items()]
)
def test_advice_of_the_documents_is_there(words: str) -> None:
    assert words in " ".join(GUIDE.read_text().split())


def test_the_guide_is_linked() -> None:
    for page, link in (("README.md", "docs/Multi-GPU-Guide.md"), ("docs/index.md", "Multi-GPU-Guide.md")):
        assert f"({link})" in (ROOT / page).read_text()
    assert "Multi-GPU-Guide.md" in (ROOT / "mkdocs.yml").read_text()

"""One rule each for precision, fallback and device maps: no second place decides them, whichever face is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pantheraml.api.loading_options import chosen_dtype
from pantheraml.engine.tuning import use_mixed_precision
from pantheraml.planner.precision import TORCH_NAMES, choose_precision
from pantheraml.specs.performance import OptimizationLevel, PerformanceConfig

SOURCE = Path(__file__).parents[2] / "src/pantheraml"


def files_with(pattern: str) -> set[str]:
    found = re.compile(pattern)
    return {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if found.search(path.read_text())}


ONE_PLACE = {
    # precision: who decides, and who knows the capability that bf16 needs
    "decides precision": (r"def choose_precision|def parse_precision|def choose_fp8\b", {"planner/precision.py"}),
    "asks torch for bf16": (r"torch\.cuda\.is_bf16_supported", set()),
    "says which GPUs have bf16": (r"BF16_CAPABILITY", {"planner/precision.py", "api/unsloth_names.py"}),
    # fallback: ranks vote before the first collective
    "decides a fallback": (r"def agree_on_devices", {"rendezvous/device_vote.py"}),
    "lets ranks vote": (
        r"\bagree_on_devices\(",
        {"rendezvous/device_vote.py", "rendezvous/script_vote.py", "parallel/process_group.py"},
    ),
    "makes a process group": (r"dist\.init_process_group\(", {"parallel/process_group.py"}),
    # device maps
    "places layers": (r"infer_auto_device_map\(|get_balanced_memory\(", {"parallel/device_map.py"}),
    "names the strategies": (r'"auto", "balanced", "sequential"', {"specs/train.py"}),
}


@pytest.mark.seed("C4", "C14", "C15")
@pytest.mark.parametrize("rule", ONE_PLACE)
def test_there_is_one_place(rule: str) -> None:
    pattern, places = ONE_PLACE[rule]
    assert files_with(pattern) == places


@pytest.mark.seed("C15", "S1-059", "S2-044", "S3-019")
@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (9, 0)])
def test_an_own_loop_a_script_and_a_run_compute_in_the_same_precision(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    device = torch.device("cpu" if capability is None else "cuda")
    name = "cpu" if capability is None else "cuda"
    rule = choose_precision(None, name, [] if capability is None else [capability])
    assert chosen_dtype(None, False, device) is getattr(torch, TORCH_NAMES[rule.value])
    model = nn.Linear(2, 2)
    config = PerformanceConfig(optimization_level=OptimizationLevel.ADVANCED)
    choice = use_mixed_precision(model, config, device)
    assert choice.value == (rule.value == "bf16")
    assert ("GradScaler" in choice.reason) == (rule.value == "fp16")
    if rule.value == "fp32":
        assert choice.reason == rule.reason
    assert model(torch.ones(1, 2)).dtype is torch.float32, "losses keep their precision"

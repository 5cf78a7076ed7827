"""Predicted step times beside the recorded ones of our cases on the H200, for docs/planner.md.

    python benchmarks/predicted_times.py       print the table

Each case counts once, by its newest record. Rows that a constant was taken from are marked as used; all others test it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner_page
import predicted_scaling
from inputs import FAMILY, SHAPES
from suites.h200_planner import NOT_COMPARED
from suites.run_case import cli_settings

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.planner.known_rates import H200
from pantheraml.planner.model_shapes import ModelShapes, shapes_of_config
from pantheraml.planner.setting import Setting
from pantheraml.planner.step_time import TimeInputs, predict_time

RESULTS = Path(__file__).with_name("results")
USED = {
    "ours-8b-lora-fp8": "the share of single kernels' rates that a step reaches",
    "ours-8b-lora-bf16": "the share of single kernels' rates that a step reaches",
    "ours-8b-lora-uneven": "packed documents, which take as long in attention as one row",
    "ablation: 1b without CUDA graph": "the host's time to launch a kernel",
    "ablation: 1b full, 8-bit states": "the bytes of 8-bit states",
    "ours-qwen3-4b-lora": "the gaps between kernels",
    "plan-3b-lora-fp8-1x32768-full": "attention over long sequences, heads of 128",
    "plan-1b-lora-fp8-1x32768": "attention over long sequences, heads of 64",
    "plan-1b-full-bf16-adamw-2x4096-full": "the rate of unfused kernels",
    "plan-qwen3-1.7b-full-bf16-adamw-1x8192-full": "the rate of unfused kernels",
    "plan-qwen3-1.7b-lora-bf16-8x1024-padded": "the host's time to launch a layer without fp8",
}
"""Case -> what was taken from it."""
RENAMED = {"quantised": "quantized"}


@dataclass(frozen=True)
class TimeRow:
    case: str
    setting: Setting
    seconds: float
    predicted: float
    limited_by: str
    used: str | None

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1


def time_rows() -> list[TimeRow]:
    """Rows of the cases with a time, of models whose sizes the planner can compute."""
    found = dict(_ablations())
    for path in sorted(RESULTS.glob("h200-*.json")):
        for row in json.loads(path.read_text())["results"]:
            if row["system"] == "pantheraml" and row["status"] == "measured" and _is_training(row):
                case = _renamed(row["case"])
                found[case] = (
                    _renamed(row["model"]),
                    planner_page.setting_planned(cli_settings(row)),
                    row["tokens_per_second"],
                )
    return [row for case, values in found.items() if (row := _row(case, *values)) is not None]


def _is_training(row: Mapping[str, Any]) -> bool:
    """Preference and online training add passes that the planner does not plan, uneven rows leave some of them out.

    Cases of very long sequences have too few steps for a speed.
    """
    planned = row["path"] == "cli" and row.get("trainer") in (None, "sft") and row["case"] not in NOT_COMPARED
    planned = planned and not planner_page.planned_otherwise(row)
    return planned and row["tokens_per_second"] is not None


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def _ablations() -> Iterator[tuple[str, tuple[str, Setting, float]]]:
    pieces = json.loads((RESULTS / "ablation-20261118T210646Z.json").read_text())["results"]
    lora = Setting(frozen_weights="fp8", fused=True, micro_batch=4, seq_len=2048)
    for piece in pieces:
        if piece["piece"] == "step_cuda_graph":
            shape = piece["setting"].split()[0]
            yield f"ablation: {shape} without CUDA graph", (shape, lora, piece["off_tokens_per_second"])
    full = Setting(
        method="full", trained_weights="bf16", optimizer="adamw8bit", compile=True, cuda_graph=True, micro_batch=4
    )
    tricks = json.loads((RESULTS / "ablation-20261116T162433Z.json").read_text())["results"]
    (trick,) = [each for each in tricks if each["trick"] == "adamw8bit"]
    yield "ablation: 1b full, 8-bit states", ("1b", full, trick["on_tokens_per_second"])


def shapes_of(name: str) -> ModelShapes:
    values = dict(SHAPES[name.removesuffix("-quantized")])
    return shapes_of_config({"model_type": values.pop(FAMILY, "llama"), **values})


def _row(case: str, model: str, setting: Setting, tokens_per_second: float) -> TimeRow | None:
    """None: the planner does not know the model's family, or nothing but its weights (mixtures of experts)."""
    try:
        shapes = shapes_of(model)
    except UnsupportedModelError:
        return None
    given = TimeInputs.of(shapes, setting, H200)
    time = None if given is None else predict_time(setting, given)
    if time is None:
        return None
    return TimeRow(case, setting, setting.tokens / tokens_per_second, time.seconds, time.limited_by, USED.get(case))


def markdown() -> str:
    rows = time_rows()
    lines = [
        "| case | batch | sequence | measured | predicted | error | limited by | row |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda each: each.case):
        lines.append(
            f"| {row.case} | {row.setting.micro_batch} | {row.setting.seq_len:,} | {1e3 * row.seconds:.1f} ms |"
            f" {1e3 * row.predicted:.1f} ms | {100 * row.error:+.1f} % | {row.limited_by} |"
            f" {'held out' if row.used is None else 'used for ' + row.used} |"
        )
    for name, chosen in (("All rows", rows), ("Held out", [row for row in rows if row.used is None])):
        errors = sorted(abs(row.error) for row in chosen)
        median, worst = 100 * statistics.median(errors), 100 * errors[-1]
        lines += [
            "",
            f"{name}: {len(errors)}; median error {median:.1f} % (target 8 %: {_verdict(median <= 8)}),"
            f" worst {worst:.1f} % (target 20 %: {_verdict(worst <= 20)}).",
        ]
    return "\n".join(lines)


def with_sections(page: str) -> str:
    """Return docs/planner.md with its tables of times and of predicted plans replaced."""
    for name, text in (("time", markdown()), ("scaling", predicted_scaling.tables())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


if __name__ == "__main__":
    print(markdown())

"""The section of docs/planner.md on memory: what the planner predicts for every recorded run, and what was measured.

Predictions come from the planner alone: the settings of the case, the shapes of `inputs.py`, one H200. Some runs are of
older code, which stored more; what is known of that is added here, not in the product (`CodeThen`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from inputs import FAMILY, SHAPES
from suites.h200_planner import NOT_COMPARED, RANDOM_NAMES
from suites.run_case import cli_settings
from table import markdown_table

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.planner.choose import choose
from pantheraml.planner.memory import fused_layers, predict_memory, why_not_predicted
from pantheraml.planner.memory.head import chunk_rows
from pantheraml.planner.memory.step_sizes import FLOAT32, StepSizes, step_sizes
from pantheraml.planner.model_shapes import ModelShapes, shapes_of_config
from pantheraml.planner.setting import Setting, setting_of
from pantheraml.specs.config_file import validate
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.prediction import MemoryPrediction

SUITES = ("h200", "h200-families", "h200-planner")
BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"
GIB = 2**30

H200 = DeviceSpec(
    gpus=(GPU(index=0, name="NVIDIA H200", total_bytes=None, free_bytes=None, compute_capability=(9, 0)),),
    cpu_count=16,
    ram_bytes=None,
    driver=None,
)

FIRST_COMPARABLE = "2026-11-16T13:30"
"""Before, layers kept other tensors: the rows of the MLP, for example, which are recomputed now."""
FUSED_OFFLOAD_FROM = "2026-11-18T01:00"
"""Since then, `train` fuses the layers of full fine-tunes with offloading by itself."""
ONE_LAYOUT_FROM = "2026-11-18T21:50"
"""Since then, fp8 weights have one layout."""
SECOND_LAYOUT_SHARE = 0.75
"""Second layouts took up to this share of the memory of all fp8 weights, of MLPs alone."""
BIG_CHUNKS_FROM = "2026-11-18T21:27"
"""Since then, an fp8 head of a narrow model takes more tokens at a time."""
ROWS_AGAIN_FROM = "2026-11-20T02:00"
"""Since then, fused layers do not keep the rows of the output projection: they make them again in backward."""

DEVELOPED_ON = frozenset(
    {
        *("ours-8b-lora-fp8", "ours-8b-lora-bf16", "ours-8b-qlora-lean", "ours-1b-full"),
        *("compile on", "compile off"),
    }
)
"""Cases that were looked at while the formulas were written. All others were compared when these stood."""

# Ablations of docs/performance.md in the words of cases: name and side -> settings
_FULL_BF16 = {"model.precision": "bf16", "train.weights": "bf16", "train.optimizer": "adamw_bf16"}
ABLATIONS: dict[str, tuple[str, str, dict[str, object]]] = {
    "compile on": ("1b", "full", {**_FULL_BF16, "train.cuda_graph": "on"}),
    "compile off": ("1b", "full", {**_FULL_BF16, "train.cuda_graph": "on", "train.compile": "off"}),
    "stochastic_rounding on": ("1b", "full", _FULL_BF16),
    "stochastic_rounding off": ("1b", "full", {"model.precision": "bf16"}),
    "adamw8bit on": ("1b", "full", {**_FULL_BF16, "train.optimizer": "adamw8bit"}),
    "full_fp8 on": ("1b", "full", {**_FULL_BF16, "model.precision": "fp8"}),
    "fp8_layouts off, 8b": ("8b", "lora", {"model.precision": "fp8"}),
    "fp8_layouts off, 1b": ("1b", "lora", {"model.precision": "fp8"}),
    "step_cuda_graph off, 8b": ("8b", "lora", {"model.precision": "fp8", "train.cuda_graph": "off"}),
    "step_cuda_graph off, 1b": ("1b", "lora", {"model.precision": "fp8", "train.cuda_graph": "off"}),
}


@dataclass(frozen=True)
class Measured:
    """A recorded run of ours."""

    case: str
    model: str
    settings: Mapping[str, object]
    """As given to `pantheraml train`."""
    peak_gib: float
    date: str
    commit: str
    loop: Literal["pantheraml", "SFTTrainer"]
    reserved_gib: float | None = None
    device_gib: float | None = None
    """By the driver, of all processes."""
    probe_gib: float | None = None
    """Allocated at most in the first two steps."""


@dataclass(frozen=True)
class CodeThen:
    """How the code of a run differed from today's, as far as it changes memory."""

    two_layouts: bool
    small_chunks: bool
    kept_rows: bool

    @property
    def note(self) -> str:
        words = {
            "two layouts": self.two_layouts,
            "smaller chunks of logits": self.small_chunks,
            "kept rows": self.kept_rows,
        }
        return ", ".join(word for word, differed in words.items() if differed)

    def predict(self, shapes: ModelShapes, setting: Setting) -> MemoryPrediction | None:
        """The planner's prediction, for layers that kept the rows of the output projection if they did."""
        today = fused_layers._kept_after_attention

        def then(sizes: StepSizes) -> Iterator[int]:
            output = sizes.groups[1]
            if sizes.fp8_layers or sizes.pad(output):  # else the rows are attention's own output
                yield sizes.tokens * (output.width + sizes.pad(output)) * sizes.operand
            if sizes.fp8_layers:
                yield sizes.tokens * FLOAT32
            yield from today(sizes)

        with patch.object(fused_layers, "_kept_after_attention", then if self.kept_rows else today):
            return predict_memory(shapes, setting, capability=(9, 0))

    def extra_bytes(self, shapes: ModelShapes, setting: Setting, found: MemoryPrediction) -> int:
        more = _second_layouts(shapes, setting) if self.two_layouts else 0
        if self.small_chunks and found.instant == "loss" and shapes.decoder is not None:
            vocabulary, width = shapes.decoder.vocabulary, shapes.decoder.hidden
            less = chunk_rows(vocabulary, trained=False, fp8_width=width) - chunk_rows(vocabulary, trained=False)
            more -= less * vocabulary * 3  # logits in bf16, their gradient in fp8
        return more


def _second_layouts(shapes: ModelShapes, setting: Setting) -> int:
    """Bytes of the transposed copies that MLPs had; their adapters' rows were stored apart, without padding."""
    decoder = shapes.decoder
    assert decoder is not None
    sizes = step_sizes(decoder, setting)
    groups = [group.height * group.width for group in sizes.groups]
    mlp = sum(groups[2:])
    layers = min(decoder.layers, round(decoder.layers * SECOND_LAYOUT_SHARE * sum(groups) / mlp))
    each = 0
    for group in sizes.groups[2:]:
        pad = sizes.pad(group)
        each += group.width * (group.height + pad) - pad * (group.width + pad)
    return layers * each


def measured_runs(records: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """The newest run of each case whose code is comparable with today's."""
    newest: dict[str, Measured] = {}
    for record in sorted(records, key=lambda record: str(record["date"])):
        for run in (*_of_suite(record), *_of_ablation(record)):
            if run.date >= FIRST_COMPARABLE:
                newest[run.case] = run
    return list(newest.values())


def _of_suite(record: Mapping[str, Any]) -> Iterator[Measured]:
    if record["benchmark"] not in SUITES:
        return
    for row in record["results"]:
        if row["system"] != "pantheraml" or row["peak_gib"] is None or row.get("trainer", "sft") != "sft":
            continue
        if planned_otherwise(row):
            continue
        settings = cli_settings(row)
        loop: Literal["pantheraml", "SFTTrainer"] = "pantheraml" if row["path"] == "cli" else "SFTTrainer"
        if loop == "SFTTrainer" and row["method"] == "full":  # trl_run.py: weights in bf16, torch's AdamW over them
            settings |= {"train.weights": "bf16", "train.optimizer": "adamw_bf16", "train.compile": "off"}
        model = str(row["model"]).removesuffix("-quantised").removesuffix("-quantized")
        more = [row.get(name) for name in ("reserved_gib", "device_gib", "probe_gib")]
        stamp = str(row["date"]), str(row["commit"])[:7]
        yield Measured(row["case"], model, settings, row["peak_gib"], *stamp, loop, *more)


def planned_otherwise(row: Mapping[str, Any]) -> bool:
    """Whether `train` made another plan for this row when it was recorded: today's is not what was measured."""
    offloads = row["method"] == "full" and row["checkpointing"] == "offload" and row["path"] == "cli"
    return offloads and str(row["date"]) < FUSED_OFFLOAD_FROM


def _of_ablation(record: Mapping[str, Any]) -> Iterator[Measured]:
    if record["benchmark"] != "ablation":
        return
    for row in record["results"]:
        shape = row["setting"].partition(" ")[0]
        names = {f"{row['trick']} {side}" if "trick" in row else f"{row['piece']} {side}, {shape}" for side in SIDES}
        for name in sorted(names & ABLATIONS.keys()):
            model, method, settings = ABLATIONS[name]
            peak = row["on_peak_gib" if " on" in name else "off_peak_gib"]
            if model != shape or peak is None or row.get("path", "train task") != "train task":
                continue
            case = {"method": method, "precision": "fp8", "checkpointing": "none", "batch": 4, "seq": 2048}
            given = cli_settings({**case, "settings": settings})
            yield Measured(name, model, given, peak, str(record["date"]), str(record["commit"])[:7], "pantheraml")


SIDES = ("on", "off")


@dataclass(frozen=True)
class Compared:
    run: Measured
    setting: Setting
    code: CodeThen
    predicted_gib: float | None
    instant: str | None
    reason: str | None
    """Why nothing is predicted."""
    reserved_gib: float | None = None
    device_gib: float | None = None

    @property
    def error(self) -> float | None:
        return None if self.predicted_gib is None else self.predicted_gib / self.run.peak_gib - 1

    @property
    def developed(self) -> bool:
        return self.run.case in DEVELOPED_ON


def setting_planned(settings: Mapping[str, object]) -> Setting:
    """What `pantheraml plan` chooses on one H200 for a run with these settings."""
    sections: dict[str, dict[str, object]] = {"model": {"path": "model"}, "data": {"path": "data.jsonl"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    config = validate(sections)
    return setting_of(config, choose(config, H200))


def compare(run: Measured) -> Compared:
    setting = setting_planned(run.settings)
    then = _code_then(run, setting)
    try:
        shapes = model_shapes(run.model)
    except UnsupportedModelError as err:
        return Compared(run, setting, then, None, None, err.what)
    found = then.predict(shapes, setting)
    if found is None:
        return Compared(run, setting, then, None, None, why_not_predicted(shapes, setting, capability=(9, 0)))
    assert found.reserved_bytes is not None
    assert found.device_bytes is not None
    extra = then.extra_bytes(shapes, setting, found)
    sizes = (found.allocated_bytes, found.reserved_bytes, found.device_bytes)
    allocated, reserved, device = ((size + extra) / GIB for size in sizes)
    return Compared(run, setting, then, allocated, found.instant, None, reserved, device)


def _code_then(run: Measured, setting: Setting) -> CodeThen:
    fp8 = setting.frozen_weights == "fp8" and setting.fused
    two = fp8 and setting.activation_checkpointing == "none" and run.date < ONE_LAYOUT_FROM
    return CodeThen(
        two_layouts=two and not run.case.startswith("fp8_layouts off"),
        small_chunks=fp8 and run.date < BIG_CHUNKS_FROM,
        kept_rows=setting.fused and run.date < ROWS_AGAIN_FROM,
    )


def model_shapes(name: str) -> ModelShapes:
    values = {key: value for key, value in SHAPES[name].items() if key != FAMILY}
    return shapes_of_config({"model_type": SHAPES[name].get(FAMILY, "llama"), **values})


HEAD = (
    *("case", "setting", "measured GiB", "predicted GiB", "error", "reserved, predicted", "driver, predicted"),
    *("peak at", "code", "used for"),
)


def section(records: Sequence[Mapping[str, Any]]) -> str:
    """The text between the markers."""
    runs = [compare(run) for run in measured_runs(records)]
    found = [each for each in runs if each.run.case not in NOT_COMPARED]
    ours, others = ([each for each in found if each.run.loop == loop] for loop in ("pantheraml", "SFTTrainer"))
    parts = [
        *_table("`pantheraml train`", ours),
        "",
        *_table(
            "`SFTTrainer` with our layers: another loop, for which the planner makes no promise; shown to see how far"
            " its figures carry",
            others,
        ),
    ]
    return "\n".join([*parts, *_more_memory([each for each in runs if each.run.loop == "pantheraml"])])


NOT_MEASURED = (
    "**Reserved and driver memory** of these runs were not recorded: both columns are predicted, not measured. Such"
    " figures go into a table of their own here, as soon as a record has them."
)
MORE_HEAD = (
    *("case", "allocated", "after two steps", "reserved", "predicted", "error", "driver", "predicted", "error"),
)


def _more_memory(rows: Sequence[Compared]) -> list[str]:
    """What was allocated in the first two steps, what the allocator held, and what the driver counted."""
    rows = sorted((each for each in rows if each.run.reserved_gib is not None), key=lambda each: each.run.case)
    if not rows:
        return ["", NOT_MEASURED]
    pairs = [((each.run.reserved_gib, each.reserved_gib), (each.run.device_gib, each.device_gib)) for each in rows]
    cells = [
        [run.case, *map(_shown, (run.peak_gib, run.probe_gib)), *(cell for pair in found for cell in _pair(*pair))]
        for run, found in zip((each.run for each in rows), pairs, strict=True)
    ]
    compared = [(each.run, found) for each, found in zip(rows, pairs, strict=True) if each.run.case not in NOT_COMPARED]
    errors = {
        "Reserved": [_error(*reserved) for _, (reserved, _) in compared],
        "Driver": [_error(*device) for _, (_, device) in compared],
        "Allocated, as measured after two steps": [_error(run.peak_gib, run.probe_gib) for run, _ in compared],
    }
    known = {name: [value for value in found if value is not None] for name, found in errors.items()}
    told = [
        f"{name}: median error {statistics.median(map(abs, found)):.2%}, worst {max(map(abs, found)):.2%}."
        for name, found in known.items()
        if found
    ]
    uneven = [each.run for each in rows if each.run.case in NOT_COMPARED and each.run.probe_gib is not None]
    if uneven:
        found = ", ".join(f"{run.case}: {_shown(run.probe_gib)} of {_shown(run.peak_gib)}" for run in uneven)
        told.append(f"Not in these errors: rows of uneven width, whose widest batch comes later ({found}).")
    return ["", f"**Beyond the allocated peak**, in GiB. {' '.join(told)}", "", *markdown_table(MORE_HEAD, cells)]


def _error(measured: float | None, predicted: float | None) -> float | None:
    return None if measured is None or predicted is None else predicted / measured - 1


def _pair(measured: float | None, predicted: float | None) -> list[str]:
    error = _error(measured, predicted)
    return [_shown(measured), _shown(predicted), "-" if error is None else f"{error:+.2%}"]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(title: str, rows: Sequence[Compared]) -> list[str]:
    rows = sorted(rows, key=lambda each: (not each.developed, each.run.case))
    return [f"**{title}.** {_summary(rows)}", "", *markdown_table(HEAD, [_cells(each) for each in rows])]


def _summary(rows: Sequence[Compared]) -> str:
    words = []
    for held_out, name in ((True, "held out"), (False, "used for development")):
        errors = [abs(each.error) for each in rows if each.error is not None and each.developed != held_out]
        if errors:
            words.append(f"{len(errors)} {name}: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")
    return f"Absolute error of the allocated peak: {'; '.join(words)}."


def _cells(row: Compared) -> list[str]:
    run, setting = row.run, row.setting
    predicted = "-" if row.predicted_gib is None else f"{row.predicted_gib:.2f}"
    error = "-" if row.error is None else f"{row.error:+.2%}"
    code = f"{run.date[:10]} `{run.commit}`" + (f" ({row.code.note})" if row.code.note else "")
    kind = "drawn at random" if run.case in RANDOM_NAMES else "development" if row.developed else "test"
    used = "-" if row.predicted_gib is None else kind
    where = row.instant if row.instant is not None else f"not predicted: {row.reason}"
    more = ["-" if value is None else f"{value:.2f}" for value in (row.reserved_gib, row.device_gib)]
    return [
        run.case,
        _words(run.model, setting),
        f"{run.peak_gib:.2f}",
        predicted,
        error,
        *more,
        str(where),
        code,
        used,
    ]


def _words(model: str, setting: Setting) -> str:
    weights = setting.frozen_weights or ("fp8 matmuls" if setting.fp8_matmuls else setting.precision)
    traits = [
        setting.optimizer if setting.method == "full" else "",
        "" if setting.activation_checkpointing == "none" else setting.activation_checkpointing,
        "fused" if setting.fused else "compiled" if setting.compile else "",
        "graph" if setting.cuda_graph else "",
    ]
    sizes = f"{setting.micro_batch} x {setting.seq_len}"
    return ", ".join(filter(None, [f"{model} {setting.method} {weights}", sizes, *traits]))


def with_section(page: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return docs/planner.md with its section on recorded runs replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{section(records)}\n\n{END}{rest.partition(END)[2]}"

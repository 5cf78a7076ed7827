"""Ablations of optimizations without a setting: switched off from outside, each for two of four or more runs.

Two paths: the train task of the command line, and TRL's SFTTrainer with a model of `FastLanguageModel`, which is loaded
once and trained again and again. Runs with everything on come between the others, in both rounds, so that the spread of
`on_runs` and `off_runs` shows the noise. A row says whether the piece acted at all while it was on. Pieces that need
CUDA are skipped without it, and so is what no longer fits into `minutes`, each with the reason in its row.

`steady_shapes` compiles the layers of full fine-tunes in bf16 only, so it is measured there.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from inputs import write_full_sequences, write_model

OFFS_PER_ON = 3
ROUNDS = 2
FULL_SHAPES = {"8b": "8b/4"}
"""Shape of full fine-tunes, where the named one does not fit."""

Train = Callable[[Path, Mapping[str, object]], tuple[float, float | None]]


@dataclass(frozen=True)
class Scale:
    shape: str
    batch: int
    seq_len: int
    steps: int

    def setting(self, method: str) -> str:
        return f"{self.shape} {method}, {self.batch} x {self.seq_len}"


@dataclass(frozen=True)
class Piece:
    """`off` switches it off in a loaded model; `acted` tells after a run whether it was in use."""

    name: str
    off: Callable[[Any], AbstractContextManager[None]]
    acted: Callable[[Any], bool]
    needs_cuda: bool = False


@dataclass
class Runs:
    """Results of the runs of one path: (tokens/s, peak GiB) by side; the side with everything on is ''."""

    path: str
    setting: str
    of: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)
    acted: dict[str, bool] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, side: str, result: tuple[float, float | None]) -> None:
        self.of.setdefault(side, []).append(result)
        print(f"{self.path}, {self.setting}: {side or 'all'} {'off' if side else 'on'}: {result}", flush=True)

    def row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"piece": name, "path": self.path, "setting": self.setting}
        row |= {"acted": self.acted.get(name), "reason": self.skipped.get(name)}
        for label, side in (("on", ""), ("off", name)):
            runs = self.of.get(side, [])
            peaks = [peak for _, peak in runs if peak is not None]
            row[f"{label}_tokens_per_second"] = statistics.median(speed for speed, _ in runs) if runs else None
            row[f"{label}_peak_gib"] = max(peaks, default=None)
            row[f"{label}_runs"] = [round(speed, 1) for speed, _ in runs]
        return row


def order(sides: Sequence[str]) -> list[str]:
    """Return the sides of all rounds in turn, every second round backwards, with '' before every few."""
    found = []
    for number in range(ROUNDS):
        turn = list(sides) if number % 2 == 0 else list(sides)[::-1]
        found += [side for i, name in enumerate(turn) for side in ([""] if i % OFFS_PER_ON == 0 else []) + [name]]
    return found


def measure(shapes: Sequence[str], minutes: float, scale: Scale, train: Train) -> list[dict[str, Any]]:
    """Measure all pieces; `scale` gives everything but the shape."""
    end = time.monotonic() + 60 * minutes
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        with tempfile.TemporaryDirectory() as name:
            here = Scale(shape, scale.batch, scale.seq_len, scale.steps)
            _write_inputs(Path(name), here)
            rows += _train_task(Path(name), here, end, train)
            rows += _sft_trainer(Path(name), here, end, "lora", LORA_PIECES)
    for shape in reversed(shapes):  # the smaller first, in case time runs out
        with tempfile.TemporaryDirectory() as name:
            here = Scale(FULL_SHAPES.get(shape, shape), scale.batch, scale.seq_len, scale.steps)
            rows += _sft_trainer(Path(name), here, end, "full", FULL_PIECES)
    return rows


def _write_inputs(folder: Path, scale: Scale) -> None:
    if not (folder / "model").exists():
        write_model(folder / "model", scale.shape)
        sequences = scale.batch * scale.steps
        write_full_sequences(folder / "data.jsonl", shape=scale.shape, sequences=sequences, seq_len=scale.seq_len)


TRAIN_TASK_OFF: dict[str, dict[str, object]] = {"step_cuda_graph": {"train.cuda_graph": "off"}}


def _train_task(folder: Path, scale: Scale, end: float, train: Train) -> list[dict[str, Any]]:
    runs = Runs("train task", scale.setting("lora fp8"))
    on = {"model.precision": "fp8", "train.cuda_graph": "on"}  # errors where impossible
    common: dict[str, object] = {
        "model.path": str(folder / "model"),
        "data.path": str(folder / "data.jsonl"),
        "data.cache_dir": str(folder / "cache"),
        "data.seq_len": scale.seq_len,
        "method.kind": "lora",
        "method.rank": 16,
        "method.alpha": 16,
        "train.global_batch_size": scale.batch,
        "train.micro_batch_size": scale.batch,
        "train.max_steps": scale.steps,
    }
    if not _has_cuda():
        runs.add("", train(folder / "run", common))  # the path itself can be tested
        return [runs.row(name) | {"reason": "it needs CUDA"} for name in TRAIN_TASK_OFF]
    for number, side in enumerate(order(list(TRAIN_TASK_OFF))):
        if time.monotonic() > end:
            runs.skipped |= {side: "no time left for all of its runs"}
            continue
        runs.add(side, train(folder / f"run-{number}", {**common, **on, **TRAIN_TASK_OFF.get(side, {})}))
    return [runs.row(name) | {"acted": True} for name in TRAIN_TASK_OFF]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _sft_trainer(folder: Path, scale: Scale, end: float, method: str, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Load a model once and train it with each side in turn."""
    precision = "fp8" if method == "lora" and _has_cuda() else "bf16"
    runs = Runs("SFTTrainer", scale.setting(f"{method} {precision}"))
    possible = [piece for piece in pieces if _has_cuda() or not piece.needs_cuda]
    runs.skipped = {piece.name: "it needs CUDA" for piece in pieces if piece not in possible}
    if possible and time.monotonic() > end:
        runs.skipped |= {piece.name: "no time left" for piece in possible}
    elif possible:
        _write_inputs(folder, scale)
        _run_sides(_Session(folder, scale, method, precision), runs, possible, end)
    for name, reason in runs.skipped.items():
        print(f"{runs.path}, {runs.setting}: {name} skipped: {reason}", flush=True)
    return [runs.row(piece.name) for piece in pieces]


def _run_sides(session: _Session, runs: Runs, pieces: Sequence[Piece], end: float) -> None:
    by_name = {piece.name: piece for piece in pieces}
    for side in order(list(by_name)):
        if time.monotonic() > end:
            runs.skipped |= {side: "no time left for all of its runs"} if side else {}
            continue
        switched = by_name[side].off(session.model) if side else contextlib.nullcontext()
        with switched:
            runs.add(side, session.train())
        if not side:
            runs.acted |= {piece.name: piece.acted(session.model) for piece in pieces}


class _Session:
    """A model and its data, trained by a new SFTTrainer each time."""

    def __init__(self, folder: Path, scale: Scale, method: str, precision: str) -> None:
        from suites import trl_run, trl_trainers

        names = {
            "system": "pantheraml",
            "trainer": "sft",
            "method": method,
            "precision": precision,
            "checkpointing": "none",
        }
        sizes = {"seq": scale.seq_len, "batch": scale.batch, "steps": scale.steps, "data": "full"}
        self._case, self._folder = {**names, **sizes, "experts": False}, folder
        _free_memory()
        self._data = trl_trainers.dataset(self._case, str(folder / "data.jsonl"))
        self.model, self._tokenizer = trl_run.load_fast(self._case, str(folder / "model"))
        self._forward = vars(self.model).get("forward")

    def train(self) -> tuple[float, float | None]:
        import torch
        from suites import trl_run
        from transformers import TrainerCallback

        from pantheraml.models.fast.layers import release_layer_graphs
        from pantheraml.readers.summary import WARM_UP_STEPS

        clock = trl_run.Clock()

        class Steps(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                clock.mark()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.mark()

        release_layer_graphs(self.model)  # memory of the last run's would count
        self.model.zero_grad(set_to_none=True)
        _free_memory()
        parts = {"model": self.model, "processing_class": self._tokenizer, "train_dataset": self._data}
        parts["callbacks"] = [Steps()]
        run = trl_run.trainer(self._case, parts, str(self._folder / "trainer"), [])
        run.train()
        seconds = clock.seconds()[WARM_UP_STEPS:]
        self._restore_forward()
        tokens = self._case["batch"] * self._case["seq"]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        return tokens / statistics.median(seconds), peak

    def _restore_forward(self) -> None:
        """Undo what accelerate does to the model, or every run would wrap its forward once more."""
        for name in ("forward", "_original_forward"):
            vars(self.model).pop(name, None)
        if self._forward is not None:
            self.model.forward = self._forward


def _free_memory() -> None:
    import torch

    gc.collect()  # reference cycles keep the last trainer alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _fast(model: Any) -> Any:
    from pantheraml.models.causal_lm import fast_model

    found = fast_model(model)
    assert found is not None
    return found


def _graphs(model: Any) -> Any:
    return next((layer.fused_parts.graphs for layer in model.modules() if hasattr(layer, "fused_parts")), None)


@contextlib.contextmanager
def _no_layer_graphs(model: Any) -> Iterator[None]:
    graphs, layers = _graphs(model), [layer for layer in model.modules() if hasattr(layer, "fused_parts")]
    for layer in layers:
        layer.fused_parts.graphs = None
    try:
        yield
    finally:
        for layer in layers:
            layer.fused_parts.graphs = graphs


@contextlib.contextmanager
def _no_hooks(*names: str) -> Iterator[None]:
    from pantheraml.hooks import async_metrics, prefetch_batches
    from pantheraml.hooks.registry import REGISTRY

    known = {**vars(prefetch_batches), **vars(async_metrics)}
    patches = [known[name] for name in names]
    for each in patches:
        REGISTRY.revert(each)
    try:
        yield
    finally:
        for each in patches:
            REGISTRY.apply(each)


def _no_prefetch(model: Any) -> AbstractContextManager[None]:
    _fast(model).after_forward = None  # of the run before
    return _no_hooks("PREFETCH_BATCHES")


def _no_async_metrics(_model: Any) -> AbstractContextManager[None]:
    return _no_hooks("ASYNC_GRAD_NORM")


@contextlib.contextmanager
def _no_metric_algebra(_model: Any) -> Iterator[None]:
    """The host computes no metrics itself, and gets no values per token for them; the loss is still copied early."""
    with (
        patch("pantheraml.models.async_scalars._METRIC_OPS", set()),
        patch("pantheraml.models.causal_lm.mirror_metrics_on_host", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def _no_async_scalars(model: Any) -> Iterator[None]:
    """The loss is not copied early either. Labels and masks are still known to the host."""
    with _no_metric_algebra(model), patch("pantheraml.models.causal_lm.mirror_on_host", lambda tensor: tensor):
        yield


@contextlib.contextmanager
def _no_overlap(model: Any) -> Iterator[None]:
    """None of the pieces that overlap the trainer's host work, all at once; layers are still captured."""
    with _no_prefetch(model), _no_async_metrics(model), _no_async_scalars(model):
        yield


def _steady_shapes(model: Any) -> Any:
    from pantheraml.engine.compile import SteadyShapes

    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next(hook for hook in hooks if isinstance(hook, SteadyShapes))


@contextlib.contextmanager
def _no_steady_shapes(model: Any) -> Iterator[None]:
    hook = _steady_shapes(model)
    hook._off = True
    try:
        yield
    finally:
        hook._off = False


def _is_applied(model: Any) -> bool:
    from pantheraml.hooks.async_metrics import ASYNC_GRAD_NORM
    from pantheraml.hooks.registry import REGISTRY

    return ASYNC_GRAD_NORM in REGISTRY.applied


def _replayed(model: Any) -> bool:
    return _graphs(model) is not None and _graphs(model)._last_replayed is not None


def _prefetched(model: Any) -> bool:
    return _fast(model).after_forward is not None


def _always(_model: Any) -> bool:
    return True


LORA_PIECES = (
    Piece("prefetch_batches", _no_prefetch, _prefetched),
    Piece("async_metrics", _no_async_metrics, _is_applied),
    Piece("metric_algebra", _no_metric_algebra, _always),
    Piece("async_scalars", _no_async_scalars, _always),
    Piece("all_host_overlap", _no_overlap, _prefetched),
    Piece("layer_cuda_graphs", _no_layer_graphs, _replayed, needs_cuda=True),
)
FULL_PIECES = (
    Piece("steady_shapes", _no_steady_shapes, lambda model: bool(_steady_shapes(model)._shapes), needs_cuda=True),
)

"""The plan of a run on this machine: made now, or replayed from a file of `pantheraml plan --json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pantheraml.base import env
from pantheraml.base.errors import ConfigError, DeviceError, RunDirectoryError
from pantheraml.devices.select import devices_for_run
from pantheraml.planner.facts import model_facts
from pantheraml.planner.plan_run import plan_run
from pantheraml.specs.gpu_table import by_driver_name, by_text
from pantheraml.specs.paths import is_hub_name
from pantheraml.specs.plan import GPU, DeviceSpec, Plan, PlanInputs
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import ModelConfig, TrainConfig

SAMPLED_BYTES = 1 << 20
"""Bytes of each data file that enter a digest."""
UNLIKE = 0.05
"""Tolerated relative difference in GPU memory, since drivers reserve some."""

_SECTIONS = ("model", "method", "parallel")
_KEYS = ("data.seq_len", "data.packing", "device")
_TRAIN = (
    *("global_batch_size", "micro_batch_size", "optimizer", "weights", "activation_checkpointing"),
    *("fused", "cuda_graph", "compile", "max_grad_norm"),
)
_PATHS = frozenset({"model.path", "model.tokenizer", "model.revision"})
"""Compared by content instead."""


def plan_here(
    config: TrainConfig, place: env.ProcessRank | None, planned: Plan | None = None, *, resumed: RunDir | None = None
) -> Plan:
    devices = devices_for_run(config, place)
    if planned is not None:
        check_replayable(planned, config, devices, place)
        return planned.model_copy(update={"made_for": None})
    facts = model_facts(config.model, _cached(config.model) if place is None else None)
    return plan_run(config, devices, place, model=facts, resumed=None if resumed is None else _stored(resumed))


def _cached(model: ModelConfig) -> Path | None:
    """Return the folder of a hub model that was downloaded before; None: a local folder, or not downloaded. Downloads
    nothing."""
    if Path(model.path).expanduser().exists() or not is_hub_name(model.path):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def _stored(run: RunDir) -> Plan | None:
    """Return the run's last plan; None: there is none, or it is unreadable and will be replaced by a new one."""
    try:
        return run.plan() if run.plan_file.is_file() else None
    except RunDirectoryError:
        return None


def inputs_of(config: TrainConfig, devices: DeviceSpec) -> PlanInputs:
    data = Path(config.data.path).expanduser()
    return PlanInputs(
        config=config.to_dict(),
        model_digest=model_digest(config),
        data_digest=data_digest(data) if config.data.path and data.exists() else None,
        gpus=devices.gpus,
    )


def model_digest(config: TrainConfig) -> str | None:
    file = Path(config.model.path).expanduser() / "config.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def data_digest(path: Path) -> str:
    """Return a digest of names, sizes and beginnings of the data files."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        with open(file, "rb") as opened:
            beginning = opened.read(SAMPLED_BYTES)
        name = "" if file == path else str(file.relative_to(path))
        digest.update(f"{name}:{file.stat().st_size}:".encode() + beginning)
    return digest.hexdigest()


def read_plan(path: Path) -> Plan:
    """Read a file that `pantheraml plan --json` wrote."""
    fix = "Write it again with `pantheraml plan ... --json > plan.json`."
    try:
        plan = Plan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as err:
        raise ConfigError(f"The plan cannot be read: {err.strerror}.", where=str(path), fix=fix) from err
    except (ValueError, ValidationError, RecursionError) as err:
        raise ConfigError("This file is not a plan.", where=str(path), fix=fix) from err
    if plan.made_for is None:
        raise ConfigError("This plan does not say what it was made for.", where=str(path), fix=fix)
    return plan


def check_replayable(plan: Plan, config: TrainConfig, devices: DeviceSpec, place: env.ProcessRank | None) -> None:
    """ConfigError or DeviceError if the plan was made for another model, other data or other devices."""
    made_for = plan.made_for
    assert made_for is not None
    here = inputs_of(config, devices)
    changed = sorted(_changed(made_for.config, here.config))
    if changed:
        raise _refused(f"it was made with another value of {', '.join(changed)}")
    if None not in (made_for.model_digest, here.model_digest) and made_for.model_digest != here.model_digest:
        raise _refused(f"the config.json of {config.model.path} is another one")
    if made_for.data_digest is not None and made_for.data_digest != here.data_digest:
        raise _refused(f"the data at {config.data.path} is other data")
    if place is not None and place.world_size != plan.world_size:
        raise _refused(f"it is for {plan.world_size} process(es), and the launcher started {place.world_size}")
    if plan.device == "cuda":
        _check_gpus(plan, made_for.gpus, devices, place)


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"This plan cannot be replayed: {why}.", fix="Plan again with `pantheraml plan`, or train without --plan."
    )


def _check_gpus(plan: Plan, planned: tuple[GPU, ...], devices: DeviceSpec, place: env.ProcessRank | None) -> None:
    local = plan.world_size if place is None else place.local_world_size or 1
    if place is None and plan.world_size > len(plan.device_ids) and not plan.copies and plan.split is None:
        raise _refused(f"it is for {plan.world_size} GPUs of several nodes; start it with --nnodes or a launcher")
    found = {gpu.index: gpu for gpu in devices.gpus}
    missing = [index for index in plan.device_ids if index not in found]
    if missing or local > len(found):
        names = ", ".join(map(str, missing)) or f"{local} of them"
        raise DeviceError(
            f"This plan cannot be replayed: it uses GPU {names}, and usable are {sorted(found) or 'none'}.",
            fix="Plan again with `pantheraml plan`, or train without --plan.",
        )
    for before in (gpu for gpu in planned if gpu.index in plan.device_ids):
        now = found[before.index]
        if _model(before.name) != _model(now.name):
            raise _refused(f"GPU {now.index} is a {now.name}, and it was made for a {before.name}")
        if before.total_bytes and now.total_bytes and now.total_bytes < (1 - UNLIKE) * before.total_bytes:
            raise _refused(f"GPU {now.index} has less memory than it was made for")


def _model(name: str) -> str:
    """Return the GPU model's name, given by a driver or by a cluster description."""
    known = by_driver_name(name)
    if known is None:
        try:
            known = by_text(name)
        except ConfigError:
            return name
    return known.name


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key in sorted(_keys(before) | _keys(after)):
        if key not in _PATHS and _value(before, key) != _value(after, key):
            yield key


def _keys(config: dict[str, Any]) -> set[str]:
    sections = {f"{section}.{name}" for section in _SECTIONS for name in config.get(section, {})}
    return sections | set(_KEYS) | {f"train.{name}" for name in _TRAIN}


def _value(config: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    value = config.get(section)
    return value.get(name) if name and isinstance(value, dict) else value

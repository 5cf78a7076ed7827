"""Select GPUs by health, free memory and topology, with a reason.

A GPU that fails its health check, or of which other processes use more than the run leaves them, is passed over. Of
more GPUs than needed, those are taken that reach each other fastest. What CUDA_VISIBLE_DEVICES hides is not considered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pantheraml.base.env import ProcessRank
from pantheraml.devices.health import Health, judge_once
from pantheraml.devices.nvml import LEVELS, NoDriverError, Nvml
from pantheraml.devices.probe import VisibleGPU, probe, visible_gpus
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.plan import DeviceSpec
from pantheraml.specs.train import TrainConfig

FREE_SHARE = 0.5
"""Share of a GPU's memory that must be free; otherwise somebody else is using it."""

_NEARNESS = (*reversed(LEVELS.values()), "NVLink")

Connect = Callable[[int, int], str | None]


@dataclass(frozen=True)
class CandidateGPU:
    index: int
    total_bytes: int | None
    free_bytes: int | None
    health: Health

    @property
    def free_share(self) -> float | None:
        return None if self.free_bytes is None or not self.total_bytes else self.free_bytes / self.total_bytes


@dataclass(frozen=True)
class Selection:
    indices: tuple[int, ...]
    """Selected GPUs, in the order of the candidates."""
    reason: str
    passed_over: dict[int, str]
    """Why each other GPU is not used."""


def select(
    candidates: Sequence[CandidateGPU],
    *,
    count: int | None = None,
    free_share: float = FREE_SHARE,
    connection: Connect = lambda a, b: None,
) -> Selection:
    """Select `count` GPUs, or as many as are fit (None). If too few are fit, others are taken, the best first."""
    passed = {each.index: reason for each in candidates if (reason := _unfit(each, free_share)) is not None}
    fit = [each for each in candidates if each.index not in passed]
    least = 1 if count is None else count
    extra: list[int] = []
    if len(fit) < least:
        others = sorted((each for each in candidates if each.index in passed), key=_rank)
        taken = others[: least - len(fit)] if count is not None else others
        extra = [each.index for each in taken]
        fit = [each for each in candidates if each.index not in passed or each in taken]
    if count is None or len(fit) <= count:
        for index in extra:
            del passed[index]
        return Selection(tuple(each.index for each in fit), _reason(len(candidates), fit, passed, extra), passed)
    sound = [each for each in fit if each.health.status != "warn"]
    pool = sound if len(sound) >= count else fit
    chosen, how = _nearest(pool, count, connection)
    passed |= {each.index: "not needed" for each in fit if each.index not in chosen}
    return Selection(tuple(each.index for each in fit if each.index in chosen), f"{how}{_told(passed)}", passed)


def _unfit(each: CandidateGPU, free_share: float) -> str | None:
    if each.health.status == "fail":
        return each.health.reasons[0]
    share = each.free_share
    if share is not None and share < free_share:
        return f"only {100 * share:.0f} % of its memory is free"
    return None


def _rank(each: CandidateGPU) -> tuple[bool, float]:
    return each.health.status == "fail", -(each.free_share or 0.0)


def _reason(visible: int, fit: Sequence[CandidateGPU], passed: dict[int, str], extra: Sequence[int]) -> str:
    if extra:
        return f"too few of {visible} GPU(s) are healthy and free, so GPU {', '.join(map(str, extra))} is used, too"
    if not passed:
        return f"all {visible} visible GPU(s) are healthy and free"
    return f"{len(fit)} of {visible} GPU(s) are healthy and free{_told(passed)}"


def _told(passed: dict[int, str]) -> str:
    named = [f"GPU {index}: {why}" for index, why in passed.items() if why != "not needed"]
    return f" ({'; '.join(named)})" if named else ""


def _nearest(pool: Sequence[CandidateGPU], count: int, connection: Connect) -> tuple[set[int], str]:
    """Return the group with the best connections, found by adding the nearest GPU to each possible first one."""
    if count == 1:
        most = max(pool, key=lambda each: (round(10 * (each.free_share or 0.0)), -each.index))
        return {most.index}, f"GPU {most.index} has as much free memory as any"
    near = {(a.index, b.index): _nearness(connection(a.index, b.index)) for a in pool for b in pool if a is not b}
    groups = [_grow(first.index, [each.index for each in pool], count, near) for first in pool]
    best = min(groups, key=lambda group: (-sum(near[a, b] for a in group for b in group if a != b), sorted(group)))
    worst = min(near[a, b] for a in best for b in best if a != b)
    return set(best), f"of {len(pool)} GPU(s), these are the nearest to each other (by {_by(worst)})"


def _by(nearness: int) -> str:
    return "unknown links" if nearness < 0 else _NEARNESS[nearness]


def _grow(first: int, indices: Sequence[int], count: int, near: dict[tuple[int, int], int]) -> list[int]:
    group = [first]
    while len(group) < count:
        rest = [index for index in indices if index not in group]
        group.append(max(rest, key=lambda index: (sum(near[index, member] for member in group), -index)))
    return group


def _nearness(connection: str | None) -> int:
    return _NEARNESS.index(connection) if connection in _NEARNESS else -1


def select_here(count: int | None = None, *, free_share: float = FREE_SHARE) -> Selection:
    """Select among the GPUs of this host that are visible to CUDA."""
    try:
        session = Nvml()
    except NoDriverError as err:
        return Selection((), str(err), {})
    with session:
        visible = {each.index: each for each in visible_gpus(session)}
        return select(
            _candidates(visible),
            count=count,
            free_share=free_share,
            connection=lambda a, b: visible[a].gpu.connection(visible[b].gpu),
        )


def fit_here(*, free_share: float, among: Sequence[int] | None = None) -> Selection:
    """Return the visible GPUs, or those of `among`, that are healthy and have that share of their memory free."""
    try:
        session = Nvml()
    except NoDriverError as err:
        return Selection((), str(err), {})
    with session:
        candidates = _candidates({each.index: each for each in visible_gpus(session)})
    passed = {each.index: reason for each in candidates if (reason := _unfit(each, free_share)) is not None}
    if among is not None:
        passed |= {each.index: "not listed" for each in candidates if each.index not in among}
        passed |= dict.fromkeys(set(among) - {each.index for each in candidates}, "not visible")
    fit = [each for each in candidates if each.index not in passed]
    return Selection(tuple(each.index for each in fit), _reason(len(candidates), fit, passed, ()), passed)


def _candidates(visible: Mapping[int, VisibleGPU]) -> list[CandidateGPU]:
    found = []
    for index, each in visible.items():
        total, free = each.device.memory() or (None, None)
        found.append(CandidateGPU(index, total, free, judge_once(each.gpu)))
    return found


def devices_for_run(config: TrainConfig, place: ProcessRank | None = None) -> DeviceSpec:
    """Probe this host, and leave only the GPUs that a run should use.

    GPUs that the configuration names, by `device_ids` or `device_map`, are used as they are. So are all of them where a
    launcher starts every rank, as each rank decides for itself and all must come to the same result.
    """
    found, parallel = probe(), config.parallel
    named = parallel.device_ids is not None or config.model.device_map is not None
    if not found.gpus or config.device == "cpu" or named or place is not None:
        return found
    count = parallel.world_size
    if parallel.mode in (MultiGPUMode.NONE, MultiGPUMode.DATAPARALLEL):
        count = 1 if parallel.mode is MultiGPUMode.NONE else None
    if count is not None and count > len(found.gpus):
        return found  # an error, which the planner explains
    selected = select_here(count, free_share=parallel.memory_fraction or FREE_SHARE)
    gpus = tuple(gpu for gpu in found.gpus if gpu.index in selected.indices)
    return found.model_copy(update={"gpus": gpus, "selection": selected.reason}) if gpus else found

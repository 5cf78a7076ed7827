"""Where the cases of a suite find what they need: models and data, made once, logs, caches, other people's packages."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from inputs import write_full_sequences, write_uneven_documents

from pantheraml.base import env
from suites.case import QUANTISED, Case
from suites.process import Process, last_line

MODEL_SECONDS = 300
QUANTISE_SECONDS = 1200
TEXT = {"sequences": 32, "seq_len": 2048}
"""What models are quantised by: as many tokens as `pantheraml quantise` takes if nobody says otherwise."""


class ModelNotMade(RuntimeError):
    """A case's inputs are missing; its row says why."""


@dataclass(frozen=True)
class Workshop:
    """The folder in which cases run: models and data are made once, compiled kernels are kept per system."""

    folder: Path
    device: str | None = None
    """cpu, so that a test needs no GPU; None: whatever there is."""
    peers: Path | None = None
    """A folder of packages that cases through TRL find and ours on the command line do not: libraries import what they
    see, and our users need not have it. None: all is installed in one place."""
    extras: Path | None = None
    """A folder of packages that our cases find and others do not: those of our optional extras."""

    def model(self, name: str) -> Path:
        """Where it is, or will be."""
        return self.folder / "models" / name

    def make_model(self, name: str) -> None:
        """If it is not there; on the GPU. A folder under its final name is whole."""
        place = self.model(name)
        if place.exists():
            return
        aside = place.with_suffix(".unfinished")
        shutil.rmtree(aside, ignore_errors=True)
        shape = name.removesuffix(QUANTISED)
        if shape == name:
            command, seconds = (
                [sys.executable, str(Path(__file__).parents[1] / "inputs.py"), shape, str(aside)],
                MODEL_SECONDS,
            )
        else:
            self.make_model(shape)
            command, seconds = self.quantise_command(shape, aside), QUANTISE_SECONDS
        log = self.log(f"model-{name}")
        if Process(command, log, self._environment("models", [])).run(seconds) != 0:
            raise ModelNotMade(f"the {name} model could not be made: {last_line(log)}")
        aside.rename(place)

    def quantise_command(self, shape: str, output: Path) -> list[str]:
        """By random text, which is written first: what a model was quantised by changes neither speed nor memory."""
        text = self.folder / "data" / f"{shape}-text.jsonl"
        text.parent.mkdir(parents=True, exist_ok=True)
        write_full_sequences(text, shape=shape, **TEXT)
        places = ["--model", str(self.model(shape)), "--data", str(text), "--output", str(output)]
        where = [] if self.device is None else ["--device", self.device]
        return [sys.executable, "-m", "pantheraml.cli.main", "quantise", "--json", *places, *where]

    def data(self, case: Case) -> Path:
        place = self.folder / "data" / f"{case.shape}-{case.data}-{case.batch}x{case.seq}x{case.steps}.jsonl"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            aside = place.with_suffix(".unfinished")
            sequences = case.batch * (case.steps + 1)
            if case.data == "full":
                write_full_sequences(aside, shape=case.shape, sequences=sequences, seq_len=case.seq)
            else:
                write_uneven_documents(aside, shape=case.shape, tokens=sequences * case.seq, seq_len=case.seq)
            aside.rename(place)
        return place

    def output(self, case: Case) -> Path:
        return self.folder / "runs" / case.name

    def log(self, name: str) -> Path:
        place = self.folder / "logs" / f"{name}.log"
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def use_cache(self, case: Case) -> str:
        """cold or warm: whether a case of this system had its turn since its cache was last empty. From now on it had.

        A process that only waits may make the folder already, so that being there says nothing.
        """
        cache = self._cache(case.system)
        if case.cache == "fresh":
            shutil.rmtree(cache, ignore_errors=True)
        used = cache / "used"
        state = "warm" if used.exists() else "cold"
        cache.mkdir(parents=True, exist_ok=True)
        used.touch()
        return state

    def missing(self, case: Case) -> list[str]:
        """The packages that it needs and that are not there."""
        return [name for name in case.packages if not self._has(name)]

    def environment(self, case: Case) -> dict[str, str]:
        more = [(self.peers, case.path == "trl"), (self.extras, case.system == "pantheraml")]
        return self._environment(case.system, [str(folder) for folder, sees in more if folder is not None and sees])

    def _has(self, package: str) -> bool:
        beside = [] if self.peers is None else [str(self.peers)]
        return PathFinder.find_spec(package, beside) is not None or importlib.util.find_spec(package) is not None

    def _cache(self, system: str) -> Path:
        return self.folder / "caches" / system

    def _environment(self, system: str, more_packages: list[str]) -> dict[str, str]:
        """No network, no telemetry, and every cache of compiled code where it can be kept or removed."""
        cache = self._cache(system)
        given = os.environ.get("PYTHONPATH", "")
        paths = [str(Path(entry).resolve()) for entry in given.split(os.pathsep) if entry]  # cases have other folders
        return env.child_environment(
            PYTHONPATH=os.pathsep.join([*paths, *more_packages]) or None,
            PYTHONUNBUFFERED="1",
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            WANDB_DISABLED="true",
            UNSLOTH_DISABLE_STATISTICS="1",
            TOKENIZERS_PARALLELISM="false",
            PANTHERAML_CACHE=str(cache / "pantheraml"),
            TRITON_CACHE_DIR=str(cache / "triton"),
            TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
            UNSLOTH_COMPILE_LOCATION=str(cache / "unsloth"),
        )

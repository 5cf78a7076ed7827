"""Working folder of a suite: models and data, created once, logs, caches, and packages of other systems."""

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
from suites.case import QUANTIZED, Case
from suites.process import Process, last_line

MODEL_SECONDS = 300
QUANTIZE_SECONDS = 1200
TEXT = {"sequences": 32, "seq_len": 2048}
"""Calibration text: as many tokens as the default of `pantheraml quantize`."""


class ModelCreationError(RuntimeError):
    """The model of a case could not be created; its row gives the reason."""


@dataclass(frozen=True)
class SuiteFolder:
    """Folder in which cases run: models and data are created once, compiled kernels are cached per system."""

    folder: Path
    device: str | None = None
    """`cpu` for tests without a GPU; None: the default device."""
    peers: Path | None = None
    """Folder of packages visible only to cases through TRL: libraries import what they find, and users of our command
    line need not have them. None: everything is installed in one place."""
    extras: Path | None = None
    """Folder of packages visible only to our cases: those of our optional extras."""

    def model(self, name: str) -> Path:
        """Path of a model, whether it exists or not."""
        return self.folder / "models" / name

    def make_model(self, name: str) -> None:
        """Create the model if it does not exist, on the GPU. A folder under its final name is complete."""
        place = self.model(name)
        if place.exists():
            return
        aside = place.with_suffix(".unfinished")
        shutil.rmtree(aside, ignore_errors=True)
        shape = name.removesuffix(QUANTIZED)
        if shape == name:
            command, seconds = (
                [sys.executable, str(Path(__file__).parents[1] / "inputs.py"), shape, str(aside)],
                MODEL_SECONDS,
            )
        else:
            self.make_model(shape)
            command, seconds = self.quantize_command(shape, aside), QUANTIZE_SECONDS
        log = self.log(f"model-{name}")
        made = Process(command, log, self._environment("models", [])).run(seconds) == 0
        if not made and self._make_room(log, keep=shape):
            made = Process(command, log, self._environment("models", [])).run(seconds) == 0
        if not made:
            shutil.rmtree(aside, ignore_errors=True)  # other cases need the disk
            raise ModelCreationError(f"could not create the {name} model: {last_line(log)}")
        aside.rename(place)

    def _make_room(self, log: Path, *, keep: str) -> bool:
        """Remove the other models, which can be made again, if the disk was full; return whether there were any."""
        if "No space left" not in log.read_text(encoding="utf-8", errors="replace"):
            return False
        kept = self.model(keep)
        others = [place for place in (self.folder / "models").iterdir() if place != kept]
        for place in others:
            shutil.rmtree(place, ignore_errors=True)
        return bool(others)

    def quantize_command(self, shape: str, output: Path) -> list[str]:
        """Command that quantizes on random text, since the calibration text affects neither speed nor memory."""
        text = self.folder / "data" / f"{shape}-text.jsonl"
        text.parent.mkdir(parents=True, exist_ok=True)
        write_full_sequences(text, shape=shape, **TEXT)
        places = ["--model", str(self.model(shape)), "--data", str(text), "--output", str(output)]
        where = [] if self.device is None else ["--device", self.device]
        return [sys.executable, "-m", "pantheraml.cli.main", "quantize", "--json", *places, *where]

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
        """Mark the cache as used; return `cold` or `warm`, whether a case of this system ran since it was last emptied.

        A waiting process may create the folder already, so its existence alone does not tell.
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
        """Required packages that are not installed."""
        return [name for name in case.packages if not self._has(name)]

    def environment(self, case: Case) -> dict[str, str]:
        more = [(self.peers, case.path == "trl"), (self.extras, case.system == "pantheraml")]
        packages = [str(folder) for folder, sees in more if folder is not None and sees]
        return self._environment(case.system, packages) | case.environment

    def _has(self, package: str) -> bool:
        paths = [] if self.peers is None else [str(self.peers)]
        return PathFinder.find_spec(package, paths) is not None or importlib.util.find_spec(package) is not None

    def _cache(self, system: str) -> Path:
        return self.folder / "caches" / system

    def _environment(self, system: str, more_packages: list[str]) -> dict[str, str]:
        """Environment without network and telemetry, with all kernel caches in this folder."""
        cache = self._cache(system)
        given = os.environ.get("PYTHONPATH", "")
        paths = [str(Path(entry).resolve()) for entry in given.split(os.pathsep) if entry]  # cases run in other folders
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

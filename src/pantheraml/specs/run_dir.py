"""RunDir: the folder of a run, and the names of what lies in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from pantheraml.base.errors import RunDirectoryError
from pantheraml.base.events import FILE_NAME, read_events
from pantheraml.base.folders import write_text
from pantheraml.specs.config_file import dump_yaml, load_config
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def data_file(self) -> Path:
        """Where the prepared data lies; written by the `prepare` task for the `train` task."""
        return self.path / "data.json"

    @property
    def stop_file(self) -> Path:
        """Its presence asks the workers to save and leave."""
        return self.path / "stop-requested"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def holds_run(self) -> bool:
        return any(file.exists() for file in (self.config_file, self.path / FILE_NAME, self.checkpoints))

    def holds_work(self) -> bool:
        """Whether the run got as far as training; one that failed before (a bad row, say) has nothing to lose."""
        return self.checkpoints.exists() or any(event["kind"] == "train.started" for event in read_events(self.path))

    def config(self) -> TrainConfig:
        self.require()
        return load_config(self.config_file)

    def plan(self) -> Plan:
        return Plan.model_validate(json.loads(self.plan_file.read_text()))

    def write_config(self, config: TrainConfig) -> None:
        write_text(self.config_file, dump_yaml(config))

    def write_plan(self, plan: Plan) -> None:
        write_text(self.plan_file, json.dumps(plan.model_dump(mode="json"), indent=1))

    def trained(self) -> Path:
        """The folder with the trained weights."""
        for name in ("adapter", "model"):
            if (self.path / name).is_dir():
                return self.path / name
        raise RunDirectoryError(
            "This run has no trained weights yet.", where=str(self.path), todo="Finish it with `pantheraml resume`."
        )

    def require(self) -> None:
        if not self.config_file.is_file():
            raise RunDirectoryError(
                f"{self.path} is not a run folder: it has no config.yaml.",
                todo="Give the folder that `pantheraml train --output` made.",
            )

    def create(self, *, resume: bool, overwrite: bool) -> None:
        """Make the folder; one that holds another run, or anything else, is left alone unless told otherwise."""
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"The output {self.path} is a file.", todo="Choose another --output.")
        filled = self.path.is_dir() and any(self.path.iterdir())
        if filled and not self.holds_run():
            raise RunDirectoryError(
                f"The output folder {self.path} holds other files.", todo="Choose an empty or new folder for --output."
            )
        if filled and not resume and (overwrite or not self.holds_work()):
            shutil.rmtree(self.path)
        elif filled and not resume:
            raise RunDirectoryError(
                f"The output folder {self.path} already holds a run.",
                todo="Add --resume to continue it, --overwrite to replace it, or choose another --output.",
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self.stop_file.unlink(missing_ok=True)

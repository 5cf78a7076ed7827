"""Model and data of a configuration, looked at before anything is planned: are they there at all?"""

from __future__ import annotations

from pathlib import Path

from pantheraml.base.errors import DataError
from pantheraml.models.hub import config_folder
from pantheraml.specs.hf_config import read_hf_config
from pantheraml.specs.train import TrainConfig


def check_inputs(config: TrainConfig) -> None:
    """ModelError or DataError for what is not there. Data is read by the run itself."""
    read_hf_config(config_folder(config.model.path, revision=config.model.revision))
    for key, name in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if name is not None and not Path(name).exists():
            raise DataError(f"There is no data at {name}.", where=key, todo="Check the path.")

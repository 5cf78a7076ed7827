"""Sinks: other tools that get a run's metrics (TensorBoard, Weights & Biases, MLflow, trackio).

`open_sink(name, ...)` gives a reader. The tool's own package is imported only then; a package that is missing is an
error that names the extra to install.
"""

from pantheraml.readers.sinks import mlflow, tensorboard, trackio, wandb  # noqa: F401 - each registers itself
from pantheraml.readers.sinks.sink import open_sink, sink_names

__all__ = ["open_sink", "sink_names"]

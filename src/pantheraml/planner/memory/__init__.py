"""Memory of a training step, predicted from the model's sizes and the setting alone."""

from pantheraml.planner.memory.predict import predict_memory, why_not_predicted

__all__ = ["predict_memory", "why_not_predicted"]

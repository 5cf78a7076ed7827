from tests.unit.models.conftest import _quiet_transformers, tiny_model

__all__ = ["_quiet_transformers", "tiny_model"]

"""The self-hosted fine-tuning service: OpenAI's fine-tuning API over runs on this machine."""

from pantheraml.service.app import create_app, lifespan
from pantheraml.service.fine_tuning_service import FineTuningService, OptimizedFineTuningService
from pantheraml.service.middleware import Gate
from pantheraml.service.mountable import router
from pantheraml.service.settings import Settings

__all__ = ["FineTuningService", "Gate", "OptimizedFineTuningService", "Settings", "create_app", "lifespan", "router"]

"""The self-hosted fine-tuning service: OpenAI's fine-tuning API over runs on this machine."""

from pantheraml.service.app import create_app, lifespan
from pantheraml.service.fine_tuning_service import FineTuningService
from pantheraml.service.middleware import Gate
from pantheraml.service.routes.multigpu import router
from pantheraml.service.settings import Settings

__all__ = ["FineTuningService", "Gate", "Settings", "create_app", "lifespan", "router"]

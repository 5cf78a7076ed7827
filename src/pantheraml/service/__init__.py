"""The self-hosted fine-tuning service: OpenAI's fine-tuning API over runs on this machine."""

from pantheraml.service.app import create_app
from pantheraml.service.settings import Settings

__all__ = ["Settings", "create_app"]

"""Typed client of `pantheraml serve`: `Client` for plain programs, `AsyncClient` for asyncio. Without torch."""

from pantheraml.client.answers import Artifact, File, Job, JobEvent, JobPlan, Model, Series
from pantheraml.client.asynchronous import AsyncClient
from pantheraml.client.calls import Submission
from pantheraml.client.synchronous import Client

__all__ = [
    "Artifact",
    "AsyncClient",
    "Client",
    "File",
    "Job",
    "JobEvent",
    "JobPlan",
    "Model",
    "Series",
    "Submission",
]

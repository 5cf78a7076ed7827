"""`pantheraml serve`: the fine-tuning service, which speaks OpenAI's fine-tuning API."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

from pantheraml.base import env
from pantheraml.base.errors import ConfigError, MissingExtraError
from pantheraml.base.imports import quick_imports


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve", help="start the fine-tuning service", description="Serve OpenAI's fine-tuning API on this machine."
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on (8000); 0 = a free one")
    add_data_options(parser)
    parser.add_argument(
        "--models-dir", default="models", metavar="DIR", help="folder of the models that may be fine-tuned (models)"
    )
    parser.add_argument("--cpu-slots", type=int, metavar="N", help="processes of jobs at a time without GPUs")
    parser.add_argument(
        "--jobs-per-gpu", type=int, default=1, metavar="N", help="jobs at a time on a GPU, which share its memory (1)"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name of the service; may be repeated",
    )
    parser.add_argument("--max-file-gib", type=float, default=2, metavar="GIB", help="largest file of a user (2)")
    parser.add_argument("--max-user-gib", type=float, default=200, metavar="GIB", help="files and jobs of a user (200)")
    parser.add_argument("--max-running-per-user", type=int, metavar="N", help="jobs of a user at a time (no limit)")
    parser.add_argument(
        "--max-hours-per-user", type=float, metavar="HOURS", help="device hours of a user in 30 days (no limit)"
    )
    parser.add_argument(
        "--price-per-gpu-hour", type=float, metavar="PRICE", help="price for the costs of jobs (no costs are shown)"
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=300.0,
        metavar="N",
        help="alert if a job makes no progress for so long (300)",
    )
    parser.add_argument(
        "--keep-days",
        type=float,
        metavar="N",
        help="remove checkpoints, and jobs that made no model, N days after the job has ended (never)",
    )
    parser.add_argument(
        "--requests-per-minute", type=int, default=6000, metavar="N", help="requests of a key or an address (6000)"
    )
    parser.add_argument("--open-metrics", action="store_true", help="serve /metrics without an API key")
    parser.add_argument(
        "--chat-idle-seconds", type=float, default=300, metavar="S", help="unload the chat model after S seconds (300)"
    )
    parser.add_argument(
        "--inference-url", metavar="URL", help="OpenAI-compatible server (such as vLLM) that answers chat instead"
    )
    parser.add_argument(
        "--allow-private-webhooks", action="store_true", help="also send webhooks to this machine and its network"
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="wait while another service has the data, and take its place when it ends",
    )
    parser.add_argument("--insecure", action="store_true", help="serve other machines without API keys")
    return parser


def add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", default="service-data", metavar="DIR", help="files and jobs (service-data)")
    parser.add_argument("--database-url", metavar="URL", help="PostgreSQL (PANTHERAML_DATABASE_URL; else SQLite)")


def run(arguments: argparse.Namespace) -> int:
    require_service()
    with quick_imports():
        from pantheraml.service.serve import serve
        from pantheraml.service.settings import GIB, Settings

    for flag in ("--cpu-slots", "--jobs-per-gpu", "--max-running-per-user", "--requests-per-minute"):
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1.")
    for flag in ("--max-hours-per-user", "--price-per-gpu-hour", "--stall-seconds", "--keep-days"):
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{flag} must be a number from 0.")
    for flag in ("--max-file-gib", "--max-user-gib"):
        if not 0 < getattr(arguments, flag[2:].replace("-", "_")) < 1 << 30:
            raise ConfigError(f"{flag} must be a number above 0.")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError("--port must be between 0 and 65535.")
    if not arguments.chat_idle_seconds > 0:
        raise ConfigError("--chat-idle-seconds must be above 0.")
    settings = Settings(
        data_dir=Path(arguments.data_dir),
        models_dir=Path(arguments.models_dir),
        host=arguments.host,
        port=arguments.port,
        database_url=checked_database_url(arguments.database_url),
        insecure=arguments.insecure,
        allowed_hosts=tuple(map(_checked_host, arguments.allow_host)),
        cpu_slots=arguments.cpu_slots,
        jobs_per_gpu=arguments.jobs_per_gpu,
        max_file_bytes=int(arguments.max_file_gib * GIB),
        max_user_bytes=int(arguments.max_user_gib * GIB),
        max_running_per_user=arguments.max_running_per_user,
        max_hours_per_user=arguments.max_hours_per_user,
        price_per_gpu_hour=arguments.price_per_gpu_hour,
        stall_seconds=arguments.stall_seconds,
        keep_days=arguments.keep_days,
        requests_per_minute=arguments.requests_per_minute,
        open_metrics=arguments.open_metrics,
        chat_idle_seconds=arguments.chat_idle_seconds,
        allow_private_webhooks=arguments.allow_private_webhooks,
        standby=arguments.standby,
        inference_url=_checked_url(arguments.inference_url),
        inference_key=env.inference_key(),
    )
    return serve(settings)


def _checked_host(name: str) -> str:
    """Return the name. ConfigError if it has a scheme or a port: it would never match."""
    if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+", name):
        raise ConfigError(
            f"--allow-host {name!r} is not the name of a host.",
            fix="Give a name such as tune.example.com, without scheme and port.",
        )
    return name


def _checked_url(url: str | None) -> str | None:
    """Return the URL. ConfigError unless it is http or https."""
    if url is not None and not re.fullmatch(r"https?://[^/@\s?#]+(/[^\s?#]*)?", url):
        raise ConfigError(
            "--inference-url must be a URL such as http://127.0.0.1:8001/v1.",
            fix="A key of that server belongs in PANTHERAML_INFERENCE_KEY.",
        )
    return url


def checked_database_url(url: str | None) -> str | None:
    """Return the URL, or that of the environment. ConfigError unless it is PostgreSQL's; the message does not repeat
    it, since it may contain a password."""
    url = url or env.database_url()
    if url is not None and not url.startswith(("postgresql://", "postgres://")):
        raise ConfigError("--database-url must begin with postgresql://.", fix="Leave it out to use SQLite.")
    return url


def require_service() -> None:
    """MissingExtraError unless the extra is installed."""
    from importlib.util import find_spec

    names = (
        "fastapi",
        "uvicorn",
        "sqlalchemy",
        "alembic",
        "aiosqlite",
        "python_multipart",
        "limits",
        "prometheus_client",
    )
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"The service needs {', '.join(missing)}.", fix="Install it with: pip install 'pantheraml[service]'"
        )

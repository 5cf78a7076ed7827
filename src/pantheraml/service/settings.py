"""Settings of the service: the options of `pantheraml serve`, and the folders derived from them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from pantheraml.base.errors import ConfigError
from pantheraml.base.private import private_folder
from pantheraml.service.jobs.scheduler import Allowance

GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    data_dir: Path
    """Uploaded files, jobs, and the database if it is SQLite."""
    models_dir: Path
    """Models that may be fine-tuned are folders below this one."""
    host: str = "127.0.0.1"
    port: int = 8000
    database_url: str | None = None
    """None = SQLite in data_dir."""
    insecure: bool = False
    """Serve without keys on an address that others can reach."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional host names of the service, as in the header Host."""
    standby: bool = False
    """While another service has the data folder, wait, and take its place when it ends."""
    cpu_slots: int | None = None
    """Processes of jobs at a time on a machine without GPUs; None = one per core."""
    jobs_per_gpu: int = 1
    """Jobs at a time on a GPU, each with an equal share of its memory."""
    max_file_bytes: int = 2 * GIB
    max_user_bytes: int = 200 * GIB
    """Total size of one user's files and jobs."""
    max_queued_per_user: int = 1000
    requests_per_minute: int = 6000
    """Per key, or per address where there are no keys."""
    max_running_per_user: int | None = None
    """Jobs at a time; None: no limit."""
    max_hours_per_user: float | None = None
    """Hours of GPUs (of CPU slots, without any) in the last 30 days; None: no limit."""
    price_per_gpu_hour: float | None = None
    """Price per hour, in any currency; None: no costs are shown."""
    stall_seconds: float = 300.0
    """A running job without progress for so long, and for ten steps, raises an alert."""
    keep_days: float | None = None
    """Jobs that made no model, and checkpoints, are removed so long after the job has ended; None: never."""
    open_metrics: bool = False
    """Serve `/metrics` without a key."""
    max_attempts: int = 3
    """Starts of a job whose processes were killed or crashed; a start that reached a new checkpoint does not count."""

    chat_idle_seconds: float = 300.0
    """The chat worker exits after so many seconds without a request."""
    chat_max_waiting: int = 32
    """Chat requests in the queue; more are refused."""
    inference_url: str | None = None
    """The operator's inference server that answers chat instead, such as vLLM: `http://127.0.0.1:8001/v1`."""
    inference_key: str | None = field(default=None, repr=False)
    """API key of that server."""

    allow_private_webhooks: bool = False
    """Send webhooks to loopback and private addresses, and without TLS."""

    @property
    def allowance(self) -> Allowance:
        return Allowance(self.max_running_per_user, self.max_hours_per_user)

    @property
    def files(self) -> Path:
        return self.data_dir / "files"

    @property
    def incoming(self) -> Path:
        """Uploads that are not complete."""
        return self.data_dir / "incoming"

    @property
    def uploads(self) -> Path:
        """Parts of uploads that are not complete."""
        return self.data_dir / "uploads"

    @property
    def jobs(self) -> Path:
        return self.data_dir / "jobs"

    @property
    def chat(self) -> Path:
        """Where the chat worker writes its log."""
        return self.data_dir / "chat"

    @property
    def cache(self) -> Path:
        return self.data_dir / "cache"

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database, with an asynchronous driver."""
        if self.database_url is None:
            return f"sqlite+aiosqlite:///{self.data_dir.resolve() / 'service.db'}"
        for plain in ("postgresql://", "postgres://"):
            if self.database_url.startswith(plain):
                return f"postgresql+asyncpg://{self.database_url.removeprefix(plain)}"
        return self.database_url

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def claim_folder(path: Path) -> None:
    """Make a folder of the service, private to this user. ConfigError if that is not possible."""
    try:
        private_folder(path)
    except OSError as err:
        raise ConfigError(
            f"The folder of the service cannot be used: {err.strerror or err}.",
            where=str(path),
            fix="Choose another --data-dir.",
        ) from err


def default_settings() -> Settings:
    """Settings of a service inside another program."""
    return Settings(Path("service-data"), Path("models"))

"""The client of the service for plain programs; `asynchronous` has the same with `await`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import httpx2

from pantheraml.base.errors import DataError, PantheraError, ServiceUnavailableError
from pantheraml.client import calls, failures
from pantheraml.client.answers import Artifact, File, Job, JobEvent, JobPlan, Model, Series
from pantheraml.client.calls import Call, Submission
from pantheraml.client.connection import RETRIES, connection
from pantheraml.client.download import Download
from pantheraml.specs.service_api import Devices, Overview, Queue, UsageReport

Answer = TypeVar("Answer")
POLL_SECONDS = 1.0
_BLOCK = 1 << 20


class Client:
    """A service (`pantheraml serve`), over connections that are kept.

        with Client() as client:
            file = client.files.upload("train.jsonl")
            job = client.jobs.submit(Submission(model="tiny", training_file=file.id))
            for event in client.jobs.stream(job.id):
                print(event.message)
            client.jobs.download(job.id, "adapter/adapter_model.safetensors", "adapter.safetensors")

    `url` None: PANTHERAML_URL, else this machine; `key` None: PANTHERAML_API_KEY. What the service refuses raises the
    class that it names, else ServiceError; ServiceUnavailableError if it does not answer after some attempts.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, retries: int = RETRIES) -> None:
        self._connection, self._retries = connection(url, key), retries
        self.url = self._connection.url
        self.http = httpx2.Client(**self._connection.options())
        self.files, self.jobs = Files(self), Jobs(self)

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def models(self) -> list[Model]:
        """Base models that may be fine-tuned, and models that your jobs have made."""
        return self.send(calls.models())

    def gpus(self) -> Devices:
        return self.send(calls.gpus())

    def queue(self, limit: int = 1000) -> Queue:
        return self.send(calls.queue(limit))

    def move(self, job_id: str, before: str | None) -> Queue:
        """Move a queued job before another one; None: to the end. For administrators."""
        return self.send(calls.move(job_id, before))

    def overview(self) -> Overview:
        return self.send(calls.overview())

    def usage(
        self, group_by: Literal["user", "job"] = "user", start: float | None = None, end: float | None = None
    ) -> UsageReport:
        return self.send(calls.usage(group_by, start, end))

    def send(self, call: Call[Answer]) -> Answer:
        """Send a call, and retry if it failed to arrive: all calls are idempotent."""
        for attempt in range(self._retries + 1):
            wait: str | None = None
            try:
                response = self.http.request(
                    call.method, call.path, params=call.params, json=call.json, headers=call.headers
                )
            except httpx2.HTTPError as err:
                failure: PantheraError = failures.unreachable(err, self.url)
            else:
                if response.is_success:
                    return failures.parsed(call, response)
                failure = _refusal(response)
                wait = response.headers.get("retry-after")
            if not isinstance(failure, ServiceUnavailableError) or attempt == self._retries:
                raise failure
            time.sleep(failures.pause_before(attempt, wait))
        raise AssertionError("unreachable")

    def fetch(self, path: str, target: Path) -> Path:
        """Download content into a file, continuing an earlier attempt."""
        download, failed = Download(target), 0
        target.parent.mkdir(parents=True, exist_ok=True)
        while not download.is_whole:
            before = download.have
            try:
                self._fetch_more(download, path)
            except (httpx2.HTTPError, ServiceUnavailableError) as err:
                failed = 0 if download.have > before else failed + 1
                if failed > self._retries:
                    if isinstance(err, httpx2.HTTPError):
                        raise failures.unreachable(err, self.url) from err
                    raise
                time.sleep(failures.pause_before(failed))
        return download.finish()

    def _fetch_more(self, download: Download, path: str) -> None:
        with self.http.stream("GET", path, headers=download.headers()) as response:
            if response.status_code == 416:  # an empty file has no first byte
                download.etag, download.total = "empty", 0
                download.open().close()
                return
            if not response.is_success:
                response.read()
                raise _refusal(response)
            if download.etag is None:
                download.learn(response)
                return
            offset = download.begin(response)
            with download.open(offset) as file:
                for block in response.iter_bytes(_BLOCK):
                    file.write(block)


def _refusal(response: httpx2.Response) -> PantheraError:
    return failures.refused(response.status_code, response.content, response.headers.get("x-request-id"))


class Files:
    """Training data, and what jobs have written."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def upload(self, path: str | os.PathLike[str], purpose: str = "fine-tune") -> File:
        """Upload a file; DataError with line and reason if a row is invalid."""
        place = Path(path)
        try:
            content = open(place, "rb")  # noqa: SIM115 - closed below
        except OSError as err:
            raise DataError(
                f"{place} cannot be read: {err.strerror}.", fix="Check the path and its permissions."
            ) from err
        with content:
            try:
                response = self._client.http.post(
                    "/v1/files", data={"purpose": purpose}, files={"file": (place.name, content)}
                )
            except httpx2.HTTPError as err:
                raise failures.unreachable(err, self._client.url) from err
        if not response.is_success:
            raise _refusal(response)
        return failures.parsed(Call("POST", "/v1/files", File.model_validate), response)

    def list(self, purpose: str | None = None) -> list[File]:
        return self._client.send(calls.list_files(purpose))

    def get(self, file_id: str) -> File:
        return self._client.send(calls.get_file(file_id))

    def delete(self, file_id: str) -> None:
        self._client.send(calls.delete_file(file_id))

    def download(self, file_id: str, target: str | os.PathLike[str]) -> Path:
        return self._client.fetch(calls.content_path(file_id), Path(target))


class Jobs:
    def __init__(self, client: Client) -> None:
        self._client = client

    def submit(self, submission: Submission) -> Job:
        return self._client.send(calls.submit(submission))

    def plan(self, submission: Submission) -> JobPlan:
        """Plan a job without queueing it: devices, memory and time, with reasons."""
        return self._client.send(calls.plan(submission))

    def list(self, limit: int | None = None) -> list[Job]:
        """The newest first; None: all."""
        found: list[Job] = []
        more = True
        while more and calls.take(found, limit) > 0:
            page = self._client.send(calls.list_jobs(found[-1].id if found else None, calls.take(found, limit)))
            found += page.data
            more = page.has_more
        return found

    def get(self, job_id: str) -> Job:
        return self._client.send(calls.get_job(job_id))

    def pause(self, job_id: str) -> Job:
        """Save its state and free its devices."""
        return self._client.send(calls.change_job(job_id, "pause"))

    def resume(self, job_id: str) -> Job:
        return self._client.send(calls.change_job(job_id, "resume"))

    def cancel(self, job_id: str) -> Job:
        return self._client.send(calls.change_job(job_id, "cancel"))

    def delete_checkpoints(self, job_id: str) -> None:
        """Remove the checkpoints of a job that has ended, which count against the quota of its user."""
        self._client.send(calls.delete_checkpoints(job_id))

    def wait(self, job_id: str) -> Job:
        """Wait for the job to end, and return it."""
        for _ in self.stream(job_id):
            pass
        return self.get(job_id)

    def events(self, job_id: str, limit: int = 100) -> Sequence[JobEvent]:
        """The newest first."""
        return self._client.send(calls.events(job_id, limit))

    def stream(self, job_id: str, after: str | None = None) -> Iterator[JobEvent]:
        """Events as they come, from the first one or after one, until the job has ended. Reconnects if the connection
        is lost; no event is lost or repeated."""
        failed = 0
        while True:
            try:
                with self._client.http.stream(
                    "GET", calls.stream_path(job_id), headers={} if after is None else {"last-event-id": after}
                ) as response:
                    if not response.is_success:
                        response.read()
                        raise _refusal(response)
                    for each in httpx2.EventSource(response):
                        failed = 0
                        if each.event == "end":
                            return
                        event = JobEvent.model_validate_json(each.data)
                        after = event.id
                        yield event
                failure: PantheraError = ServiceUnavailableError("The service ended the stream before the job ended.")
            except httpx2.HTTPError as err:
                failure = failures.unreachable(err, self._client.url)
            except ServiceUnavailableError as err:
                failure = err
            failed += 1
            if failed > self._client._retries:
                raise failure
            time.sleep(failures.pause_before(failed))

    def series(self, job_id: str, metric: str = "train_loss", after: int = 0, points: int | None = None) -> Series:
        """A metric over steps, downsampled by the service to about `points` (2,000)."""
        return self._client.send(calls.series(job_id, metric, after, points))

    def logs(self, job_id: str, tail: int | None = None) -> str:
        """Output of the job's processes so far; `tail`: only the last bytes."""
        return self.read_log(job_id, f"bytes=-{tail}" if tail else "bytes=0-").decode(errors="replace")

    def follow_logs(self, job_id: str) -> Iterator[str]:
        """Output of the job's processes as it comes, until the job has ended."""
        offset = 0
        while True:
            ended = self.get(job_id).has_ended  # first: what it wrote before it ended is then read below
            content = self.read_log(job_id, f"bytes={offset}-")
            offset += len(content)
            if content:
                yield content.decode(errors="replace")
            elif ended:
                return
            else:
                time.sleep(POLL_SECONDS)

    def read_log(self, job_id: str, range: str) -> bytes:
        """A range of the output; empty if there is none yet."""
        try:
            response = self._client.http.get(calls.logs_path(job_id), headers={"range": range})
        except httpx2.HTTPError as err:
            raise failures.unreachable(err, self._client.url) from err
        if response.status_code == 416:
            return b""
        if response.is_success:
            return response.content
        raise _refusal(response)

    def artifacts(self, job_id: str) -> Sequence[Artifact]:
        return self._client.send(calls.artifacts(job_id))

    def merge(self, job_id: str) -> None:
        """Have the service merge the adapter into its base, which adds the artifacts `merged/...`; return when they are
        there."""
        answer = self._client.send(calls.merge(job_id, "POST"))
        while not calls.merged(answer):
            time.sleep(POLL_SECONDS)
            answer = self._client.send(calls.merge(job_id, "GET"))

    def download(self, job_id: str, name: str, target: str | os.PathLike[str]) -> Path:
        """Fetch one of a job's artifacts."""
        return self._client.fetch(calls.artifact_path(job_id, name), Path(target))

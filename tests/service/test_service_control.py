"""Cancel, pause and resume jobs; the supervisor and the service may be killed at any time."""

from __future__ import annotations

import contextlib
import io
import tarfile
import time
from collections.abc import Callable
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from pantheraml.devices.probe import cpu_count
from tests import toy
from tests.service.conftest import Server, jsonl, wait_for, wait_until


def submit(client: OpenAI, file: str, *, epochs: int = 2, **own: Any) -> Any:
    return client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file,
        seed=5,
        hyperparameters={"n_epochs": epochs, "batch_size": 4},
        extra_body={"pantheraml": own},
    )


def weights(client: OpenAI, job: Any) -> bytes:
    """Trained weights of a job that succeeded."""
    with tarfile.open(fileobj=io.BytesIO(client.files.content(job.result_files[1]).read())) as archive:
        file = archive.extractfile("adapter/adapter_model.safetensors")
        assert file is not None
        return file.read()


def steps(client: OpenAI, job_id: str) -> list[int]:
    events = client.fine_tuning.jobs.list_events(job_id, limit=10_000).data
    return [event.data["step"] for event in reversed(events) if event.kind == "train.step"]  # type: ignore[attr-defined, union-attr, index]


def messages(client: OpenAI, job_id: str) -> list[str]:
    return [event.message for event in reversed(client.fine_tuning.jobs.list_events(job_id, limit=10_000).data)]


@pytest.mark.extended
def test_pause_and_resume_continue_exactly(server: Server, client: OpenAI, training_file: str) -> None:
    """Bit-equal, also over a start that was killed together with its supervisor."""
    whole = submit(client, training_file, epochs=80)
    paused = submit(client, training_file, epochs=80, config={"checkpoint": {"every_steps": 20}})
    wait_until(lambda: len(steps(client, paused.id)) > 3)
    shares = [{core for each in server.processes(job.id) for core in each.cpu_affinity()} for job in (whole, paused)]
    assert cpu_count() < 2 or not shares[0] & shares[1], "two jobs side by side do not take each other's cores"
    with server.suspended(paused.id):  # it may not end before it is asked
        client.fine_tuning.jobs.pause(paused.id)
    stopped = wait_for(client, paused.id, "paused")
    assert stopped.status == "queued", "OpenAI's wire has no such state"
    assert stopped.waiting_reason == "it is paused; resume it"
    assert not server.processes(paused.id)
    until = steps(client, paused.id)[-1]
    assert until < 480, "it was paused in its midst"
    client.fine_tuning.jobs.resume(paused.id)
    wait_until(lambda: max(steps(client, paused.id)) > until + 25)  # a checkpoint later
    supervisor = next(p for p in server.processes(paused.id) if "pantheraml.runs.supervisor" in p.cmdline())
    supervisor.kill()
    done = wait_for(client, paused.id, "succeeded")
    assert done.starts == 3
    assert any("Its supervisor was killed" in message for message in messages(client, paused.id))
    assert weights(client, done) == weights(client, wait_for(client, whole.id, "succeeded"))


@pytest.mark.extended
@pytest.mark.seed("S4-164")
def test_cancel_ends_all_processes_within_ten_seconds(server: Server, client: OpenAI, training_file: str) -> None:
    job = submit(client, training_file, epochs=10_000, processes=2)
    wait_for(client, job.id, "running")
    running = server.processes(job.id)
    assert len(running) >= 4, "the supervisor, the agent and two workers"
    begin = time.monotonic()
    client.fine_tuning.jobs.cancel(job.id)
    client.fine_tuning.jobs.cancel(job.id)
    done = wait_for(client, job.id, "cancelled")
    _, alive = psutil.wait_procs(running, timeout=1)
    assert time.monotonic() - begin <= 10
    assert not alive
    assert (done.status, done.finished_at is not None) == ("cancelled", True)
    with pytest.raises(openai.BadRequestError, match="cancelled cannot be told to resume"):
        client.fine_tuning.jobs.resume(job.id)


@pytest.mark.extended
def test_a_stubborn_supervisor_is_killed(server: Server, client: OpenAI, training_file: str) -> None:
    job = submit(client, training_file, epochs=10_000)
    wait_for(client, job.id, "running")
    running = server.processes(job.id)
    next(p for p in running if "pantheraml.runs.supervisor" in p.cmdline()).suspend()
    begin = time.monotonic()
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, job.id, "cancelled")
    assert time.monotonic() - begin <= 10
    assert not psutil.wait_procs(running, timeout=1)[1]


@pytest.mark.extended
def test_a_job_whose_service_and_processes_are_gone_is_resumed(own_server: Callable[..., Server]) -> None:
    """As after a reboot: nothing runs, and no exit was recorded."""
    server = own_server("--cpu-slots", "1")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune")
    job = submit(client, file.id, epochs=200, config={"checkpoint": {"every_steps": 10}})
    waiting = submit(client, file.id, hold=True)
    wait_until(lambda: any("Checkpoint of step 10" in message for message in messages(client, job.id)))
    server.kill()
    for process in server.processes():
        process.kill()
    server.start()
    client = server.client()
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).starts == 2)  # type: ignore[attr-defined]
    assert client.fine_tuning.jobs.retrieve(waiting.id).state == "paused"  # type: ignore[attr-defined]
    wait_until(lambda: any("Training from step " in m and "from step 1 " not in m for m in messages(client, job.id)))
    assert len(steps(client, job.id)) > 10
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, job.id, "cancelled")


@pytest.mark.extended
def test_a_job_ends_when_its_maximum_runtime_is_over(server: Server, client: OpenAI, training_file: str) -> None:
    """Runtime is that of all starts: what it was paused does not count, and what it ran before does."""
    job = submit(client, training_file, epochs=10_000, max_runtime_seconds=45)
    wait_until(lambda: len(steps(client, job.id)) > 3)
    client.fine_tuning.jobs.pause(job.id)
    wait_for(client, job.id, "paused")
    client.fine_tuning.jobs.resume(job.id)
    done = wait_for(client, job.id, "cancelled")
    assert (done.status, done.error.code, done.starts) == ("cancelled", "max_runtime", 2)
    assert 45 <= done.cpu_slot_hours * 3600 <= 75
    assert "Cancelled: its maximum runtime is over" in messages(client, job.id)
    assert not server.processes(job.id)


@pytest.mark.extended
def test_a_job_that_crashes_at_every_start_fails(server: Server, client: OpenAI, training_file: str) -> None:
    job = submit(client, training_file, epochs=10_000)
    for start in (1, 2, 3):
        wait_until(lambda start=start: server.processes(f"{job.id}:{start}"))
        for process in server.processes(f"{job.id}:{start}"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    done = wait_for(client, job.id, "failed")
    assert (done.error.code, done.starts) == ("crashed", 3)
    assert "crashed 3 times in a row without a new checkpoint" in done.error.message
    assert "Queued again; it continues from the beginning" in messages(client, job.id)
    assert not server.processes(job.id)


def test_jobs_wait_and_say_why(client: OpenAI, training_file: str) -> None:
    held = submit(client, training_file, hold=True)
    assert (held.state, held.status, held.queue_position) == ("paused", "queued", None)
    cancelled = client.fine_tuning.jobs.cancel(held.id)
    assert (cancelled.status, cancelled.starts) == ("cancelled", 0)
    assert messages(client, held.id) == [
        *("Created fine-tuning job", "Files validated, job queued", "Submitted on hold", "Cancelled")
    ]


@pytest.mark.extended
@pytest.mark.seed("S4-154")
def test_jobs_that_cannot_start_have_a_place_in_the_queue(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "1")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    first = submit(client, file, epochs=10_000, priority=5)
    wait_for(client, first.id, "starting", "running")
    second, third = submit(client, file), submit(client, file)
    urgent = submit(client, file, priority=5)

    def shown(job: Any) -> Any:
        return client.fine_tuning.jobs.retrieve(job.id)

    wait_until(lambda: [shown(job).queue_position for job in (urgent, second, third)] == [1, 2, 3])
    assert shown(urgent).waiting_reason == "needs 1 of 1 devices; 0 free"
    assert shown(second).estimated_start is None, "the plan of a tiny model on a CPU predicts no time"
    start = wait_until(lambda: shown(urgent).estimated_start)
    assert start > time.time(), "told by the pace of the job that runs"
    assert shown(first).estimated_finish == pytest.approx(start, rel=0.1)
    for job in (first, second, third, urgent):
        client.fine_tuning.jobs.cancel(job.id)
    wait_for(client, first.id, "cancelled")


@pytest.mark.extended
@pytest.mark.seed("S4-154")
def test_a_job_of_higher_priority_has_a_running_one_paused(own_server: Callable[..., Server]) -> None:
    """It continues exactly, though the service is killed while it saves its state."""
    server = own_server("--cpu-slots", "1")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    alone = wait_for(client, submit(client, file, epochs=40).id, "succeeded")
    low = submit(client, file, epochs=40, priority=-1)
    wait_until(lambda: len(steps(client, low.id)) > 3)
    with server.suspended(low.id):  # it may not end, nor be paused, before the service is killed
        urgent = submit(client, file)
        making_room: Any = wait_for(client, low.id, "pausing")
        assert making_room.preempted_by == urgent.id
        server.kill()
        server.start()
    client = server.client()
    assert wait_for(client, low.id, "queued").preempted_by == urgent.id
    assert steps(client, low.id)[-1] < 240, "it was paused in its midst"
    wait_for(client, urgent.id, "succeeded")
    done = wait_for(client, low.id, "succeeded")
    assert (done.starts, done.preempted_by) == (2, None)
    assert f"Pausing: {urgent.id} has a higher priority" in messages(client, low.id)
    assert weights(client, done) == weights(client, alone)

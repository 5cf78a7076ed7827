"""Whatever is killed meanwhile, every job ends right, and none runs twice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import psutil
import pytest

from tests import toy
from tests.service.conftest import Server, jsonl, wait_for, wait_until
from tests.service.test_service_control import steps, submit, weights

CHECKPOINT_STEPS = 10


def kill(server: Server, kind: str, rng: random.Random) -> None:
    if kind == "service":
        server.kill()
        server.start()
        return
    found = []
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if ("pantheraml.runs.supervisor" in process.cmdline()) is (kind == "supervisor"):
                found.append(process)
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # all of this kind have just ended
        rng.choice(found).kill()


@pytest.mark.extended
@pytest.mark.seed("S4-164", "S4-166", "C24")
def test_jobs_end_right_whatever_is_killed(own_server: Callable[..., Server]) -> None:
    rng = random.Random(1)
    server = own_server("--cpu-slots", "2")
    client = server.client()
    file = client.files.create(file=jsonl(toy.arithmetic(24)), purpose="fine-tune").id
    settings = {"checkpoint": {"every_steps": CHECKPOINT_STEPS}}
    jobs = [submit(client, file, epochs=60, config=settings).id for _ in range(3)]

    def progress() -> int:
        return sum(max(steps(server.client(), job), default=0) for job in jobs)

    for kind in ("supervisor", "service", "worker", "service", "supervisor"):
        before = progress()
        wait_until(lambda before=before: progress() > before + 3 * CHECKPOINT_STEPS or progress() == 360 * len(jobs))
        kill(server, kind, rng)
    done = [wait_for(server.client(), job, "succeeded") for job in jobs]
    assert len({weights(server.client(), job) for job in done}) == 1, "the same job gives the same weights"
    assert all(max(steps(server.client(), job)) == 360 for job in jobs)
    assert sum(job.starts for job in done) > len(jobs), "some were started again"
    assert not server.processes()

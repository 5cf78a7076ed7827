"""Chaos: twenty random failures of every kind in a run of two ranks do not change its result."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from pantheraml.specs.faults import fail_at
from tests.e2e.conftest import Playground, result_of
from tests.event_log import raw_events
from tests.harness import values

pytestmark = pytest.mark.extended

STEPS = 30
SEED = 7
DEATHS = ("kill", "raise", "hang")
"""After each of these the processes start again."""
PASSING = {"nan": 6, "bit_flip": 6, "slow": 4}
"""Kinds that the processes live through, and how often they come."""


def draw(seed: int) -> list[str]:
    """Twenty faults at twenty steps. Memory runs out in the first step, as it does: the calm run has smaller passes."""
    dice = random.Random(seed)
    kinds = [*DEATHS, *(kind for kind, count in PASSING.items() for _ in range(count))]
    steps = dice.sample(range(2, STEPS + 1), len(kinds))
    faults = [fail_at(dice.randrange(2), step, kind) for step, kind in zip(steps, kinds, strict=True)]  # type: ignore[arg-type]
    return [fail_at(dice.randrange(2), 1, "oom"), *faults]


def settings(**values: object) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


@pytest.mark.seed("S1-133", "S3-072")
@pytest.mark.timeout(1500)
def test_twenty_failures_change_nothing(playground: Playground) -> None:
    faults = draw(SEED)
    assert len(set(faults)) == 20
    same = settings(train__max_steps=STEPS, checkpoint__every_steps=3, method__dropout=0.1, method__rank=4)
    calm = playground.train("runs/calm", "--nproc", "2", *same, *settings(train__micro_batch_size=1))
    assert calm.code == 0, calm

    chaos = settings(
        faults=json.dumps(faults),
        parallel__restart_on="[killed, failed, hung]",
        parallel__timeout_seconds=15,
        parallel__grace_seconds=2,
        train__micro_batch_size=2,
    )
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": "1"})
    ended = result_of(tested.start_training("runs/chaos", "--nproc", "2", *same, *chaos), timeout=1000)
    assert ended.code == 0, ended
    run = playground.root / "runs/chaos"
    assert sorted(path.name.replace("-", ":") for path in (run / "faults").iterdir()) == sorted(faults)

    events = raw_events(run)
    assert len(values(events, "train.started", "first_step")) == 1 + len(DEATHS) + 1, (
        "one for each death, and for memory"
    )
    messages = "\n".join(values(events, "run.restarted", "message"))
    for expected in (
        "killed by SIGKILL",
        "injected fault",
        "is stuck in hang",
        "with 2 sequences at a time, the machine ran out",
    ):
        assert expected in messages
    assert json.loads((run / "run.json").read_text())["error"] is None
    wrong = PASSING["nan"] + PASSING["bit_flip"]
    assert Counter(values(events, "verdict", "action")) == {"retry": wrong}
    adapters = [playground.root / "runs" / name / "adapter/adapter_model.safetensors" for name in ("calm", "chaos")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()

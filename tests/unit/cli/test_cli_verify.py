"""Output of `pantheraml verify`."""

from __future__ import annotations

import pytest

from pantheraml.cli.verify import show
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.tasks import ModeVerdict, Verdicts


def test_every_verdict_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    measured = {"loss": 1e-7, "gradient": 2e-7, "weights": 3e-7, "seconds": 1.0}
    two = ParallelDims(replicate=2)
    verdicts = Verdicts(
        device="cpu",
        precision="fp32",
        steps=5,
        tolerance=1e-5,
        weights_tolerance=1e-4,
        tolerance_reason="float32",
        seconds_of_one=2.0,
        notes=["compared without dropout (resid_dropout): each process draws its own"],
        modes=[
            ModeVerdict(mode="ddp", dims=two, batch_shares=[1, 6], **measured, passed=True),
            ModeVerdict(mode="fsdp", dims=ParallelDims(shard=2), **{**measured, "gradient": 0.04}, passed=False),
            ModeVerdict(mode="tp", dims=ParallelDims(tensor=2), not_possible="it has no plan"),
        ],
    )
    assert not verdicts.passed
    show(verdicts)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "ddp replicate 2, shares 1,6 1.0e-07 2.0e-07 3.0e-07 0.50x equal" in lines
    assert "fsdp shard 2 1.0e-07 4.0e-02 3.0e-07 0.50x DIFFERS" in lines
    assert "tp tensor 2 - - - - not possible: it has no plan" in lines
    assert lines[-1] == "Note: compared without dropout (resid_dropout): each process draws its own."

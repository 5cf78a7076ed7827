"""A run says so if its adapters have fewer parameters than it trains on tokens."""

from __future__ import annotations

from pathlib import Path

from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here, values


def notices(root: Path, name: str, *, rank: int, steps: int) -> list[str]:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
            "method": {"rank": rank, "target_modules": "q_proj"},
            "train": {"global_batch_size": 8, "max_steps": steps},
        }
    )
    events = train_here(make_run(root / name, config, make_plan(config)))
    return [message for message in values(events, "notice", "message") if "adapter parameters" in message]


def test_small_adapters_are_told(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(200))
    (told,) = notices(tmp_path, "small", rank=1, steps=8)
    assert "trained tokens: method.rank=" in told
    assert notices(tmp_path, "large", rank=64, steps=1) == [], "one step sees fewer tokens"

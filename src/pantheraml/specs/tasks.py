"""What a worker is asked beside training: the `request.json` of a task folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from pantheraml.base.folders import write_text

Precision = Literal["fp32", "bf16", "fp16"]


class Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: Path

    def write(self, folder: Path) -> None:
        write_text(folder / "request.json", self.model_dump_json(indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls.model_validate(json.loads((folder / "request.json").read_text()))


class GenerateRequest(Request):
    """Completions for prompts; the answers go to `answers.jsonl` of the task folder."""

    prompts: list[str]
    weights: Literal["trained", "base"]
    """base: the model as it was before the run, for comparison."""
    device: Literal["cpu", "cuda"]
    precision: Precision
    max_new_tokens: int
    temperature: float
    seed: int
    batch_size: int


class ExportRequest(Request):
    """The trained model as a plain Hugging Face folder."""

    output: Path
    precision: Precision

"""Task `generate`: complete the prompts of `request.json` and write them to `answers.jsonl`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import nn

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import GenerateDone, GenerateProgress
from pantheraml.base.folders import write_text
from pantheraml.data.formats import render_prompt
from pantheraml.models.generate import generate
from pantheraml.models.load_finetuned import load_finetuned_model
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import GenerateRequest
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.received import load_received_run
from pantheraml.worker.train import DTYPES


def generate_task(folder: Path, emit: EventWriter) -> None:
    request = GenerateRequest.read(folder)
    run, config = load_received_run(request, emit)
    tokenizer = load_tokenizer(config.model)
    data_format = run.data()["format"]
    prompts = [render_prompt(data_format, prompt, tokenizer) for prompt in request.prompts]
    begin = time.perf_counter()
    answers = generate(
        _load_model(request, config, run),
        tokenizer,
        prompts,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        batch_size=request.batch_size,
        on_progress=lambda done, total: emit(GenerateProgress(done=done, total=total)),
    )
    lines = [json.dumps({"prompt": p, "completion": a}) for p, a in zip(request.prompts, answers, strict=True)]
    write_text(folder / "answers.jsonl", "\n".join(lines) + "\n")
    tokens = sum(len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in answers)
    emit(GenerateDone(prompts=len(prompts), tokens=tokens, seconds=time.perf_counter() - begin))


def _load_model(request: GenerateRequest, config: TrainConfig, run: RunDir) -> nn.Module:
    dtype, device = DTYPES[request.precision], torch.device(request.device)
    if request.weights == "base":
        return load_model(config.model, dtype=dtype, device=device)
    return load_finetuned_model(config.model, config.method, run.trained(), dtype=dtype, device=device)

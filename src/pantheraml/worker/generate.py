"""Task `generate`: complete the prompts of `request.json`, and write those of each rank to `answers-RANK.jsonl`.

Ranks do not communicate: each has a copy of the model, and every so-many-th prompt.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import cast

import torch
from torch import nn

from pantheraml.base import env
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Emit, GenerateDone, GenerateProgress, silent
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
    place = env.process_rank()
    own = request.prompts[place.rank :: place.world_size]
    prompts = [render_prompt(data_format, prompt, tokenizer) for prompt in own]
    report: Emit = emit if place.rank == 0 else silent
    begin = time.perf_counter()
    answers = generate(
        _load_model(request, config, run, place.local_rank),
        tokenizer,
        prompts,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        batch_size=request.batch_size,
        on_progress=lambda done, total: report(GenerateProgress(done=done, total=total)),
    )
    lines = [json.dumps({"prompt": p, "completion": a}) for p, a in zip(own, answers, strict=True)]
    write_text(folder / f"answers-{place.rank}.jsonl", "\n".join(lines) + "\n")
    tokens = sum(len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in answers)
    report(GenerateDone(prompts=len(prompts), tokens=tokens, seconds=time.perf_counter() - begin))


def _load_model(request: GenerateRequest, config: TrainConfig, run: RunDir, local_rank: int) -> nn.Module:
    dtype, device = DTYPES[request.precision], torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # otherwise each rank would also open a context on the first GPU
    if request.weights == "base":
        return cast(nn.Module, load_model(config.model, dtype=dtype, device=device))
    return load_finetuned_model(config.model, config.method, run.trained(), dtype=dtype, device=device)

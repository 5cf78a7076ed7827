"""A body for each path that takes one, as the description of the API shows it. A test sends them."""

from __future__ import annotations

from typing import Any

_JOB = {
    "model": "llama-3.2-1b",
    "training_file": "file-0123456789abcdef01234567",
    "suffix": "first",
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 8}}},
    "pantheraml": {"priority": 0, "config": {"method": {"rank": 16}}},
}
_TRAINING = {
    "model_name": "llama-3.2-1b",
    "dataset_config": {"texts": ["sample text 1", "sample text 2"], "max_length": 512},
    "training_config": {"epochs": 3, "learning_rate": 5e-5},
}
_MULTIGPU: dict[str, dict[str, Any]] = {
    "config": {"use_multi_gpu": True, "gpu_ids": [0, 1, 2, 3], "batch_size_per_gpu": 8, "mixed_precision": True},
    "training/config": {"epochs": 1, "learning_rate": 5e-5, "batch_size_per_gpu": 4},
    "resources/manage": {"action": "disable", "devices": ["gpu:0"], "reason": "a new fan"},
    "gpu/test": {"gpu_ids": [0, 1]},
    **{f"training/{kind}": {**_TRAINING, "training_type": kind} for kind in ("auto", "distributed", "dataparallel")},
}
_HOOK = {
    "name": "our bot",
    "url": "https://example.com/hook",
    "event_types": ["fine_tuning.job.succeeded", "fine_tuning.job.failed"],
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/fine_tuning/jobs": _JOB,
    "/v1/fine_tuning/preview": {"model": "llama-3.2-1b", "training_file": "file-0123456789abcdef01234567", "rows": 3},
    "/v1/fine_tuning/jobs/{job_id}/samples": {"rows": 4, "max_tokens": 128},
    "/v1/uploads": {
        "bytes": 1_000_000,
        "filename": "rows.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "fine-tune",
    },
    "/v1/uploads/{upload_id}/complete": {
        "part_ids": ["part-0123456789abcdef01234567"],
        "md5": "d41d8cd98f00b204e9800998ecf8427e",
    },
    "/v1/chat/completions": {
        "model": "ft:llama-3.2-1b:ann:first:01234567",
        "messages": [{"role": "user", "content": "12+30="}],
        "max_completion_tokens": 16,
        "temperature": 0,
    },
    "/v1/webhook_endpoints": _HOOK,
    "/v1/webhook_endpoints/{endpoint_id}": {"name": "another name"},
    "/v1/webhook_endpoints/{endpoint_id}/rotate_secret": {"keep_old_secret_active_for_24_hours": True},
    "/v1/webhook_endpoints/{endpoint_id}/test": {"event_type": "fine_tuning.job.succeeded"},
    "/v1/queue/move": {"job": "ftjob-0123456789abcdef01234567", "before": None},
    **{f"{prefix}/multigpu/{path}": body for prefix in ("", "/api/v1") for path, body in _MULTIGPU.items()},
}

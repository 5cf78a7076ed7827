"""LiteLLM's calls for fine-tuning against a service, as its users write them. Run by the Python that has LiteLLM.

It wants another major version of `openai` than ours, so it has an environment of its own. Argument: URL of the service,
up to `/v1`. Prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import litellm  # type: ignore[import-not-found]

ROWS = b"".join(b'{"prompt": "%d+1=", "completion": "%d"}\n' % (n, n + 1) for n in range(8))
ASK = [{"role": "user", "content": "1+1="}]


def sync_calls(server: dict[str, str]) -> dict[str, Any]:
    file = litellm.create_file(file=("rows.jsonl", ROWS), purpose="fine-tune", **server)
    job = litellm.create_fine_tuning_job(
        model="tiny",
        training_file=file.id,
        hyperparameters={"n_epochs": 1, "batch_size": 4},
        suffix="lite",
        seed=3,
        **server,
    )
    listed = [each.id for each in litellm.list_fine_tuning_jobs(limit=1, **server).data]
    done = job
    while done.status not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.2)
        done = litellm.retrieve_fine_tuning_job(fine_tuning_job_id=job.id, **server)
    there = {"api_base": server["api_base"], "api_key": server["api_key"]}
    answer = litellm.completion(model=f"openai/{done.fine_tuned_model}", messages=ASK, max_tokens=4, **there)
    stream = litellm.completion(
        model=f"openai/{done.fine_tuned_model}",
        messages=ASK,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        **there,
    )
    return {
        "file": [file.status, file.purpose],
        "created": [type(job).__name__, job.status, job.hyperparameters.n_epochs, job.seed],
        "listed": listed == [job.id],
        "done": [done.status, done.fine_tuned_model, len(done.result_files)],
        "metrics": litellm.file_content(file_id=done.result_files[0], **server).content.decode()[:15],
        "answer": answer.usage.completion_tokens,
        "chunks": len(list(stream)),
    }


async def async_calls(server: dict[str, str]) -> dict[str, Any]:
    file = await litellm.acreate_file(file=("rows.jsonl", ROWS), purpose="fine-tune", **server)
    job = await litellm.acreate_fine_tuning_job(
        model="tiny", training_file=file.id, hyperparameters={"n_epochs": 1000}, **server
    )
    await litellm.acancel_fine_tuning_job(fine_tuning_job_id=job.id, **server)
    done = job
    while done.status != "cancelled":
        await asyncio.sleep(0.2)
        done = await litellm.aretrieve_fine_tuning_job(fine_tuning_job_id=job.id, **server)
    listed = await litellm.alist_fine_tuning_jobs(**server)
    deleted = await litellm.afile_delete(file_id=file.id, **server)
    return {"cancelled": [done.status, job.id in [each.id for each in listed.data]], "deleted": deleted.deleted}


def refused(server: dict[str, str]) -> list[str]:
    try:
        litellm.create_fine_tuning_job(model="none", training_file="file-0", hyperparameters={}, **server)
    except Exception as err:  # noqa: BLE001 - its name is what is told
        return [type(err).__name__, str(err)]
    return []


def main() -> None:
    server = {"custom_llm_provider": "openai", "api_base": sys.argv[1], "api_key": "any"}
    told = sync_calls(server)
    told |= asyncio.run(async_calls(server))
    told["refused"] = refused(server)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

"""Code blocks of the product document about the service; see tests/seed_blocks.py.

On a host without GPUs, what asks for DataParallel or for GPUs by number is refused with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pantheraml import multigpu, service
from pantheraml.base.env import child_environment
from pantheraml.base.errors import ConfigError
from pantheraml.devices.probe import probe
from pantheraml.service import Settings
from tests import toy
from tests.seed_blocks import adapted, read_blocks, run, run_async
from tests.service.conftest import Server

NAMES = {name: getattr(multigpu, name) for name in multigpu.__all__}
WITHOUT_GPUS = pytest.mark.skipif(len(probe().gpus) >= 2, reason="for hosts where DataParallel cannot work")
TEXTS = ["1+1=2", "1+2=3", "2+2=4", "2+3=5"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `models` of the document, with its model."""
    root = tmp_path_factory.mktemp("document") / "models"
    root.mkdir()
    toy.write_llama(root / "gpt2")
    return root


@pytest.fixture
def folder(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with `models`."""
    (tmp_path / "models").symlink_to(gpt2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def run_part(block: str, begin: str, end: str, **names: Any) -> dict[str, Any]:
    source = adapted(block)
    assert source.count(begin) == source.count(end or begin) == 1
    part = begin + source.partition(begin)[2]
    return await run_async(block, source=part.partition(end)[0] if end else part, **names)


@WITHOUT_GPUS
@pytest.mark.extended
@pytest.mark.seed("S4-072", "S4-073")
@pytest.mark.seed("S4:109", "S4-071", partly="DataParallel needs several GPUs; without them it is an error")
def test_fine_tuning_methods(gpt2: Path, tmp_path: Path) -> None:
    async def main() -> list[dict[str, Any]]:
        async with service.OptimizedFineTuningService(Settings(tmp_path / "data", gpt2, cpu_slots=4)) as tuning:
            names = {"finetuning_service": tuning, "config": {"epochs": 1, "batch_size_per_gpu": 1}}
            names["dataset"] = await tuning.prepare_dataset(texts=TEXTS, model_name="gpt2", max_length=64)
            with pytest.raises(ConfigError, match="needs at least two GPUs"):
                await run_part("S4:109", "# DataParallel", "# Distributed", **names)
            ranks = await run_part("S4:109", "# Distributed", "# Auto-selection", **names)
            chosen = await run_part("S4:109", "# Auto-selection", "", **names)
            return [ranks["result"], chosen["result"]]

    ranks, chosen = asyncio.run(main())
    assert [result["status"] for result in (ranks, chosen)] == ["succeeded", "succeeded"]
    assert (ranks["devices"], ranks["training_type"], chosen["training_type"]) == (4, "distributed", "auto")


@WITHOUT_GPUS
@pytest.mark.seed("S4-068", "S4-069", "S4-070")
@pytest.mark.seed("S4:179", partly="DataParallel needs several GPUs; without them it is an error")
def test_quick_start(folder: Path) -> None:
    async def main() -> Any:
        names: dict[str, Any] = {"training_texts": TEXTS}
        with pytest.raises(ConfigError, match="needs at least two GPUs"):
            await run_async("S4:179", names=names)
        await names["finetuning_service"].close()
        return names["dataset"]

    assert asyncio.run(main()).texts == TEXTS
    assert (folder / "service-data").is_dir()


@pytest.mark.extended
@pytest.mark.seed("S4:206", "S4-065", "S4-152", "C18")
def test_distributed_example(folder: Path) -> None:
    before = f"""
import asyncio
from pantheraml.service import OptimizedFineTuningService

async def prepare():
    async with OptimizedFineTuningService() as service:
        return await service.prepare_dataset(texts={TEXTS!r}, model_name="gpt2", max_length=64)

dataset, training_config = asyncio.run(prepare()), {{"epochs": 1, "batch_size_per_gpu": 1}}
"""
    block = adapted("S4:206").replace("launch_distributed_training(\n", "results = launch_distributed_training(\n")
    after = "\nassert results[1] is None\nprint(results[0]['status'], results[0]['devices'])\n"
    done = subprocess.run(
        [sys.executable, "-c", before + block + after],
        cwd=folder,
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "succeeded 2\n"), done


@WITHOUT_GPUS
@pytest.mark.seed("S4-095")
@pytest.mark.seed("S4:231", partly="needs GPUs 0 to 3; on a host without them both are refused with the reason")
def test_api_usage(own_server: Callable[..., Server], gpt2: Path) -> None:
    server = own_server("--cpu-slots", "2", models_dir=gpt2)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", adapted("S4:231")],
        env=child_environment(PORT=server.url.rpartition(":")[2]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    config, training, stats = done.stdout.replace("}{", "}\n{").splitlines()
    assert '"There is no GPU 0: ' in config
    assert "needs at least two GPUs" in training
    assert stats.startswith('{"gpu_count":0,"available_gpus":[],"gpu_info":[]')


@pytest.mark.seed("S4:284", "S4-021", "S4-066", "S4-067", "S4-074")
def test_performance_monitoring(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> dict[str, Any]:
        async with service.FineTuningService(Settings(tmp_path / "data", gpt2)) as tuning:
            return await run_async("S4:284", **NAMES, finetuning_service=tuning)

    found = asyncio.run(main())
    assert capsys.readouterr().out == (
        f"Available GPUs: {found['gpu_stats']['available_gpus']}\nGPU Info: {found['gpu_stats']['gpu_info']}\n"
    )


@contextlib.asynccontextmanager
async def serving(app: FastAPI, *, peer: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, client=(peer, 1234))
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


@pytest.mark.filterwarnings("ignore:.*on_event is deprecated:DeprecationWarning")
@pytest.mark.seed("S4:393", "S4:402", "S4-147", "S4-148", "S4-149", "S4-150")
def test_an_application_of_ones_own(folder: Path) -> None:
    """The router brings its service; hooks of startup and shutdown run beside it."""
    names = run("S4:393")
    run("S4:402", names=names, MultiGPUTrainingManager=multigpu.MultiGPUTrainingManager)

    async def ask() -> list[int]:
        assert "multi_gpu_manager" not in names
        async with serving(names["app"]) as http:
            assert isinstance(names["multi_gpu_manager"], multigpu.MultiGPUTrainingManager)
            names["multi_gpu_manager"]._trainers.append(cleaned := _Cleaned())
            paths = ("/api/v1/multigpu/health", "/multigpu/health", "/api/v1/multigpu/gpu/99/stats")
            answers = [await http.get(path) for path in paths]
            assert answers[2].json()["error"]["message"] == "No such GPU: 99"
            wrong = await http.post("/api/v1/multigpu/config", json={"memory_fraction": 2})
            assert wrong.json()["error"]["code"] == "ConfigError"
        assert cleaned.done
        return [answer.status_code for answer in (*answers, wrong)]

    assert asyncio.run(ask()) == [200, 404, 404, 400]


class _Cleaned:
    """Stands for a trainer that the manager made."""

    done = False

    def cleanup(self) -> None:
        self.done = True


@pytest.mark.seed("S4-135")
def test_an_application_without_keys_serves_this_machine_alone(folder: Path) -> None:
    async def ask() -> httpx.Response:
        app = FastAPI()
        app.include_router(service.router)
        async with serving(app, peer="203.0.113.7") as http:
            return await http.get("/multigpu/health")

    answer = asyncio.run(ask())
    assert answer.status_code == 401
    assert "only programs of this machine are served" in answer.json()["error"]["message"]


def test_all_blocks_of_the_document_are_run() -> None:
    assert len([name for name in read_blocks() if name.startswith("S4:")]) == 13

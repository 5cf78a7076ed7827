"""FineTuningService: the service's queue, devices and supervisors for a Python program, without a server.

    async with FineTuningService(Settings(Path("service-data"), Path("models"))) as service:
        dataset = await service.prepare_dataset(texts=texts, model_name="gpt2", max_length=512)
        result = await service.finetune_model_multi_gpu("gpt2", dataset, {"epochs": 3})

It opens at the first call, and closes with `async with`, `close` or the event loop. A data folder can be open in one
program at a time, this or `pantheraml serve`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pantheraml.base.errors import ConfigError
from pantheraml.service.app import running
from pantheraml.service.auth import LOCAL_USER, Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.errors import ApiError
from pantheraml.service.jobs.gpu_stats import gpu_stats_now
from pantheraml.service.jobs.text_training import ended, start_training, training_object
from pantheraml.service.schemas.multigpu import DatasetConfig, TrainingConfig, TrainingRequest, TrainingType
from pantheraml.service.settings import Settings, default_settings

Config = Mapping[str, Any]
"""Keys of TrainingConfig: epochs, learning_rate, batch_size_per_gpu, world_size."""
Model = TypeVar("Model", bound=BaseModel)
_SCOPES = frozenset({"read", "submit"})


class FineTuningService:
    def __init__(self, settings: Settings | None = None) -> None:
        """None: the folders `service-data` and `models` below the current one."""
        self._settings = settings or default_settings()
        self._context: ServiceContext | None = None
        self._opening = asyncio.Lock()
        self._closing = asyncio.Event()
        self._alive: asyncio.Task[None] | None = None

    async def prepare_dataset(self, texts: Sequence[str], model_name: str, max_length: int = 512) -> DatasetConfig:
        """Check the texts. ConfigError if they, or the model, cannot be used."""
        context = await self._opened()
        if model_name not in context.catalog.models():
            known = ", ".join(sorted(context.catalog.models())) or "none"
            raise ConfigError(f"There is no model {model_name!r}.", fix=f"Models that can be fine-tuned: {known}.")
        return _validated(DatasetConfig, {"texts": list(texts), "max_length": max_length})

    async def finetune_model_multi_gpu(
        self,
        model_name: str,
        dataset: DatasetConfig,
        training_config: Config,
        user_id: int | str = LOCAL_USER,
    ) -> dict[str, Any]:
        """Train as the planner chooses for this machine; return the result when it has ended."""
        return await self._train("auto", model_name, dataset, dict(training_config), user_id)

    async def finetune_model_distributed(
        self,
        model_name: str,
        dataset: DatasetConfig,
        training_config: Config,
        user_id: int | str = LOCAL_USER,
        world_size: int | None = None,
    ) -> dict[str, Any]:
        """Train with one process per device; `world_size` None: all GPUs or, without any, two processes."""
        given = {} if world_size is None else {"world_size": world_size}
        return await self._train("distributed", model_name, dataset, {**training_config, **given}, user_id)

    async def finetune_model_dataparallel(
        self,
        model_name: str,
        dataset: DatasetConfig,
        training_config: Config,
        user_id: int | str = LOCAL_USER,
    ) -> dict[str, Any]:
        """Train with one process that replicates the model on its GPUs; it needs two of them."""
        return await self._train("dataparallel", model_name, dataset, dict(training_config), user_id)

    async def get_gpu_stats(self) -> dict[str, Any]:
        """`available_gpus` and, of each GPU, `gpu_info`."""
        return await gpu_stats_now(await self._opened(), Principal(LOCAL_USER, _SCOPES | {"admin"}, "operator"))

    async def _train(
        self, kind: TrainingType, model_name: str, dataset: DatasetConfig, given: dict[str, Any], user_id: int | str
    ) -> dict[str, Any]:
        context = await self._opened()
        config = _validated(TrainingConfig, given)
        request = TrainingRequest(model_name=model_name, dataset_config=dataset, training_config=config)
        principal = Principal(str(user_id), _SCOPES)
        try:
            job = await start_training(kind, request, principal, context, lambda session, job_id: None)
        except ApiError as err:
            raise ConfigError(err.message) from err
        return training_object(await ended(job, context))

    async def _opened(self) -> ServiceContext:
        async with self._opening:
            if self._context is None:
                ready: asyncio.Future[ServiceContext] = asyncio.get_running_loop().create_future()
                self._closing.clear()
                # in a separate task, which the event loop cancels cleanly if `close` is never called
                self._alive = asyncio.create_task(self._live(ready))
                self._context = await ready
            return self._context

    async def _live(self, ready: asyncio.Future[ServiceContext]) -> None:
        try:
            async with running(self._settings) as context:
                ready.set_result(context)
                await self._closing.wait()
        except Exception as err:
            if ready.done():
                raise
            ready.set_exception(err)
        finally:
            self._context = None

    async def close(self) -> None:
        """Release the folder. Running jobs continue, and the next service to open it adopts them."""
        if self._alive is not None:
            self._closing.set()
            await self._alive
            self._alive = None

    async def __aenter__(self) -> FineTuningService:
        await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


OptimizedFineTuningService = FineTuningService


def _validated(model: type[Model], values: dict[str, Any]) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as err:
        first = err.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: {first['msg']}.") from err

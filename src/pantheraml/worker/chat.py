"""The chat worker: holds one base model, puts adapters onto it and takes them off again, and answers one request at a
time (`specs.chat`).

A request for an adapter of the base that is there costs reading the adapter; one for another base loads that instead.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import DataError, ModelError, PantheraError
from pantheraml.data.formats import prompt_ids
from pantheraml.data.rows import RowError
from pantheraml.models.adapters import base_quantization
from pantheraml.models.base_identity import verified_base
from pantheraml.models.load_finetuned import finetuned_tokenizer
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.models.lora_request import requested_adapter
from pantheraml.models.sampling_params import SamplingParams
from pantheraml.models.stream_text import stream_text
from pantheraml.specs.chat import (
    CHAT_INPUT,
    ChatCancel,
    ChatDone,
    ChatFailed,
    ChatLoaded,
    ChatModel,
    ChatReply,
    ChatRequest,
    ChatText,
)
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)

Send = Callable[[ChatReply], None]


class Inbox:
    """Requests as they arrive, read by a thread of their own, so that a cancellation reaches a running generation."""

    def __init__(self, lines: Iterable[str], on_end: Callable[[], None]) -> None:
        """`on_end`: called when there are no more lines, in that thread."""
        self._requests: queue.SimpleQueue[ChatRequest] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        threading.Thread(target=self._read, args=(lines, on_end), daemon=True).start()

    def _read(self, lines: Iterable[str], on_end: Callable[[], None]) -> None:
        try:
            for line in lines:
                message = CHAT_INPUT.validate_json(line)
                if isinstance(message, ChatCancel):
                    self._cancelled.add(message.id)
                else:
                    self._requests.put(message)
        finally:
            on_end()

    def next(self) -> ChatRequest:
        return self._requests.get()

    def is_cancelled(self, request: ChatRequest) -> bool:
        return request.id in self._cancelled


class LoadedModel:
    """The model in memory: a base, perhaps with an adapter on it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._key: tuple[ModelConfig, str | None] | None = None
        self._base: PreTrainedModel | None = None
        self._adapter: tuple[Path, contextlib.ExitStack] | None = None
        self.base_loads = 0
        """Number of base models loaded so far."""

    def model(self, wanted: ChatModel) -> PreTrainedModel:
        """Return the model with its adapter; unload a different base or adapter first."""
        full = wanted.trained is not None and wanted.method.kind == "full"
        source = _in_folder(wanted.model, wanted.trained) if full and wanted.trained else wanted.model
        adapter = None if full else wanted.trained
        if adapter is not None:
            source, _ = verified_base(source, adapter)
        form = None if adapter is None else base_quantization(wanted.model, wanted.method)
        key = (source, form)
        if self._key != key:
            self._drop()
            logger.info("loading a base model: %s", source.path)
            self._base = load_model(source, dtype=self._dtype, device=self._device, quantize=form).eval()
            self._key, self.base_loads = key, self.base_loads + 1
        assert self._base is not None
        self._use_adapter(self._base, adapter)
        return self._base

    def _use_adapter(self, base: PreTrainedModel, folder: Path | None) -> None:
        if self._adapter is not None and self._adapter[0] != folder:
            stack, self._adapter = self._adapter[1], None
            stack.close()
        if folder is not None and self._adapter is None:
            stack = contextlib.ExitStack()
            stack.enter_context(requested_adapter(base, SimpleNamespace(path=folder), float32=True))
            self._adapter = folder, stack

    def _drop(self) -> None:
        self._key = self._base = self._adapter = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class ChatWorker:
    def __init__(self, inbox: Inbox, send: Send, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inbox, self._send = inbox, send
        self._loaded = LoadedModel(dtype, device)
        self._tokenizers: dict[str, Any] = {}

    def run(self) -> None:
        """Answer requests until the process is ended."""
        while True:
            request = self._inbox.next()
            try:
                self._answer(request)
            except RowError as err:  # of the chat template
                self._send(ChatFailed(id=request.id, error="DataError", what=f"messages: {err.problem}.", fix=None))
            except PantheraError as err:
                self._send(ChatFailed(id=request.id, error=type(err).__name__, what=err.what, fix=err.fix))
            except Exception as err:  # noqa: BLE001 - the next request may do better
                traceback.print_exc()
                what = f"The chat worker failed: {type(err).__name__}: {err}"
                self._send(ChatFailed(id=request.id, error="WorkerError", what=what, fix=None, unexpected=True))

    def _answer(self, request: ChatRequest) -> None:
        tokenizer = self._tokenizer(request.model)
        prompt = _encoded(tokenizer, request)
        model = self._loaded.model(request.model)
        self._send(ChatLoaded(id=request.id))
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop=request.stop,
        )
        done = stream_text(
            model,
            tokenizer,
            prompt,
            params,
            default_tokens=request.default_tokens,
            hand_out=lambda text: self._send(ChatText(id=request.id, text=text)),
            is_cancelled=lambda: self._inbox.is_cancelled(request),
        )
        self._send(
            ChatDone(
                id=request.id,
                finish_reason=done.finish_reason,
                prompt_tokens=len(prompt),
                completion_tokens=done.tokens,
            )
        )

    def _tokenizer(self, wanted: ChatModel) -> Any:
        name = str(wanted.trained or wanted.model.path)
        if name not in self._tokenizers:
            if len(self._tokenizers) >= 16:
                self._tokenizers.pop(next(iter(self._tokenizers)))
            source = load_tokenizer(wanted.model) if wanted.trained is None else None
            self._tokenizers[name] = source or finetuned_tokenizer(wanted.model, Path(name))
        return self._tokenizers[name]


def _encoded(tokenizer: Any, request: ChatRequest) -> list[int]:
    if request.prompt_row is not None and request.prompt_row.format != "messages":
        return prompt_ids(request.prompt_row.format, request.prompt_row.row, tokenizer)
    if not tokenizer.chat_template:
        raise ModelError(
            "This model has no chat template, so it cannot be given messages.",
            fix="Add a chat_template.jinja to its folder, or tune its chat version.",
        )
    row: dict[str, Any] = {"messages": request.messages} if request.prompt_row is None else request.prompt_row.row
    ids = prompt_ids("messages", row, tokenizer)
    if not ids:
        raise DataError(
            "The chat template made no tokens of the messages.",
            fix="Send a message with text, or correct the chat template.",
        )
    return ids


def _in_folder(model: ModelConfig, folder: Path) -> ModelConfig:
    return model.model_copy(update={"path": str(folder), "tokenizer": None, "init": "pretrained", "revision": None})

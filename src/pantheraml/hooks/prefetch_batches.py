"""Batch prefetch: read the next batches, and copy them to the GPU, while it computes.

transformers' trainers read and collate a batch between two steps, when the GPU is idle: about 3 ms for 8,192 tokens
under a profiler, 1 % of a step of an 8B model (H200). During a step the host waits for the GPU many times as long. So
our models call back once a whole forward is queued, and the next batches are read: as many as the trainer took at once
the last time. They come from the same iterator in the same order, in the same thread. A trainer that stops early has
read one batch more than it used. With worker processes (`dataloader_num_workers`) nothing changes: they prefetch
already.

Between two steps a batch would be copied only after the optimizer step, for which the host would wait; and a model that
asks which tokens are padding would wait once more. So batches are copied when they are read, and the host copy is
remembered.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.async_scalars import remember_host_copy
from pantheraml.models.causal_lm import FastCausalLM, fast_model

_READ_ON_HOST = ("labels", "shift_labels", "attention_mask", "position_ids")


class PrefetchIterator:
    """An iterator over batches; `read` fetches some before they are requested."""

    def __init__(self, batches: Iterator[Any], device: torch.device | None = None) -> None:
        """`device`: where the trainer will send the batches; None if it will not."""
        self._batches, self._device = batches, device
        self._ready: deque[Any] = deque()
        self._failure: Exception | None = None
        self._burst = 0
        """Number of batches taken in a row, without a step in between."""
        self._step_passed = True

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        self._burst = 1 if self._step_passed else self._burst + 1
        self._step_passed = False
        if self._ready:
            return self._ready.popleft()
        if self._failure is not None:
            raise self._failure
        return _to_device(next(self._batches), self._device)

    def read(self) -> None:
        """Read one more batch, if fewer are ready than were last taken at once. Errors are raised by `__next__`."""
        self._step_passed = True
        if len(self._ready) < self._burst and self._failure is None:
            try:
                self._ready.append(_to_device(next(self._batches), self._device))
            except Exception as err:  # noqa: BLE001 - raised by __next__; includes StopIteration
                self._failure = err


def _to_device(batch: Any, device: torch.device | None) -> Any:
    """Copy `batch` to `device` without waiting for the copy."""
    if device is None:
        return batch
    named = batch if isinstance(batch, Mapping) else {}
    on_host = {name: named[name] for name in _READ_ON_HOST if name in named}  # some batches are moved in place
    on_device = send_to_device(batch, device, non_blocking=True)
    for name, tensor in on_host.items():
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" != on_device[name].device.type:
            remember_host_copy(tensor, on_device[name])
    return on_device


def _with_prefetch(get_train_dataloader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get_train_dataloader)
    def get(self: Any) -> Any:
        loader = get_train_dataloader(self)
        model, base = fast_model(self.model), _single_process_loader(loader)
        single_gpu = self.args.n_gpu <= 1  # otherwise DataParallel calls replicas of the model from several threads
        if model is not None and base is not None and single_gpu:
            # only from memory pinned by the loader (or by a collator that does not reuse it): other memory may be
            # written to before an asynchronous copy has finished
            device = getattr(loader, "device", None) if base.pin_memory else None
            base._get_iterator = functools.partial(_prefetch_iterator, base._get_iterator, model, device)
        return loader

    return get


def _prefetch_iterator(
    get_iterator: Callable[[], Iterator[Any]], model: FastCausalLM, device: torch.device | None
) -> PrefetchIterator:
    iterator = PrefetchIterator(get_iterator(), device)
    model.after_forward = _PrefetchOnForward(iterator)
    return iterator


class _PrefetchOnForward:
    """Reads ahead for as long as the iterator is alive. Copies of a model have none."""

    def __init__(self, iterator: PrefetchIterator) -> None:
        self._iterator = weakref.ref(iterator)

    def __call__(self) -> None:
        iterator = self._iterator()
        if iterator is not None:
            iterator.read()

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _single_process_loader(loader: Any) -> Any:
    """Return the DataLoader behind accelerate's loader, if it is torch's own without worker processes."""
    base = getattr(loader, "base_dataloader", None)
    return base if type(base) is DataLoader and base.num_workers == 0 else None


PREFETCH_BATCHES = LibraryPatch(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    class_name="Trainer",
    name="get_train_dataloader",
    make=_with_prefetch,
    fallback="batches are read between steps",
    required=False,
)

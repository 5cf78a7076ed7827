"""Batches that are read, and sent to the GPU, while it computes.

transformers' trainers read and collate a batch between two steps, when the GPU has nothing to do: some 3 ms for 8,192
tokens under a profiler, 1 % of a step of an 8B model (H200). During a step the host waits for the GPU many times as
long. So our models call, once all of a forward pass is queued, for the next batches to be read, as many as the trainer
took at once the last time. They come in the same order from the same iterator, in the same thread. A trainer that stops
early has then read one batch more than it used. Worker processes (`dataloader_num_workers`) do that by themselves, and
then nothing changes.

Between two steps a batch would be sent only after the optimizer's step, which the host would wait for; and a model that
asks which tokens are padding would wait once more. So batches are sent when they are read, and the host remembers what
it sent. And as soon as the optimizer's step is queued, before the host waits for what is logged of it, the model is
told which batch is next, and may begin with it: the GPU need not wait for the host at all. Where the trainer is to
evaluate or to save in between, the model is told when the batch is taken.
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
from transformers import TrainerCallback

from pantheraml.hooks.replacement import Replacement
from pantheraml.models.causal_lm import FastCausalLM, fast_model
from pantheraml.models.read_ahead import came_from

_ASKED_BY_THE_HOST = ("labels", "shift_labels", "attention_mask", "position_ids")


class Ahead:
    """An iterator over batches, of which `read` fetches some before they are asked for."""

    def __init__(
        self,
        batches: Iterator[Any],
        device: torch.device | None = None,
        expect: Callable[[Any], None] | None = None,
    ) -> None:
        """`device`: where the trainer will send them; None: it will not. `expect` is told which batch is next: by
        `announce`, else when the one after it is asked for, because accelerate keeps one back."""
        self._batches, self._device, self._expect = batches, device, expect
        self._kept_back: Any = None
        self._is_announced = False
        self._ready: deque[Any] = deque()
        self._failure: Exception | None = None
        self._taken = 0
        """Batches that were asked for one after another, without a step in between."""
        self._in_between = True

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        self._taken = 1 if self._in_between else self._taken + 1
        self._in_between = False
        if self._taken == 1:
            self.announce()
        self._kept_back, self._is_announced = None, False  # should that have been the last
        self._kept_back = self._next()
        return self._kept_back

    def announce(self) -> None:
        """The batch that was kept back is the next to be used."""
        if self._expect is not None and self._kept_back is not None and not self._is_announced:
            self._is_announced = True
            self._expect(self._kept_back)

    def _next(self) -> Any:
        if self._ready:
            return self._ready.popleft()
        if self._failure is not None:
            raise self._failure
        return _sent(next(self._batches), self._device)

    def read(self) -> None:
        """One more batch, if fewer are ready than were asked for at once. What goes wrong is told to who asks."""
        self._in_between = True
        if len(self._ready) < self._taken and self._failure is None:
            try:
                self._ready.append(_sent(next(self._batches), self._device))
            except Exception as err:  # noqa: BLE001 - raised where the batch is asked for; the end is one, too
                self._failure = err


def _sent(batch: Any, device: torch.device | None) -> Any:
    """`batch` on `device`, without waiting until it is there."""
    if device is None:
        return batch
    named = batch if isinstance(batch, Mapping) else {}
    here = {name: named[name] for name in _ASKED_BY_THE_HOST if name in named}  # some batches change in place
    there = send_to_device(batch, device, non_blocking=True)
    for name, tensor in here.items():
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" != there[name].device.type:
            came_from(tensor, there[name])
    return there


def _while_it_computes(get_train_dataloader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get_train_dataloader)
    def get(self: Any) -> Any:
        loader = get_train_dataloader(self)
        model, base = fast_model(self.model), _in_this_process(loader)
        alone = self.args.n_gpu <= 1  # else torch's DataParallel calls copies of the model from several threads
        if model is not None and base is not None and alone:
            # only from memory of the loader's own (or what a collator has pinned itself, and may not use again): who
            # else's may be written to before it is sent
            device = getattr(loader, "device", None) if base.pin_memory else None
            expect = _Expecting(self, model)
            base._get_iterator = functools.partial(_read_ahead, base._get_iterator, model, device, expect)
        return loader

    return get


def _before_it_is_logged(maybe_log_save_evaluate: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(maybe_log_save_evaluate)
    def maybe(self: Any, *args: Any, **kwargs: Any) -> None:
        model, control = fast_model(self.model), self.control
        reading = None if model is None else model.meanwhile
        ends = control.should_epoch_stop or control.should_training_stop
        only_logs = not (ends or control.should_evaluate or control.should_save)
        if isinstance(reading, _Reading) and only_logs and _logs_alone(self):
            reading.announce()
        maybe_log_save_evaluate(self, *args, **kwargs)

    return maybe


def _logs_alone(trainer: Any) -> bool:
    """Whether whatever runs while a step is logged is known, and changes no weights."""
    theirs, kind = ("transformers", "trl"), type(trainer)
    if not _is_of(kind._maybe_log_save_evaluate, theirs):
        return False
    return not trainer.control.should_log or (_is_of(kind.log, theirs) and _are_known(trainer, "on_log", theirs))


class _Expecting:
    """Tells a trainer's model which batch is next, unless a callback is called before the model is called with it, and
    may change weights unseen."""

    def __init__(self, trainer: Any, model: FastCausalLM) -> None:
        self._trainer, self._model = weakref.ref(trainer), model

    def __call__(self, batch: Any) -> None:
        trainer = self._trainer()
        if trainer is None or _are_known(trainer, "on_step_begin"):
            self._model.expect(batch)


def _are_known(trainer: Any, event: str, libraries: tuple[str, ...] = ()) -> bool:
    """Whether no callback does anything at `event`, but for those of `libraries`, which change no weights there."""
    methods = (getattr(each, event) for each in trainer.callback_handler.callbacks)
    usual = getattr(TrainerCallback, event)
    return all(getattr(method, "__func__", None) is usual or _is_of(method, libraries) for method in methods)


def _is_of(method: Any, libraries: tuple[str, ...]) -> bool:
    return str(getattr(method, "__module__", None)).partition(".")[0] in libraries


def _read_ahead(
    get_iterator: Callable[[], Iterator[Any]],
    model: FastCausalLM,
    device: torch.device | None,
    expect: Callable[[Any], None],
) -> Ahead:
    ahead = Ahead(get_iterator(), device, expect)
    model.meanwhile = _Reading(ahead)
    return ahead


class _Reading:
    """Reads on for as long as somebody holds the iterator. Copies of a model have none."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = weakref.ref(ahead)

    def __call__(self) -> None:
        ahead = self._ahead()
        if ahead is not None:
            ahead.read()

    def announce(self) -> None:
        ahead = self._ahead()
        if ahead is not None:
            ahead.announce()

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _in_this_process(loader: Any) -> Any:
    """What accelerate's loader takes batches from, if that is torch's own without worker processes."""
    base = getattr(loader, "base_dataloader", None)
    return base if type(base) is DataLoader and base.num_workers == 0 else None


TRAIN_BATCHES = Replacement(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    of_class="Trainer",
    name="get_train_dataloader",
    make=_while_it_computes,
    otherwise="batches are read between steps",
    needed=False,
)
STEP_IS_QUEUED = Replacement(
    library="transformers",
    versions=">=5.17,<5.23",
    module="transformers.trainer",
    of_class="Trainer",
    name="_maybe_log_save_evaluate",
    make=_before_it_is_logged,
    otherwise="the next pass begins after a step was logged",
    needed=False,
)

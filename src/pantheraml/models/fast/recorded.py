"""The fused layers of a pass as two CUDA graphs, for trainers that are not ours.

Whoever trains a model by his own loop calls it, and `backward` on what he made of the result. Between the two, and
after them, his code runs; but the layers' launches are the same at every step, a thousand of them for a small model,
and a server's CPU takes longer for them than the GPU (1B LoRA under TRL on an H200: some 60 ms of kernels in steps of
79 to 100 ms). So they are recorded once, forward and backward apart. From then on the first of the layers replays all
of them, and the others hand on what they are given.

What stays outside: the embedding, the output head, and writing the adapters' values where products read them. Only
rows that are one document each are recorded, on one GPU, without checkpointing or dropout; and only after passes of the
same shape have run by themselves, in which every layer got what the one before it gave. All else runs as ever: a second
forward pass before the backward pass of the first, layers with hooks, hooks on what is kept for the backward pass,
other shapes. A second backward pass through the same forward pass costs another forward pass, and after a newer forward
pass it is an error, because that has overwritten what it would read.

Parameters get their gradients where the recording leaves them (copies would take another 1.9 GB for a full fine-tune of
1B). The next replay writes over that memory; so before it, gradients that are still there, to be added to, are moved
away. If somebody else keeps one, that pass is not replayed.

A trainer that has waited for the GPU begins the next step with an idle one, and whether a recording is the right one
can be told only after hundreds of modules and tensors were looked at. So that of the pass before is replayed first, and
they are looked at while the GPU is busy; if the pass is another one, what the replay gives is dropped. The memory that
it reads is kept by the recording and by the tables of the adapters, even if parameters have left it since.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pantheraml.base import log
from pantheraml.models.fast.groups import GroupSet
from pantheraml.models.fast.together import Body, HandedOn, RunLayers, Turns, WatchedPass, is_watched
from pantheraml.models.fast.trained import weight_of, with_weights

logger = log.get(__name__)

PASSES_BEFORE = 2
"""Of a shape, before it is recorded: kernels are compiled and chosen outside of a recording."""
MOST_SHAPES = 2
ROOM = 2.5
"""Times what a pass keeps: free memory from which it is recorded."""

_Key = tuple[object, ...]


class _Pass(WatchedPass):
    def __init__(self, key: _Key, arguments: dict[str, Any], taken: int) -> None:
        super().__init__(arguments)
        self.key, self.taken_before = key, taken


class LayerGraphs:
    """Records and replays passes through `layers`, all of a model's, in their order."""

    def __init__(self, layers: Sequence[Any], body: Body, shared: GroupSet, run: RunLayers) -> None:
        self._layers, self._body, self._shared, self._run = layers, body, shared, run
        self._recorded: dict[_Key, Recording] = {}
        self._passes: dict[_Key, int] = {}
        self._bytes: dict[_Key, int] = {}
        """What a pass leaves behind for its way back."""
        self._watched: _Pass | None = None
        self._handed_on = HandedOn(layers)
        self._off: str | None = None
        self._replayed: Recording | None = None
        """In the last pass."""
        self._ahead: Recording | None = None
        """What was replayed for this pass before it was looked at."""
        self._early: tuple[tuple[Tensor, ...], list[int]] | None = None
        """What the last one is being replayed with before the model is called, and the versions of that and of all
        weights then."""
        self.early_was_used = False
        """Whether the last pass that was started early was the one that came."""

    def may_start_early(self) -> bool:
        """Whether the last pass was replayed, and could be again."""
        return self._replayed is not None and self._off is None and not self._handed_on.left

    def start_early(self, hidden: Tensor, turns: Turns) -> bool:
        """As `begin_ahead`, for what the first layer will be given when the model is called. Whether it was replayed;
        then `begin_ahead` has to be given these very tensors."""
        last, given = self._replayed, (hidden, *turns)
        if last is None or not self._could_record(hidden) or not last.fits(given):
            return False
        self._start(last, given)
        self._early, self.early_was_used = (given, self._versions(last, given)), False
        return True

    def early_given(self) -> tuple[Tensor, Turns] | None:
        """What was started early with, and has not been asked for yet."""
        if self._early is None:
            return None
        hidden, cos, sin = self._early[0]
        return hidden, (cos, sin)

    def _start(self, recording: Recording, given: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            self._shared.write()
            recording.start(given)

    def _versions(self, recording: Recording, given: Sequence[Tensor]) -> list[int]:
        """Of all that a replay with `given` depends on, and of what the layers have by now in the place of that."""
        parameters = (parameter for group in self._shared.groups for parameter in group.parameters())
        now = (*parameters, *map(weight_of, self._norms()))
        return [tensor._version for tensor in (*given, *recording.reads, *now)]

    def begin_ahead(self, hidden: Tensor, arguments: dict[str, Any]) -> bool:
        """The first layer is called: if all seems to be as in the last pass, the adapters are written and that is
        replayed again. Whether it was; `begin` finds out whether that was right."""
        last, self._replayed, self._ahead = self._replayed, None, None
        early, self._early = self._early, None
        turns = arguments.get("position_embeddings")
        if last is not None and hidden.device != last.inputs[0].device:
            self.release()  # the model moved, and a recording keeps the weights where they were
        seems_usual = self._body.has_begun and not self._handed_on.left and self._seems_usual(hidden, arguments)
        if last is None or turns is None or not seems_usual:
            return False
        given = (hidden, *turns)
        if early is not None and all(map(is_, given, early[0])) and self._versions(last, given) == early[1]:
            self._ahead, self.early_was_used = last, True
            return True
        if not last.fits(given):
            return False
        self._start(last, given)
        self._ahead = last
        return True

    def begin(self, hidden: Tensor, turns: Turns, arguments: dict[str, Any]) -> Tensor | None:
        """The first layer is called: what all of them give, or None if each is to run by itself."""
        if self._handed_on.left:
            self._give_up(f"{self._handed_on.left} layers were left out of a pass, which a recording cannot")
        self._handed_on.begin(None)
        self._watched = None
        if not self._body.calls_all():
            return None
        parameters = [parameter for group in self._shared.groups for parameter in group.parameters()]
        modules = self._norms()
        norms = list(map(weight_of, modules))
        if any(w.requires_grad and w is not m._parameters.get("weight") for w, m in zip(norms, modules, strict=True)):
            return None  # PEFT keeps a trained copy beside it (modules_to_save)
        parameters += [weight for weight in norms if weight.requires_grad]
        key = self._key(hidden, turns, arguments, parameters, norms)
        if key is None:
            return None
        recording = self._recorded.get(key)
        started = recording is not None and recording is self._ahead
        self._ahead = None  # before another one is recorded: that may need its memory
        if recording is None:
            recording = self._record(key, hidden, turns, arguments, parameters)
        if recording is None or not (started or recording.is_free(parameters)):
            self._watched = _Pass(key, arguments, self._taken(hidden.device))
            return None
        result: Tensor = _Replay.apply(recording, started, hidden, *turns, *parameters)
        self._replayed = recording
        self._handed_on.begin(result)
        return result

    def hands_on(self, layer: Any, hidden: Tensor) -> bool:
        """Another layer is called: whether what it is given is the result of all layers already."""
        return self._handed_on.is_handed(layer, hidden)

    def release(self) -> None:
        """Give the memory of all recordings back; passes are recorded anew when they come."""
        if not any(kept.is_in_use() for kept in self._recorded.values()):
            self._recorded.clear()
            self._replayed = self._ahead = self._early = None

    def ran(self, layer: Any, given: Tensor, result: Tensor, arguments: dict[str, Any]) -> None:
        """A layer ran by itself."""
        watched = self._watched
        if watched is None:
            return
        watched.add(layer, given, result, arguments)
        if layer is self._layers[-1]:
            self._watched = None
            if watched.went_through(self._layers):
                key = watched.key
                self._bytes[key] = self._taken(result.device) - watched.taken_before
                # counted when its backward pass begins: that has kernels of its own
                result.register_hook(lambda _: self._count(key))

    def _could_record(self, hidden: Tensor) -> bool:
        """Not on a CPU, and not inside of another recording."""
        return (
            hidden.is_cuda
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
        )  # fmt: skip

    def _taken(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device)

    def _norms(self) -> list[Any]:
        return [norm for layer in self._layers for norm in layer.fused_parts.norms(layer)]

    def _no_room(self, needed: int, device: torch.device) -> str | None:
        """A recording keeps the memory of a pass for itself. One that is not recorded must find room beside it."""
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # a recording has memory of its own, and that of passes before is not needed
        free, _ = torch.cuda.mem_get_info(device)
        if free >= needed:
            return None
        return f"a recording may take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"

    def _count(self, key: _Key) -> None:
        self._passes[key] = self._passes.get(key, 0) + 1

    def _seems_usual(self, hidden: Tensor, arguments: dict[str, Any]) -> bool:
        """Whether this may be a pass to be recorded, as far as can be told without a look at layers and parameters."""
        return (
            self._off is None
            and self._could_record(hidden)
            and torch.is_grad_enabled()
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and "max_length_q" in arguments
            and arguments.get("cu_seq_lens_q") is None
            and "context_group" not in arguments
        )

    def _key(
        self,
        hidden: Tensor,
        turns: Turns,
        arguments: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        norms: Sequence[Tensor],
    ) -> _Key | None:
        """What a recording depends on; None: this pass is none to be recorded."""
        if any(layer.gradient_checkpointing and layer.training for layer in self._layers):
            self.release()  # whoever computes layers again is short of memory
            return None
        usual = (
            self._seems_usual(hidden, arguments)
            and not any(map(_is_watched_or_drops, self._layers))
            and not (dist.is_initialized() and dist.get_world_size() > 1)
            and all(parameter.requires_grad for parameter in parameters)
        )
        if not usual:
            return None
        kinds = [(tensor.shape, tensor.dtype) for tensor in (hidden, *turns)]
        places = tuple(map(Tensor.data_ptr, [*norms, *parameters]))
        return (*kinds, hidden.requires_grad, arguments["max_length_q"], places, self._shared.arrangement)

    def _record(
        self, key: _Key, hidden: Tensor, turns: Turns, arguments: dict[str, Any], parameters: Sequence[nn.Parameter]
    ) -> Recording | None:
        for found in (self._recorded, self._passes, self._bytes):
            for other in [other for other in found if other[-2:] != key[-2:]]:  # weights or adapters are elsewhere now
                del found[other]
        if self._passes.get(key, 0) < PASSES_BEFORE:
            return None
        if len(self._recorded) >= MOST_SHAPES or any(kept.is_in_use() for kept in self._recorded.values()):
            return None
        needed = int(ROOM * self._bytes[key]) + sum(parameter.nbytes for parameter in parameters)
        reason = self._no_room(needed, hidden.device)
        if reason is None:
            try:
                self._recorded[key] = self._capture(hidden, turns, arguments, parameters)
            except RuntimeError as err:  # torch's out of memory is one, too
                reason = str(err).splitlines()[0]
        if reason is not None:
            self._give_up(reason)
        return self._recorded.get(key)

    def _give_up(self, reason: str) -> None:
        self._off = reason
        self._recorded.clear()
        logger.warning("passes through the layers are not recorded as CUDA graphs: %s", reason)

    def _capture(
        self, hidden: Tensor, turns: Turns, arguments: dict[str, Any], parameters: Sequence[nn.Parameter]
    ) -> Recording:
        # What somebody keeps of a pass before may tie the parameters themselves to another stream than a recording's.
        leaves = [nn.Parameter(parameter.detach()) for parameter in parameters]
        norms = [norm for norm in self._norms() if norm.weight.requires_grad]

        def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            with contextlib.ExitStack() as stack:
                rest = iter(leaves)
                for group in self._shared.groups:
                    own = list(itertools.islice(rest, len(group.parameters())))
                    stack.enter_context(group.with_parameters(own))
                stack.enter_context(with_weights(norms, list(rest)))
                return self._run(self._layers, x, (cos, sin), arguments)

        given = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        reads = [tensor.detach() for layer in self._layers for tensor in (*layer.parameters(), *layer.buffers())]
        return Recording(run, (given, *(turn.detach().clone() for turn in turns)), leaves, reads)

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _is_watched_or_drops(layer: Any) -> bool:
    """Whether somebody wants to see what the layer is given or gives, or a pass through it is random."""
    return is_watched(layer) or bool(layer.training and layer.self_attn.attention_dropout)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


class Graph(Protocol):
    """Such as torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


class Recording:
    """A pass forward and back, and where it reads and writes."""

    result: Tensor
    gradient_of_result: Tensor
    gradient_of_input: Tensor | None
    gradients: list[Tensor]
    """Of the parameters."""
    forward: Graph
    backward: Graph

    def __init__(
        self,
        run: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        parameters: Sequence[nn.Parameter],
        reads: Sequence[Tensor],
    ) -> None:
        """`reads`: memory that `run` reads and nobody else may keep."""
        self.inputs, self.reads = inputs, reads
        self._kinds = list(map(_kind, inputs))
        self._last: weakref.ref[_Token] | None = None
        self._capture(run, parameters)
        self._storages = list({gradient.untyped_storage()._cdata for gradient in self.gradients})
        self._own_uses = self._uses()

    def _capture(self, run: Callable[..., Tensor], parameters: Sequence[nn.Parameter]) -> None:
        device = self.inputs[0].device
        generator = torch.cuda.default_generators[device.index]
        before = generator.clone_state()
        try:
            # to come back to this stream, too: torch's own way back is not taken if a recording fails
            with torch.cuda.stream(torch.cuda.current_stream(device)):
                self._capture_both(run, parameters)
        except RuntimeError:
            generator.graphsafe_set_state(before)  # a recording that failed leaves it of no use to anyone
            raise

    def _capture_both(self, run: Callable[..., Tensor], parameters: Sequence[nn.Parameter]) -> None:
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        with torch.enable_grad(), torch.cuda.graph(forward, pool=pool, capture_error_mode="thread_local"):
            out = run(*self.inputs)
        self.gradient_of_result = torch.empty_like(out)
        with torch.cuda.graph(backward, pool=pool, capture_error_mode="thread_local"):
            self.gradient_of_input, self.gradients = self.go_back(out, parameters)
        self.result = out.detach()
        self.forward, self.backward = forward, backward

    def go_back(self, result: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor | None, list[Tensor]]:
        """From `gradient_of_result` to those of the input, if it has one, and of the parameters."""
        of_input = self.inputs[0].requires_grad
        wanted = [self.inputs[0], *parameters] if of_input else list(parameters)
        found = list(torch.autograd.grad(result, wanted, self.gradient_of_result))
        return found.pop(0) if of_input else None, found

    def is_in_use(self) -> bool:
        """Whether the backward pass of the last replay may still come: it reads what that left behind."""
        token = None if self._last is None else self._last()
        return token is not None and not token.went_back

    def is_free(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether nobody needs any more what a replay overwrites. Gradients that `parameters` have there move away."""
        if self.is_in_use():
            return False
        if self._uses() != self._own_uses:
            storages = set(self._storages)
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.untyped_storage()._cdata in storages:
                    parameter.grad = parameter.grad.clone()
        return self._uses() == self._own_uses

    def _uses(self) -> list[int]:
        """How many tensors there are where gradients are left."""
        return list(map(torch._C._storage_Use_Count, self._storages))

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether these are such inputs as it has, and a replay that is dropped afterwards would disturb nobody."""
        token = None if self._last is None else self._last()
        return (
            (token is None or (token.went_back and not token.may_come_again))
            and list(map(_kind, given)) == self._kinds
            and self._uses() == self._own_uses
        )

    def start(self, given: Sequence[Tensor]) -> None:
        """Replay the pass forward, which overwrites all that the one before left behind."""
        self._last = None
        torch._foreach_copy_(list(self.inputs), list(given))
        self.forward.replay()

    def started(self) -> tuple[Tensor, _Token]:
        """The result of the pass that was started, and what its backward pass has to show."""
        token = _Token()
        self._last = weakref.ref(token)
        return self.result.clone(), token

    def replay_backward(self, gradient: Tensor, token: _Token) -> tuple[Tensor | None, list[Tensor]]:
        """The gradients of the input, if it has one, and of all parameters, which stay right until the next replay."""
        if self._last is None or self._last() is not token:
            raise RuntimeError(
                "A second backward pass through recorded layers comes too late: a newer forward pass has overwritten"
                " what it reads. Call backward on the sum of the losses, or before the next forward pass."
            )
        if token.went_back:
            return self._go_back_again(gradient)
        token.went_back = True
        return self._replay_backward(gradient), [found.detach() for found in self.gradients]

    def _replay_backward(self, gradient: Tensor) -> Tensor | None:
        self.gradient_of_result.copy_(gradient)
        self.backward.replay()
        return None if self.gradient_of_input is None else self.gradient_of_input.clone()

    def _go_back_again(self, gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """The first time overwrote what it read, and left gradients that have to stay."""
        first = [kept.clone() for kept in self.gradients]
        self.forward.replay()
        of_input = self._replay_backward(gradient)
        second = [found.clone() for found in self.gradients]
        torch._foreach_copy_(self.gradients, first)
        return of_input, second


class _Token:
    """Lives as long as a backward pass of a replay may come."""

    went_back = False
    may_come_again = False
    """Whoever went back asked for the graph to be kept."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recording: Recording, started: bool, hidden: Tensor, cos: Tensor, sin: Tensor, *_parameters: Tensor
    ) -> Tensor:
        if not started:
            recording.start((hidden, cos, sin))
        result, ctx.token = recording.started()
        ctx.recording = recording
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_input, of_parameters = ctx.recording.replay_backward(gradient, ctx.token)
        ctx.token.may_come_again = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, of_input, None, None, *of_parameters

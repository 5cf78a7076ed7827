"""Fused layers as two CUDA graphs, forward and backward, for third-party trainers.

Third-party trainers run code between forward and backward, so each is captured separately. The layers' kernel launches
are the same in every step, about a thousand for a small model, and the host needs longer to issue them than the GPU to
run them (1B LoRA under TRL on an H200: about 60 ms of kernels in steps of 79 to 100 ms). After capture, the first layer
replays all of them and the others pass their input through.

Not captured: the embedding, the output head, and copying the adapters' values into the matrices. Only batches with one
document per row are captured, on one GPU, without activation checkpointing or dropout, and only after warm-up passes of
the same shape in which every layer got the output of the one before it. Everything else runs eagerly: a second forward
before the backward of the first, layers with hooks, saved-tensor hooks, other shapes. A second backward through the
same forward replays the forward again; after a newer forward it raises, because its saved tensors have been
overwritten.

Parameter gradients stay in the graph's memory pool (copies would take another 1.9 GB for full fine-tuning of 1B). The
next replay overwrites that memory, so gradients that are being accumulated are first moved away. If anything else holds
one, that pass is not replayed.

A trainer that synchronizes starts each step with an idle GPU, and validating that a captured pass still applies means
checking hundreds of modules and tensors. So the last pass is replayed speculatively and validated while the GPU is
busy; on a mismatch its result is dropped. The captured pass and the adapter tables keep the memory it reads alive, even
if parameters have moved since.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pantheraml.base import log
from pantheraml.models.cuda_capture import CapturedGraph, capture
from pantheraml.models.fast.group_set import GroupSet
from pantheraml.models.fast.layer_chain import ChainObserver, ChainOutput, DecoderBody, RopeTable, RunLayers, is_hooked
from pantheraml.models.fast.trainable_group import swapped_weights, weight_of

logger = log.get(__name__)

WARMUP_PASSES = 2
"""Eager passes per shape before capture: kernels are compiled and autotuned outside of a capture."""
MAX_SHAPES = 2
MEMORY_FACTOR = 2.5
"""Free memory required for capture, as a multiple of the saved tensors of a pass."""

_Key = tuple[object, ...]


class _WarmupPass(ChainObserver):
    def __init__(self, key: _Key, arguments: dict[str, Any], allocated: int) -> None:
        super().__init__(arguments)
        self.key, self.allocated_before = key, allocated


class LayerGraphs:
    """Captures and replays passes through `layers`, all of a model's decoder layers in order."""

    def __init__(self, layers: Sequence[Any], body: DecoderBody, shared: GroupSet, run: RunLayers) -> None:
        self._layers, self._body, self._shared, self._run = layers, body, shared, run
        self._captured: dict[_Key, CapturedPass] = {}
        self._warmup_counts: dict[_Key, int] = {}
        self._saved_bytes: dict[_Key, int] = {}
        """Bytes of saved tensors of a pass."""
        self._warmup: _WarmupPass | None = None
        self._output = ChainOutput(layers)
        self._disabled_reason: str | None = None
        self._last_replayed: CapturedPass | None = None
        self._speculative: CapturedPass | None = None
        """The pass that was replayed before it was validated."""

    def replay_speculatively(self, hidden: Tensor, arguments: dict[str, Any]) -> bool:
        """Called with the first layer: if cheap checks match the last pass, write the adapters and replay it.

        Returns whether it did; `begin` validates the choice.
        """
        last = self._last_replayed
        if last is not None and not torch.is_grad_enabled() and hidden.device == last.inputs[0].device:
            self._speculative = None  # a reference pass, say: the next one with gradients is probably like the last
            return False
        last, self._last_replayed, self._speculative = self._last_replayed, None, None
        rope = arguments.get("position_embeddings")
        if last is not None and hidden.device != last.inputs[0].device:
            self.release()  # the model moved, and a captured pass holds the old weights
        may_be_capturable = (
            self._body.forward_started and not self._output.left and self._may_be_capturable(hidden, arguments)
        )
        if last is None or rope is None or not may_be_capturable:
            return False
        given = (hidden, *rope)
        if not last.fits(given):
            return False
        with torch.no_grad():
            self._shared.write()
            last.start(given)
        self._speculative = last
        return True

    def begin(self, hidden: Tensor, rope: RopeTable, arguments: dict[str, Any]) -> Tensor | None:
        """Called with the first layer: return the output of all layers, or None if each is to run by itself."""
        if self._output.left:
            self._disable(f"{self._output.left} layers were skipped in a pass, which a captured pass cannot do")
        self._output.begin(None)
        self._warmup = None
        if not self._body.starts_full_pass():
            return None
        parameters = [parameter for group in self._shared.groups for parameter in group.parameters()]
        modules = self._norms()
        norms = list(map(weight_of, modules))
        if any(w.requires_grad and w is not m._parameters.get("weight") for w, m in zip(norms, modules, strict=True)):
            return None  # PEFT holds a trainable copy beside it (modules_to_save)
        parameters += [weight for weight in norms if weight.requires_grad]
        key = self._key(hidden, rope, arguments, parameters, norms)
        if key is None:
            return None
        captured = self._captured.get(key)
        started = captured is not None and captured is self._speculative
        self._speculative = None  # before another capture, which may need its memory
        if captured is None:
            captured = self._capture_if_warm(key, hidden, rope, arguments, parameters)
        if captured is None or not (started or captured.is_free(parameters)):
            self._warmup = _WarmupPass(key, arguments, self._allocated_bytes(hidden.device))
            return None
        result: Tensor = _Replay.apply(captured, started, hidden, *rope, *parameters)
        self._last_replayed = captured
        self._output.begin(result)
        return result

    def is_passthrough(self, layer: Any, hidden: Tensor) -> bool:
        """Return whether this layer's input is the output of all layers already."""
        return self._output.passes_through(layer, hidden)

    def release(self) -> None:
        """Free the memory of all captured passes; they are captured again when needed."""
        if not any(other.is_in_use() for other in self._captured.values()):
            self._captured.clear()
            self._last_replayed = self._speculative = None

    def ran(self, layer: Any, given: Tensor, result: Tensor, arguments: dict[str, Any]) -> None:
        """Note that a layer ran by itself."""
        warmup = self._warmup
        if warmup is None:
            return
        warmup.add(layer, given, result, arguments)
        if layer is self._layers[-1]:
            self._warmup = None
            if warmup.saw_chain(self._layers):
                key = warmup.key
                self._saved_bytes[key] = self._allocated_bytes(result.device) - warmup.allocated_before
                # counted when its backward starts, which has kernels of its own
                result.register_hook(lambda _: self._count(key))

    def _can_capture(self, hidden: Tensor) -> bool:
        """Return False on a CPU, and inside of another capture."""
        return (
            hidden.is_cuda
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
        )  # fmt: skip

    def _allocated_bytes(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device)

    def _norms(self) -> list[Any]:
        return [norm for layer in self._layers for norm in layer.fused_parts.norms(layer)]

    def _lacks_memory(self, needed: int, device: torch.device) -> str | None:
        """Return why there is too little memory, or None.

        A captured pass keeps its memory, and eager passes of other shapes need more beside it.
        """
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # a capture has its own memory pool; the cache of earlier passes is not needed
        free, _ = torch.cuda.mem_get_info(device)
        if free >= needed:
            return None
        return f"a capture may take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"

    def _count(self, key: _Key) -> None:
        self._warmup_counts[key] = self._warmup_counts.get(key, 0) + 1

    def _may_be_capturable(self, hidden: Tensor, arguments: dict[str, Any]) -> bool:
        """Return whether this pass may be captured, without checking layers and parameters."""
        return (
            self._disabled_reason is None
            and self._can_capture(hidden)
            and torch.is_grad_enabled()
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and "max_length_q" in arguments
            and arguments.get("cu_seq_lens_q") is None
            and "context_group" not in arguments
        )

    def _key(
        self,
        hidden: Tensor,
        rope: RopeTable,
        arguments: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        norms: Sequence[Tensor],
    ) -> _Key | None:
        """Return what a captured pass depends on; None if this pass cannot be captured."""
        if any(layer.gradient_checkpointing and layer.training for layer in self._layers):
            self.release()  # activation checkpointing means that memory is short
            return None
        capturable = (
            self._may_be_capturable(hidden, arguments)
            and not any(map(_is_hooked_or_random, self._layers))
            and not (dist.is_initialized() and dist.get_world_size() > 1)
            and all(parameter.requires_grad for parameter in parameters)
        )
        if not capturable:
            return None
        signatures = [(tensor.shape, tensor.dtype) for tensor in (hidden, *rope)]
        addresses = tuple(map(Tensor.data_ptr, [*norms, *parameters]))
        return (
            *signatures,
            hidden.requires_grad,
            arguments["max_length_q"],
            addresses,
            self._shared.adapter_layout_version,
        )

    def _capture_if_warm(
        self, key: _Key, hidden: Tensor, rope: RopeTable, arguments: dict[str, Any], parameters: Sequence[nn.Parameter]
    ) -> CapturedPass | None:
        for table in (self._captured, self._warmup_counts, self._saved_bytes):
            for other in [other for other in table if other[-2:] != key[-2:]]:  # weights or adapters have moved
                del table[other]
        if self._warmup_counts.get(key, 0) < WARMUP_PASSES:
            return None
        if len(self._captured) >= MAX_SHAPES or any(other.is_in_use() for other in self._captured.values()):
            return None
        needed = int(MEMORY_FACTOR * self._saved_bytes[key]) + sum(parameter.nbytes for parameter in parameters)
        reason = self._lacks_memory(needed, hidden.device)
        if reason is None:
            try:
                self._captured[key] = self._capture(hidden, rope, arguments, parameters)
            except RuntimeError as err:  # includes torch.OutOfMemoryError
                reason = str(err).splitlines()[0]
        if reason is not None:
            self._disable(reason)
        return self._captured.get(key)

    def _disable(self, reason: str) -> None:
        self._disabled_reason = reason
        self._captured.clear()
        logger.warning("decoder layers are not captured as CUDA graphs: %s", reason)

    def _capture(
        self, hidden: Tensor, rope: RopeTable, arguments: dict[str, Any], parameters: Sequence[nn.Parameter]
    ) -> CapturedPass:
        # Graphs of earlier passes that are still alive may tie the parameters to another stream than the capture's.
        leaves = [nn.Parameter(parameter.detach()) for parameter in parameters]
        norms = [norm for norm in self._norms() if norm.weight.requires_grad]

        def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            with contextlib.ExitStack() as stack:
                rest = iter(leaves)
                for group in self._shared.groups:
                    own = list(itertools.islice(rest, len(group.parameters())))
                    stack.enter_context(group.swapped_parameters(own))
                stack.enter_context(swapped_weights(norms, list(rest)))
                return self._run(self._layers, x, (cos, sin), arguments)

        given = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        reads = [tensor.detach() for layer in self._layers for tensor in (*layer.parameters(), *layer.buffers())]
        return CapturedPass(run, (given, *(table.detach().clone() for table in rope)), leaves, reads)

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _is_hooked_or_random(layer: Any) -> bool:
    """Return whether the layer is hooked, has attention dropout, or reads tensors that a capture has no copy of."""
    dropout = layer.training and layer.self_attn.attention_dropout
    return is_hooked(layer) or bool(dropout) or layer.fused_parts.reads_positions


def _signature(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


class CapturedPass:
    """A captured forward and backward, and the tensors they read and write."""

    result: Tensor
    grad_output: Tensor
    grad_input: Tensor | None
    gradients: list[Tensor]
    """Gradients of the parameters."""
    forward: CapturedGraph
    backward: CapturedGraph

    def __init__(
        self,
        run: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        parameters: Sequence[nn.Parameter],
        reads: Sequence[Tensor],
    ) -> None:
        """`reads`: tensors that `run` reads and that must stay alive."""
        self.inputs, self.reads = inputs, reads
        self._signatures = list(map(_signature, inputs))
        self._last: weakref.ref[_BackwardToken] | None = None
        self._capture(run, parameters)
        self._storages = list({gradient.untyped_storage()._cdata for gradient in self.gradients})
        self._own_uses = self._uses()

    def _capture(self, run: Callable[..., Tensor], parameters: Sequence[nn.Parameter]) -> None:
        device, pool = self.inputs[0].device, torch.cuda.graph_pool_handle()
        with torch.enable_grad():
            self.forward, out = capture(lambda: run(*self.inputs), device, pool)
        self.grad_output = torch.empty_like(out)
        self.backward, (self.grad_input, self.gradients) = capture(
            lambda: self.run_backward(out, parameters), device, pool
        )
        self.result = out.detach()

    def run_backward(self, result: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor | None, list[Tensor]]:
        """Compute the gradients of the input, if it needs one, and of the parameters from `grad_output`."""
        needs_input_grad = self.inputs[0].requires_grad
        targets = [self.inputs[0], *parameters] if needs_input_grad else list(parameters)
        gradients = list(torch.autograd.grad(result, targets, self.grad_output))
        return gradients.pop(0) if needs_input_grad else None, gradients

    def is_in_use(self) -> bool:
        """Return whether the backward of the last replay may still run: it reads the saved tensors."""
        token = None if self._last is None else self._last()
        return token is not None and not token.backward_done

    def is_free(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether a replay would overwrite nothing that is still needed.

        Gradients of `parameters` that are in the graph's memory are moved away.
        """
        if self.is_in_use():
            return False
        if self._uses() != self._own_uses:
            storages = set(self._storages)
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.untyped_storage()._cdata in storages:
                    parameter.grad = parameter.grad.clone()
        return self._uses() == self._own_uses

    def _uses(self) -> list[int]:
        """Return the reference counts of the gradients' storages."""
        return list(map(torch._C._storage_Use_Count, self._storages))

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Return whether the inputs match, and a replay whose result is dropped would overwrite nothing needed."""
        token = None if self._last is None else self._last()
        return (
            (token is None or (token.backward_done and not token.graph_retained))
            and list(map(_signature, given)) == self._signatures
            and self._uses() == self._own_uses
        )

    def start(self, given: Sequence[Tensor]) -> None:
        """Replay the forward, which overwrites all saved tensors of the pass before."""
        self._last = None
        torch._foreach_copy_(list(self.inputs), list(given))
        self.forward.replay()

    def started(self) -> tuple[Tensor, _BackwardToken]:
        """Return the result of the replayed forward, and the token for its backward."""
        token = _BackwardToken()
        self._last = weakref.ref(token)
        return self.result.clone(), token

    def replay_backward(self, gradient: Tensor, token: _BackwardToken) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients of the input, if it has one, and of all parameters; valid until the next replay."""
        if self._last is None or self._last() is not token:
            raise RuntimeError(
                "A second backward through captured layers came too late: a newer forward has overwritten its saved"
                " tensors. Call backward on the sum of the losses, or before the next forward."
            )
        if token.backward_done:
            return self._replay_backward_again(gradient)
        token.backward_done = True
        return self._replay_backward(gradient), [gradient.detach() for gradient in self.gradients]

    def _replay_backward(self, gradient: Tensor) -> Tensor | None:
        self.grad_output.copy_(gradient)
        self.backward.replay()
        return None if self.grad_input is None else self.grad_input.clone()

    def _replay_backward_again(self, gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Run a second backward: the first overwrote its saved tensors, and its gradients must be preserved."""
        first = [gradient.clone() for gradient in self.gradients]
        self.forward.replay()
        d_input = self._replay_backward(gradient)
        second = [gradient.clone() for gradient in self.gradients]
        torch._foreach_copy_(self.gradients, first)
        return d_input, second


class _BackwardToken:
    """Lives as long as the backward of a replay may run."""

    backward_done = False
    graph_retained = False
    """Whether backward was called with retain_graph=True."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, captured: CapturedPass, started: bool, hidden: Tensor, cos: Tensor, sin: Tensor, *_parameters: Tensor
    ) -> Tensor:
        if not started:
            captured.start((hidden, cos, sin))
        result, ctx.token = captured.started()
        ctx.captured = captured
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        d_input, d_parameters = ctx.captured.replay_backward(gradient, ctx.token)
        ctx.token.graph_retained = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, d_input, None, None, *d_parameters

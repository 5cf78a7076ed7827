"""FlashAttention 4's kernels on a GPU, called as operators and selected by document attention.

References and tolerances are those of test_gpu_attention.py: each document alone in float32, 1 % of the norm.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pantheraml.engine.memory.checkpointing import _selective_contexts
from pantheraml.models import flash
from pantheraml.models.attention import document_attention
from pantheraml.models.document_layout import DocumentLayout
from tests.gpu.test_gpu_attention import LENGTHS, ROWS, WIDTH, check, layout, merged, split
from tests.gpu.waiting import no_waiting

SHAPE = (8, 2, 64)
FEW = [130, 382, 511, 1]
"""Documents that are not so short that the kernels would be left for the padding."""


def missing() -> str | None:
    if not flash._installed():
        return f"{flash.PACKAGE} {flash.RELEASE} is not installed"
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    return None if major == flash.CAPABILITY else "no GPU of compute capability 9.x"


pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),  # the package, compiling
]


class Counted:
    """The package, counting calls of its functions."""

    def __init__(self, package: Any) -> None:
        self._inner, self.forward, self.backward = package, 0, 0

    def _flash_attn_fwd(self, *args: Any, **kwargs: Any) -> Any:
        self.forward += 1
        return self._inner._flash_attn_fwd(*args, **kwargs)

    def _flash_attn_bwd(self, *args: Any, **kwargs: Any) -> Any:
        self.backward += 1
        return self._inner._flash_attn_bwd(*args, **kwargs)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts only calls after the trial of the kernels, if that came before."""
    counted = Counted(flash._package())
    monkeypatch.setattr(flash, "_package", lambda: counted)
    return counted


@pytest.mark.parametrize("shape", [(32, 8, 128), (32, 8, 64), (8, 8, 64), (8, 1, 128), (6, 2, 96), (12, 12, 128)])
@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_against_each_document_alone(
    shape: tuple[int, int, int], window: int | None, packed: bool, counted: Counted
) -> None:
    """Two windows and two scales share kernels, so that a constant compiled into them would show."""
    lengths = FEW if packed else [WIDTH] * ROWS
    documents = layout(lengths) if packed else DocumentLayout(None, WIDTH)
    check(shape, documents, lengths, window=window)
    assert counted.forward
    assert counted.backward


def test_float16(counted: Counted) -> None:
    check(SHAPE, layout(FEW), FEW, dtype=torch.float16)
    assert counted.backward


@pytest.mark.parametrize("empty", [1, 4])
@pytest.mark.parametrize("window", [None, 100])
def test_empty_documents(empty: int, window: int | None, counted: Counted) -> None:
    check((32, 8, 128), layout(FEW, empty=empty, longest=WIDTH), FEW, window=window)
    assert counted.backward


@pytest.mark.parametrize("ends", [25, flash.MANY + 50])
def test_empty_documents_anywhere_in_the_operator(ends: int) -> None:
    """More than document attention would send here; before, between and after the others."""
    shape, lengths = (32, 8, 128), [0, 0, 1, 130, 0, 7, 256, 118, 511, 0, 1]
    lengths = lengths + [0] * (ends - len(lengths))

    def attention(_: Any, *tensors: Tensor, scaling: float, cu_seq_lens_q: Tensor, **others: Any) -> Any:
        query, key, value, _ = tensors
        return flash.attend(query, key, value, cu_seq_lens_q, window=None, scaling=scaling), None

    check(shape, layout(lengths, longest=WIDTH), lengths, attention=attention)


def test_many_short_documents_use_the_torch_kernel(counted: Counted) -> None:
    check(SHAPE, layout(LENGTHS, empty=25), LENGTHS)
    assert not counted.forward


@pytest.mark.parametrize("rows_and_width", [(1, 256), (1, 257), (3, 300), (5, 1001)])
def test_odd_sizes_agree_with_torch(rows_and_width: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows, width = rows_and_width
    tensors = [torch.randn(rows, h, width, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    direction = torch.randn(rows, width, 8, 64, device="cuda", dtype=torch.bfloat16)

    def results() -> list[Tensor]:
        out = document_attention(nn.Module(), *tensors, None)[0]
        return [out.detach(), *torch.autograd.grad(out, tensors, direction)]

    actual = results()
    monkeypatch.setattr(flash, "supports", lambda *_, **__: False)
    for actual_part, expected_part in zip(actual, results(), strict=True):
        assert float((actual_part - expected_part).float().norm() / expected_part.float().norm()) < 1e-2


def test_expanded_gradient() -> None:
    """autograd passes it without memory of its own."""
    tensors = split(merged(*SHAPE), *SHAPE)
    out = document_attention(nn.Module(), *tensors, None)[0]
    (expected,) = torch.autograd.grad(out, tensors[:1], torch.ones_like(out), retain_graph=True)
    (actual,) = torch.autograd.grad(out.sum(), tensors[:1])
    assert torch.allclose(actual, expected, atol=1e-2, rtol=1e-2)


def test_under_autocast(counted: Counted) -> None:
    def attention(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return document_attention(*args, **kwargs)

    check(
        SHAPE, layout(FEW), FEW, dtype=torch.float32, tolerance=2e-2, attention=attention
    )  # inputs are rounded as well
    assert counted.backward


# torch.compile triggers warnings in torch, which would be errors here
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(packed: bool, backend: str, counted: Counted) -> None:
    """With kernels first tried while the compiler traces the call."""
    flash._checked.cache_clear()
    lengths = FEW if packed else [WIDTH] * ROWS
    documents = layout(lengths, empty=1) if packed else DocumentLayout(None, WIDTH)
    compiled = torch.compile(document_attention, dynamic=False, fullgraph=True, backend=backend)
    check(SHAPE, documents, lengths, attention=compiled)
    assert counted.forward == counted.backward == 2  # one of each was the trial


@pytest.mark.parametrize("packed", [False, True])
def test_selective_checkpointing_does_not_recompute_attention(packed: bool, counted: Counted) -> None:
    """Also where the kernels are first tried inside: trial results must not be taken for the layer's."""
    flash._checked.cache_clear()
    lengths = FEW if packed else [WIDTH] * ROWS
    documents = layout(lengths) if packed else DocumentLayout(None, WIDTH)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **others: Any) -> Any:
        def layer(*tensors: Tensor) -> Tensor:
            return document_attention(module, *tensors, mask, **others)[0] * 1.0

        return checkpoint(layer, query, key, value, use_reentrant=False, context_fn=_selective_contexts), None

    check(SHAPE, documents, lengths, attention=attention)
    assert counted.forward == counted.backward == 2  # one of each was the trial


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # the buffer is older than the graph
@pytest.mark.parametrize("packed", [False, True])
def test_capture_and_replay(packed: bool) -> None:
    """A graph uses the boundaries and values present at replay."""
    buffer = merged(*SHAPE)
    ends = layout([WIDTH] * ROWS, empty=2).boundaries
    assert ends is not None
    arguments = DocumentLayout(ends if packed else None, WIDTH).arguments()

    def step() -> tuple[Tensor, Tensor]:
        out = document_attention(nn.Module(), *split(buffer, *SHAPE), None, **arguments)[0]
        return out, torch.autograd.grad(out, buffer, out.detach())[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    with torch.no_grad():
        buffer.copy_(torch.randn_like(buffer))
    ends.copy_(layout(FEW).boundaries)
    graph.replay()
    replayed = [tensor.clone() for tensor in recorded]
    for actual_part, expected_part in zip(replayed, step(), strict=True):
        assert (
            float((actual_part - expected_part).detach().float().norm() / expected_part.detach().float().norm()) < 1e-3
        )


def test_no_sync_with_the_gpu() -> None:
    tensors, arguments = split(merged(*SHAPE), *SHAPE), layout(FEW).arguments()
    document_attention(nn.Module(), *tensors, None, **arguments)[0].sum().backward(retain_graph=True)
    with no_waiting():
        document_attention(nn.Module(), *tensors, None, **arguments)[0].sum().backward()


def test_it_says_which_kernels_are_used(caplog: pytest.LogCaptureFixture) -> None:
    flash._checked.cache_clear()
    caplog.set_level(logging.INFO, logger="pantheraml")
    for _ in range(2):
        document_attention(nn.Module(), *split(merged(*SHAPE), *SHAPE), None)
    (record,) = (record for record in caplog.records if record.name == flash.__name__)
    assert "uses flash-attn-4" in record.getMessage()


def test_failing_package_falls_back_to_torch_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler")

    flash._checked.cache_clear()
    monkeypatch.setattr(flash, "_package", broken)
    try:
        check(SHAPE, layout(FEW), FEW)
    finally:
        flash._checked.cache_clear()
    (record,) = (record for record in caplog.records if record.name == flash.__name__)
    assert "RuntimeError: no compiler" in record.getMessage()


def test_not_with_deterministic_algorithms(counted: Counted) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        document_attention(nn.Module(), *split(merged(*SHAPE), *SHAPE), None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not counted.forward

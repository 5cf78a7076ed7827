"""Everything around FlashAttention 4's kernels, which need a GPU (tests/gpu/test_gpu_flash.py): when they are chosen,
and the two custom ops, with a fake package that has the same layouts."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from pantheraml.engine.memory.checkpointing import _selective_contexts
from pantheraml.models import flash
from pantheraml.models.attention import document_attention
from pantheraml.models.block_mask import block_mask
from pantheraml.models.document_layout import DocumentLayout

ROWS, WIDTH, HEADS, KEY_HEADS, HEAD_DIM = 2, 24, 4, 2, 8
ENDS = [0, 9, 12, 24, 24, 25, 42, 48, 48]


def boundaries() -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32)


class Package:
    """Fake `flash_attn.cute.interface`, as far as it is called, with a mask and in float32."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **settings: Any) -> Any:
        assert return_lse
        self.calls.append("forward")
        out, sums = self._attention(q, k, v, **settings)
        return out.to(q.dtype).contiguous(), sums.contiguous(), None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        **settings: Any,
    ) -> None:
        self.calls.append("backward")
        assert dout.is_contiguous()
        again, sums = self._attention(q, k, v, **settings)
        torch.testing.assert_close(again.to(out.dtype), out)
        torch.testing.assert_close(sums, lse)
        query, key, value, shares = self._shares(q, k, v, **settings)
        down = dout.float().view(*query.shape[::2], -1, dout.shape[-1]).transpose(1, 2)
        change = shares * (down @ value.mT - (down * (shares @ value)).sum(dim=-1, keepdim=True))
        scale = settings["softmax_scale"]
        actual = (scale * change @ key, scale * change.mT @ query, shares.mT @ down)
        for here, gradient in zip((dq, dk, dv), actual, strict=True):
            heads = here.shape[-2]  # the sum over a group of query heads
            here.copy_(gradient.unflatten(1, (heads, -1)).sum(dim=2).transpose(1, 2).reshape(here.shape))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        _, _, value, scores = self._scores(q, k, v, **settings)
        out, sums = (scores.softmax(dim=-1) @ value).transpose(1, 2), scores.logsumexp(dim=-1)
        return (out[0], sums[0]) if q.ndim == 3 else (out, sums)

    def _shares(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, ...]:
        *inputs, scores = self._scores(q, k, v, **settings)
        return (*inputs, scores.softmax(dim=-1))

    def _scores(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        softmax_scale: float,
        window_size_left: int | None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Query, key, value [B, H, S, D] with repeated key heads, and the scores."""
        assert causal
        assert cu_seqlens_q is cu_seqlens_k
        if cu_seqlens_q is not None:
            assert max_seqlen_q == max_seqlen_k == WIDTH
            assert cu_seqlens_q.dtype == torch.int32
            q, k, v = (tensor[None] for tensor in (q, k, v))
            ends = cu_seqlens_q
        else:
            ends = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1], dtype=torch.int32)
        groups = q.shape[2] // k.shape[2]
        q, k, v = (tensor.float().transpose(1, 2) for tensor in (q, k, v))
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
        window = None if window_size_left is None else window_size_left + 1
        seen = block_mask(ends, q.shape[0], q.shape[2], window)
        return q, k, v, (softmax_scale * q @ k.mT).masked_fill(~seen, -torch.inf)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package()
    monkeypatch.setattr(flash, "_package", lambda: package)
    return package


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Views of one buffer, [B, H, S, D]."""
    torch.manual_seed(0)
    buffer = torch.randn(ROWS, WIDTH, HEADS + 2 * KEY_HEADS, HEAD_DIM, dtype=dtype)
    parts = buffer.split([HEADS, KEY_HEADS, KEY_HEADS], dim=2)
    return [part.detach().transpose(1, 2).requires_grad_() for part in parts]


def with_gradients(inputs: list[Tensor], call: Callable[..., Tensor]) -> list[Tensor]:
    out = call(*inputs)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.usefixtures("package")
def test_the_ops_match_document_attention(packed: bool, window: int | None, scaling: float | None) -> None:
    ends = boundaries() if packed else None

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash.attend(query, key, value, ends, window=window, scaling=scaling)

    def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        arguments = {"sliding_window": window, "scaling": scaling, **DocumentLayout(ends, WIDTH).arguments()}
        return document_attention(nn.Module(), query, key, value, None, **arguments)[0]

    actual, expected = with_gradients(tensors(), ours), with_gradients(tensors(), torchs)
    assert actual[0].is_contiguous()
    for here, there in zip(actual, expected, strict=True):
        torch.testing.assert_close(here, there)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.usefixtures("package")
def test_the_ops_pass_opcheck(packed: bool, window: int | None) -> None:
    """Schema, fake tensors, AOT autograd; strides are compared too."""
    inputs = [tensor.detach().transpose(1, 2) for tensor in tensors()]
    inputs = [tensor.flatten(0, 1) if packed else tensor for tensor in inputs]
    settings = (boundaries() if packed else None, WIDTH, 0.3, window)
    with_graph = [tensor.detach().requires_grad_() for tensor in inputs]
    torch.library.opcheck(torch.ops.pantheraml.flash_forward.default, (*with_graph, *settings))
    out, sums = torch.ops.pantheraml.flash_forward(*inputs, *settings)
    backward = (torch.ones_like(out), *inputs, out, sums, *settings)
    # second-order derivatives are not supported, so not tested
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.pantheraml.flash_backward.default, backward, test_utils=checks)


@pytest.mark.parametrize("packed", [False, True])
def test_fake_tensors_need_no_package(packed: bool) -> None:
    places = (ROWS * WIDTH,) if packed else (ROWS, WIDTH)
    with FakeTensorMode():
        query, key = (
            torch.empty(*places, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for heads in (HEADS, KEY_HEADS)
        )
        settings = (torch.empty(9, dtype=torch.int32, device="cuda") if packed else None, WIDTH, 0.3, None)
        out, sums = torch.ops.pantheraml.flash_forward(query, key, key, *settings)
        gradients = torch.ops.pantheraml.flash_backward(out, query, key, key, out, sums, *settings)
    assert (out.shape, out.dtype, out.device) == (query.shape, torch.bfloat16, query.device)
    assert tuple(sums.shape) == ((HEADS, *places) if packed else (ROWS, HEADS, WIDTH))
    assert sums.dtype == torch.float32
    assert [tuple(gradient.shape) for gradient in gradients] == [tuple(t.shape) for t in (query, key, key)]
    assert all(gradient.is_contiguous() and gradient.dtype == torch.bfloat16 for gradient in gradients)


def test_two_backwards_through_one_graph(package: Package) -> None:
    inputs = tensors()
    out = flash.attend(*inputs, boundaries(), window=None, scaling=None)
    first, second = (torch.autograd.grad(out.sum(), inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(here, there) for here, there in zip(first, second, strict=True))
    assert package.calls == ["forward", "backward", "backward"]


def test_selective_checkpointing_saves_the_output(package: Package) -> None:
    def layer(*inputs: Tensor) -> Tensor:
        return flash.attend(*(3 * tensor for tensor in inputs), boundaries(), window=None, scaling=None).square()

    def checkpointed(*inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, *inputs, use_reentrant=False, context_fn=_selective_contexts)
        return out

    expected = with_gradients(tensors(), layer)
    package.calls.clear()
    actual = with_gradients(tensors(), checkpointed)
    assert package.calls == ["forward", "backward"]
    assert all(torch.equal(here, there) for here, there in zip(actual, expected, strict=True))


GOOD: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "shape": (4, 32, 2048, 128),
    "value_dim": 128,
    "documents": 0,
    "dropout": 0.0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"shape": (1, 8, flash.SHORTEST, 64), "value_dim": 64},
        {"shape": (3, 8, 2001, 96), "value_dim": 96},
        {"documents": 64},
    ],
)
def test_supported_calls(changes: dict[str, Any]) -> None:
    assert flash.fits(**GOOD | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"dropout": 0.1},
        {"value_dim": 64},
        *({"shape": (4, 32, 2048, size), "value_dim": size} for size in (32, 72, 80, 112, 192, 256)),
        {"shape": (4, 32, flash.SHORTEST - 1, 128)},
        {"documents": 65},
    ],
)
def test_unsupported_calls(changes: dict[str, Any]) -> None:
    assert not flash.fits(**GOOD | changes)


def test_never_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_works", lambda *_: pytest.fail("kernels were requested"))
    query = torch.zeros(1, 1, 512, 64, dtype=torch.bfloat16)
    assert not flash.supports(query, query, query, None, window=None, dropout=0.0)


class OnGpu:
    """A tensor that claims to be on a GPU."""

    def __init__(self, heads: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.is_cuda, self.dtype, self.shape = True, dtype, (4, heads, 2048, 128)
        self.device = torch.device("cuda", 0)


def supported(**changes: Any) -> bool:
    key: Any = OnGpu(8)
    arguments: dict[str, Any] = {"query": OnGpu(32), "key": key, "value": key, "boundaries": None}
    return flash.supports(**arguments | {"window": None, "dropout": 0.0} | changes)


def test_which_kernels_a_call_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    monkeypatch.setattr(flash, "_works", lambda *kind: requested.append(kind[1:]) or True)
    assert supported()
    assert supported(boundaries=boundaries(), window=7)
    assert supported(boundaries=torch.zeros(66, dtype=torch.int32)) is False  # too many for so few tokens
    assert supported(query=OnGpu(32, torch.float32)) is False  # not the dtype of key and value
    assert requested == [
        (torch.bfloat16, 128, 4, False, False, False),
        (torch.bfloat16, 128, 4, True, True, False),
    ]


def test_not_used_with_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_works", lambda *_: True)
    assert supported()
    torch.use_deterministic_algorithms(True)
    try:
        assert not supported()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A fake GPU; `version`: of the installed package."""
    settings: dict[str, Any] = {"capability": (9, 0), "version": flash.RELEASE, "fault": None, "probes": 0}

    def version(name: str) -> str:
        assert name == "flash-attn-4"
        if settings["version"] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(settings["version"])

    def fault(*_: Any) -> str | None:
        settings["probes"] += 1
        return settings["fault"]  # type: ignore[no-any-return]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: settings["capability"])
    monkeypatch.setattr(flash, "_fault", fault)
    clear_caches()
    yield settings
    clear_caches()


def clear_caches() -> None:
    flash._installed.cache_clear()
    flash._checked.cache_clear()
    flash._failed.clear()


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_the_first_call_checks_the_kernels_and_logs(hopper: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pantheraml")
    assert supported()
    assert supported()
    assert hopper["probes"] == 1
    ((level, message),) = logged(caplog)
    assert level == logging.INFO
    assert message == "attention (whole rows, 4 x heads of 128, bfloat16) uses flash-attn-4 4.0.0b36"


def test_failing_kernels_are_logged_once_and_not_used(hopper: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    hopper["fault"] = "DSLError: no ptxas"
    assert not supported()
    assert not supported()
    assert hopper["probes"] == 1
    ((level, message),) = logged(caplog)
    assert level == logging.WARNING
    assert "uses torch's kernels" in message
    assert "DSLError: no ptxas" in message


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_are_not_checked(
    hopper: dict[str, Any], capability: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    hopper["capability"] = capability
    assert not supported()
    assert not hopper["probes"]
    assert not logged(caplog)


def test_without_the_package_nothing_is_checked(hopper: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    hopper["version"] = None
    assert not supported()
    assert not hopper["probes"]
    assert not logged(caplog)


def test_another_release_is_not_used(hopper: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    hopper["version"] = "4.1.0"
    assert not supported()
    assert not supported(window=3)
    assert not hopper["probes"]
    ((level, message),) = logged(caplog)
    assert level == logging.WARNING
    assert "4.1.0" in message


def test_the_extra_pins_the_supported_release() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (requirement,) = (r for r in project["optional-dependencies"]["flash"] if r.startswith(flash.PACKAGE))
    assert f"=={flash.RELEASE}" in requirement


def kinds() -> Iterator[flash.KernelVariant]:
    for packed, windowed, many in itertools.product((False, True), repeat=3):
        if packed or not many:
            yield flash.KernelVariant(torch.float32, HEAD_DIM, 2, packed, windowed, many)


@pytest.mark.parametrize("kind", kinds(), ids=str)
def test_the_comparison_with_torch(
    package: Package, kind: flash.KernelVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "SHORTEST", WIDTH)
    device = torch.device("cpu")
    before = torch.get_rng_state()
    assert flash._difference(device, kind) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert package.calls == ["forward", "backward"]
    exact = package._scores

    def narrower(*args: Any, window_size_left: int | None, **kwargs: Any) -> tuple[Tensor, ...]:
        window = WIDTH // 2 if window_size_left is None else window_size_left - 1
        return exact(*args, window_size_left=window, **kwargs)

    package._scores = narrower  # type: ignore[method-assign]
    assert "differs from torch's" in str(flash._difference(device, kind))


def test_a_fault_is_the_exception_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(flash, "_difference", broken)
    assert flash._fault(torch.device("cuda"), next(kinds())) == "RuntimeError: no compiler"


@pytest.mark.usefixtures("package")
# torch.compile triggers warnings inside torch, which would fail the test as errors
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_graph_breaks(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the check for kernels, which the compiler must evaluate as a constant."""
    requested: list[flash.KernelVariant] = []
    monkeypatch.setattr(flash, "_checked", lambda _, kind: requested.append(kind) or True)
    ends = boundaries() if packed else None

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        works = flash._works(query.device, query.dtype, query.shape[-1], groups, packed, False, False)
        if torch.are_deterministic_algorithms_enabled() or not works:
            raise AssertionError
        return flash.attend(query, key, value, ends, window=None, scaling=0.3)

    expected = with_gradients(tensors(), ours)
    actual = with_gradients(tensors(), torch.compile(ours, dynamic=False, fullgraph=True, backend="aot_eager"))
    assert requested == 2 * [flash.KernelVariant(torch.float32, HEAD_DIM, 2, packed, False, False)]
    assert all(torch.equal(here, there) for here, there in zip(actual, expected, strict=True))


def test_importing_pantheraml_does_not_import_the_package() -> None:
    """The import takes seconds; a module that raises takes its name here."""
    code = (
        "import sys\n"
        "sys.modules['flash_attn'] = None\n"
        "import pantheraml.models.attention, pantheraml.models.flash\n"
        "assert 'flash_attn.cute' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_likely_supported_where_installed_and_the_shape_fits(hopper: dict[str, Any]) -> None:
    def likely(
        kind: str = "cuda", dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, width: int = flash.SHORTEST
    ) -> bool:
        return flash.likely_supported(torch.device(kind), dtype, head_dim, width)

    assert likely()
    assert not any([likely("cpu"), likely(dtype=torch.float32), likely(head_dim=256), likely(width=flash.SHORTEST - 1)])
    torch.use_deterministic_algorithms(True)
    try:
        assert not likely()
    finally:
        torch.use_deterministic_algorithms(False)
    hopper["fault"] = "it differs"
    flash._checked(torch.device("cuda"), flash.KernelVariant(torch.bfloat16, 128, 4, False, False, False))
    assert not likely()
    assert likely(head_dim=64)
    clear_caches()
    hopper["capability"] = (8, 0)
    assert not likely()
    hopper["capability"], hopper["version"] = (9, 0), None
    clear_caches()
    assert not likely()

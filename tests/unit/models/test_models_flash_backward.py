"""FlashAttention 4's kernels called one by one, by a stand-in that keeps to their layouts; the kernels themselves are
tested in tests/gpu/test_gpu_flash.py."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.models import flash, flash_backward
from tests.unit.models.test_models_flash import ENDS, HEADS, KEY_HEADS, ROWS, WIDTH, Package

SIZE = flash_backward.SIZE


@dataclass(frozen=True)
class Config:
    """As much as the release's own says, for heads of 128."""

    m_block_size: int = 64
    n_block_size: int = 128
    num_stages_Q: int = 2
    num_stages_dO: int = 2
    num_stages_PdS: int = 2
    SdP_swapAB: bool = True
    dKV_swapAB: bool = False
    dQ_swapAB: bool = False
    AtomLayoutMSdP: int = 1
    AtomLayoutNdKV: int = 2
    AtomLayoutMdQ: int = 1
    num_wg: int = 2
    dQ_single_wg: bool = False


class Kernels(Package):
    """Sums are in the order of rows here, each document from the next block on."""

    torch2cute_dtype_map = {torch.float32: "float32"}  # noqa: RUF012
    Int32, AuxData = "Int32", staticmethod(lambda *_: None)

    def __init__(self) -> None:
        super().__init__()
        runtime = SimpleNamespace(make_fake_stream=lambda **_: None)
        self.cute = SimpleNamespace(compile=self._compile, sym_int=lambda: None, runtime=runtime)
        self.compiled: list[dict[str, Any]] = []

    def _compile(self, *_: Any, options: str) -> Any:
        return self._kernel

    def FlashAttentionBackwardSm90(
        self, dtype: str, size: int, value_size: int, groups: int, causal: bool, **settings: Any
    ) -> None:
        assert (dtype, size, value_size, causal) == ("float32", SIZE, SIZE, True)
        self.compiled.append({"groups": groups, **settings})

    def _tile_size_bwd_sm90(self, *_: Any) -> Config:
        return Config()

    def make_fake_bwd_tensors(self, _dtype: str, *, has_gqa: bool, varlen_q: bool, varlen_k: bool) -> tuple[None, ...]:
        assert has_gqa
        assert varlen_q is varlen_k
        return (None,) * 15

    def fake_tensor(self, *_: Any, **__: Any) -> str:
        return "ends"

    def _get_device_arch(self) -> int:
        return 90

    def _bwd_preprocess(
        self, out: Tensor, gradient: Tensor, products: Tensor, sums: Tensor, logarithms: Tensor, dq: Tensor, *_: Any,
        fake_mode: bool,
    ) -> None:  # fmt: skip
        assert not fake_mode
        assert products.shape == logarithms.shape == (*dq.shape[:-1], dq.shape[-1] // SIZE)
        self._seen = out, sums
        dq.zero_()

    def _kernel(
        self, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, logarithms: Tensor, products: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, scale: float, ends: Tensor | None, key_ends: Tensor | None, *others: Any,
    ) -> None:  # fmt: skip
        assert ends is key_ends
        assert not any(others)
        settings: dict[str, Any] = {"causal": True, "softmax_scale": scale, "window_size_left": None}
        if ends is not None:
            settings |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": WIDTH, "max_seqlen_k": WIDTH}
        found = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        self._flash_attn_bwd(q, k, v, self._seen[0], gradient, self._seen[1], **found, **settings)
        for summed, part, block, factor in zip(
            (dq, dk, dv), found.values(), (64, 128, 128), (scale, scale, 1.0), strict=True
        ):
            for rows, there in places(summed, part, block, ends):
                rows.add_(there / factor)

    def _bwd_postprocess_convert(
        self, summed: Tensor, gradient: Tensor, factor: float, ends: Tensor | None, _used: None, arch: int, dtype: str,
        size: int, block: int, threads: int, atoms: int, swapped: bool, *, fake_mode: bool,
    ) -> None:  # fmt: skip
        assert (arch, dtype, size, threads, fake_mode) == (90, "float32", SIZE, 256, False)
        assert (atoms, swapped) == ((1, True) if block == 64 else (2, False))
        for rows, there in places(summed, gradient, block, ends):
            there.copy_(rows * factor)


def places(summed: Tensor, part: Tensor, block: int, ends: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Rows of the sums beside those of the gradient, each [heads, rows, size]."""
    rows = summed.unflatten(-1, (-1, SIZE))
    if ends is None:
        return [(here[:, : part.shape[1]], there.transpose(0, 1)) for here, there in zip(rows, part, strict=True)]
    found = []
    for number, (start, end) in enumerate(zip(ends.tolist()[:-1], ends.tolist()[1:], strict=True)):
        at = (start + number * block) // block * block
        found.append((rows[:, at : at + end - start], part[start:end].transpose(0, 1)))
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(flash_backward, "package", lambda: kernels)
    for cached in (flash_backward._kernel, flash_backward._config):
        cached.cache_clear()
    return kernels


def gradients(boundaries: Tensor | None) -> list[Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(ROWS, heads, WIDTH, SIZE, requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    out = flash.attend(inputs[0], inputs[1], inputs[2], boundaries, window=None, scaling=0.2)
    return list(torch.autograd.grad(out, inputs, torch.randn_like(out)))


@pytest.mark.parametrize("packed", [False, True])
def test_the_gradients_are_those_of_the_released_function(
    kernels: Kernels, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    boundaries = torch.tensor(ENDS, dtype=torch.int32) if packed else None
    found = gradients(boundaries)
    (compiled,) = kernels.compiled
    assert compiled["groups"] == HEADS // KEY_HEADS
    assert compiled["dQ_swapAB"] is True
    assert (compiled["tile_m"], compiled["tile_n"], compiled["num_threads"]) == (64, 128, 384)
    gradients(boundaries)
    assert len(kernels.compiled) == 1
    monkeypatch.setattr(flash, "_is_turned_over", lambda *_: False)
    for ours, theirs in zip(found, gradients(boundaries), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("kernels")
def test_what_is_left_to_the_released_function() -> None:
    def turned_over(size: int = SIZE, heads: int = 8, ends: int | None = None, window: int | None = None) -> bool:
        query, key = torch.zeros(1, 4, heads, size), torch.zeros(1, 4, 2, size)
        boundaries = None if ends is None else torch.zeros(ends + 1, dtype=torch.int32)
        return flash._is_turned_over(query, key, boundaries, window)

    assert turned_over()
    assert turned_over(ends=flash.MANY)
    assert not turned_over(ends=flash.MANY + 1)
    assert not turned_over(window=7)
    assert not turned_over(size=64)
    assert not turned_over(heads=2)

"""Document attention's kernels on a GPU against each document alone in float32.

bf16 has 8 bits of precision, so an output or gradient is off by about 0.3 % of its norm; one token too many or too few
in a window, or attention to a neighboring document, exceeds the tolerance of 1 % many times over.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from pantheraml.data.batch import Batch, collate
from pantheraml.data.documents import TokenSequence, as_ints
from pantheraml.engine.step.loss import LossModel
from pantheraml.models.attention import document_attention, use_document_attention
from pantheraml.models.document_layout import DocumentLayout
from tests.gpu.waiting import no_waiting

ROWS, WIDTH = 2, 512
LENGTHS = [1, 130, 7, 256, 118, 511, 1]
TOLERANCE = 1e-2


def layout(lengths: list[int], *, empty: int = 0, longest: int | None = None) -> DocumentLayout:
    ends = torch.tensor([0, *itertools.accumulate(lengths + [0] * empty)], dtype=torch.int32, device="cuda")
    return DocumentLayout(ends, longest or max(lengths))


def merged(heads: int, key_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[B, S, (H + 2 K) D], the output of a fused QKV matmul."""
    torch.manual_seed(0)
    shape = (ROWS, WIDTH, (heads + 2 * key_heads) * head_dim)
    return torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)


def split(buffer: Tensor, heads: int, key_heads: int, head_dim: int) -> list[Tensor]:
    """Non-contiguous views in transformers' layout [B, H, S, D]."""
    parts = buffer.split([heads * head_dim, key_heads * head_dim, key_heads * head_dim], dim=-1)
    return [part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in parts]


def per_document(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None, scale: float
) -> Tensor:
    """Explicit softmax, one document at a time; [B, S, H, D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    flat = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (query, key, value)]  # [H, T, D]
    parts = []
    for q, k, v in zip(*(tensor.split(lengths, dim=1) for tensor in flat), strict=True):
        mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
        mask = mask if window is None else mask.triu(1 - window)
        parts.append((scale * q @ k.mT).masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v)
    return torch.cat(parts, dim=1).transpose(0, 1).unflatten(0, (ROWS, WIDTH))


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    return float((actual.float() - expected).detach().norm() / expected.detach().norm())


def check(
    shape: tuple[int, int, int],
    documents: DocumentLayout,
    lengths: list[int],
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tolerance: float = TOLERANCE,
    attention: Any = document_attention,
) -> None:
    scale = 0.7 * shape[2] ** -0.5
    buffer = merged(*shape, dtype=dtype)
    exact = buffer.detach().float().requires_grad_()
    arguments = {"scaling": scale, "sliding_window": window, **documents.arguments()}
    out, _ = attention(nn.Module(), *split(buffer, *shape), None, **arguments)
    expected = per_document(*split(exact, *shape), lengths, window, scale)
    direction = torch.randn_like(expected)
    out.backward(direction.to(dtype))
    expected.backward(direction)
    assert buffer.grad is not None
    assert exact.grad is not None
    assert distance(out, expected) < tolerance
    for actual, expected_grad in zip(split(buffer.grad, *shape), split(exact.grad, *shape), strict=True):
        assert distance(actual, expected_grad) < tolerance


@pytest.mark.parametrize("shape", [(32, 8, 128), (8, 8, 64), (8, 1, 256), (6, 2, 80)])
@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_documents(shape: tuple[int, int, int], window: int | None, dtype: torch.dtype) -> None:
    check(shape, layout(LENGTHS), LENGTHS, window=window, dtype=dtype)


def test_empty_documents_and_loose_max_length() -> None:
    check((32, 8, 128), layout(LENGTHS, empty=25, longest=WIDTH), LENGTHS)


@pytest.mark.parametrize("window", [None, 100])
def test_whole_rows(window: int | None) -> None:
    check((32, 8, 128), DocumentLayout(None, WIDTH), [WIDTH] * ROWS, window=window)


@pytest.mark.parametrize("window", [None, 100])
def test_float32_uses_a_mask(window: int | None) -> None:
    check((8, 2, 64), layout(LENGTHS), LENGTHS, window=window, dtype=torch.float32, tolerance=1e-5)


# torch.compile triggers warnings in torch, which would be errors here
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("lengths", [LENGTHS, [WIDTH] * ROWS])
def test_compiled_whole(lengths: list[int]) -> None:
    compiled = torch.compile(document_attention, dynamic=False, fullgraph=True, backend="aot_eager")
    documents = DocumentLayout(None, WIDTH) if len(lengths) == ROWS else layout(lengths, empty=1)
    check((8, 2, 64), documents, lengths, attention=compiled)


def test_documents_do_not_affect_each_other() -> None:
    shape = (32, 8, 128)
    before = merged(*shape).detach()
    after = before.clone()
    after[0, 1:131] += 1  # the second document
    arguments = layout(LENGTHS).arguments()
    first, second = (
        document_attention(nn.Module(), *split(buffer, *shape), None, **arguments)[0] for buffer in (before, after)
    )
    changed = (first != second).flatten(2).any(dim=-1)
    assert changed[0, 1:131].all()
    changed[0, 1:131] = False
    assert not changed.any()


def models() -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes, sliding_window=50)),
    }


def batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    sequences = []
    for lengths in ([200, 40, 13], [1, 255]):
        tokens = [torch.randint(0, 512, (length,), generator=draw).tolist() for length in lengths]
        labels = [label for document in tokens for label in [-100, *document[1:]]]
        flat = [token for document in tokens for token in document]
        sequences.append(TokenSequence(as_ints(flat), as_ints(labels), as_ints(lengths)))
    return collate(sequences, pad_id=0, width=256)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("with_boundaries", [True, False])
def test_a_model_under_autocast(family: str, with_boundaries: bool) -> None:
    """Against the same weights in float32 with transformers' mask, on the CPU."""
    torch.manual_seed(0)
    model = models()[family]()
    on_cpu = batch()
    exact = LossModel(model)
    expected = exact(on_cpu.input_ids, on_cpu.position_ids, on_cpu.targets)
    expected.backward()
    expected_grad = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model = model.to("cuda")
    model.zero_grad()
    assert use_document_attention(model) is None
    on_gpu = on_cpu.to(torch.device("cuda"))
    documents = (on_gpu.boundaries, on_gpu.max_length) if with_boundaries else ()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = LossModel(model)(on_gpu.input_ids, on_gpu.position_ids, on_gpu.targets, *documents)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=2e-3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert distance(parameter.grad.cpu(), expected_grad[name]) < 5e-2, name


def test_forward_does_not_sync() -> None:
    model = models()["llama"]().to("cuda", torch.bfloat16)
    assert use_document_attention(model) is None
    loss_model = LossModel(model)
    on_gpu = batch().pin_memory().to(torch.device("cuda"))
    inputs = {"input_ids": on_gpu.input_ids, "position_ids": on_gpu.position_ids, "use_cache": False}
    layouts = DocumentLayout(on_gpu.boundaries, on_gpu.max_length).arguments(), {"max_length_q": 256}
    for document_args in layouts:  # warm-up
        loss_model.model.model(**inputs, **document_args)
    with no_waiting():
        for document_args in layouts:
            loss_model.model.model(**inputs, **document_args).last_hidden_state.sum().backward()

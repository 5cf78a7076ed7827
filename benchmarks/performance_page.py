"""Makes docs/performance.md: what makes training fast and lean, each trick with its measured share.

The words are here, the figures come from result files: `ablation-*.json` for the share of each trick (one row each:
trick, off_tokens_per_second, on_tokens_per_second, off_peak_gib, on_peak_gib), `kernels-*.json` for single kernels, and
the suite for the whole.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suites.comparison import newest_rows
from table import markdown_table, result_rows

ABLATION = "ablation"
KERNELS = "kernels"
SUITE = "h200"

Record = Mapping[str, Any]
Times = dict[str, dict[str, Mapping[str, Any]]]
"""The row of each op in each implementation."""


@dataclass(frozen=True)
class Trick:
    """`name` is what an ablation row calls it. One that no setting switches off is part of another (`within`), and
    shown by the kernels that are there for it (`ops`, as `kernels` calls them)."""

    name: str
    title: str
    text: str
    within: str | None = None
    ops: tuple[str, ...] = ()
    benchmark: str | None = None
    """Whose newest results show it."""
    is_about_memory: bool = False
    """Its kernels are shown with the memory that they take on top of their inputs, too."""


INTRODUCTION = """# Performance

Made by `python benchmarks/run.py --table` from the files in `benchmarks/results/`; do not edit. Every trick is shown
with what it brings by itself: the same run with it and without it, all the others on; one that no setting switches off
with its kernels, against torch's eager and compiled ones. Shares do not add up: a trick is worth more where others have
already removed what stood beside it. `8b/4` is the shape of an 8B model with a quarter of its layers.
"""

TRICKS = (
    Trick(
        "fp8_base",
        "Frozen weights in fp8, forward and backward",
        "LoRA never needs the gradient of the base weights, so both products that they take part in, the forward one"
        " and the one for the gradient of the input, run on fp8 tensor cores (e4m3; a scale per row of activations and"
        " gradients, and one power of two for the weights of a product, unless their rows are too unlike)."
        " `model.precision=auto` chooses it where it was measured to be as accurate.",
    ),
    Trick(
        "full_fp8",
        "Trained weights in fp8, all three products",
        "With `model.precision=fp8` a full fine-tune rounds its bf16 weights to e4m3 before each product, in one pass"
        " over them, transposed where the backward pass wants them so. The gradient of a weight is a sum over tokens,"
        " whose rows have scales of their own; these are powers of two, so that rows can be turned over and given"
        " scales along the other dimension without being rounded again. Sums are carried on in float32. The output"
        " head and the embedding stay in bf16.",
        ops=("turned_rows, scaled", "weight_to_e4m3", "weight_to_e4m3, transposed"),
    ),
    Trick(
        "fp8_layouts",
        "One copy of each weight, or two",
        "The tensor cores read a weight along its inputs on the way forward and along its outputs on the way back."
        " Where memory is short, only the first layout is kept, and the backward pass transposes the bytes just before"
        " the product. Else MLPs, which have most of the weights, keep both, for one more byte each, up to about three"
        " quarters of what all weights take: then those of the last layers keep one. The numbers are the same bit for"
        " bit. Scales"
        " that differ from row to row lie along the inner dimension on the way back, so they go into the gradient"
        " before it is quantised. One scale for all spares the kernels that, and is preferred. (`train.fp8_layouts`)",
        ops=("fp8_transposition",),
    ),
    Trick(
        "nf4_fill",
        "4-bit weights on fp8 tensor cores",
        "Frozen weights in nf4 are written out as fp8 just before each product, in one pass from half a byte to one,"
        " transposed where the backward pass wants them so, and dropped after it. The rest of the fused layer is the"
        " same as over fp8 weights. GPUs without fp8 rebuild the weight in the run's arithmetic, and do not fuse.",
        ops=("nf4_fill", "nf4_fill, transposed"),
    ),
    Trick(
        "quantise",
        "4-bit weights rounded by text",
        "Rounding every weight to the nearest value of nf4 changes weights least, but training sees products."
        " `pantheraml quantise` rounds by the text at hand: each weight takes the value that changes the layer's"
        " outputs and the gradients of its inputs least, while the others take up what it leaves (coordinate descent;"
        " a diagonal of a tile at a time, whose weights do not enter each other's choice). Decoder layers are on the"
        " GPU one at a time. Training then runs as over any other nf4 weights; [benchmarks.md](benchmarks.md) has what"
        " becomes of gradients and losses under *Accuracy of quantised weights and products*.",
        ops=("nf4_descent",),
    ),
    Trick(
        "lora_in_product",
        "The adapter inside the same product",
        "`y = x W' + s (x A') B'` is one product of `[x | x A']` with `[W | s B]`, and its way back one of"
        " `[g | s g B]` with `[W over A]`: the adapter rides along as 128 extra columns and takes no pass over the"
        " output. Before each forward pass two kernel launches write the current values of all adapters into their"
        " places.",
        within="fused_layers",
        ops=("lora_columns", "lora_columns, gradients"),
    ),
    Trick(
        "fused_layers",
        "Fused decoder layers as a whole",
        "All that the next six sections describe, against the layers as transformers has them with PEFT's adapters,"
        " over the same fp8 weights. Full fine-tunes that multiply in fp8, with weights in bf16, run through the same"
        " layers. (`train.fused`)",
    ),
    Trick(
        "merged_projections",
        "Merged projections",
        "Query, key and value are one product, gate and up another: the input is read and quantised once. In files and"
        " in the model's tree they stay separate layers with separate adapters.",
        within="fused_layers",
        ops=("fp8_product", "fp8_product, backward"),
    ),
    Trick(
        "fused_elementwise",
        "Fused element-wise kernels",
        "Normalisation and the gated activation write their results as the fp8 rows that the next product reads, with"
        " room for the adapter's columns; rotary embeddings go from the merged product straight to what attention"
        " reads. Each reads and writes memory once, forward and backward.",
        within="fused_layers",
        ops=("rms_norm", "gated_activation", "gated_activation_backward", "rotary", "quantise_rows"),
    ),
    Trick(
        "fused_residual",
        "Residual sums inside the normalisation",
        "The sum before a normalisation, and on the way back the sum of the residual's gradient with that of the"
        " normalisation, are formed by the kernels that read these rows anyway; and these write the gradient's fp8 rows"
        " for the product that comes next. For the sums between layers, in our own loop and in recorded passes, the"
        " first layer runs all of them, once a pass has shown that each gets what the one before gave.",
        within="fused_layers",
    ),
    Trick(
        "fp8_stash",
        "Activations kept in fp8",
        "What the backward pass needs of a product's input is kept as the fp8 values that the forward product read."
        " The gradients of the norms are formed from the same values, divided by the norm's weight again, so the rows"
        " that were normalised are not kept besides.",
        within="fused_layers",
    ),
    Trick(
        "recompute",
        "Hidden rows of the MLP computed again",
        "The widest rows of a layer, `activation(gate) * up`, are not kept. The kernel that forms the gradient of gate"
        " and up has both at hand and writes the hidden rows once more for the adapter's gradient.",
        within="fused_layers",
    ),
    Trick(
        "loss",
        "No full logits",
        "The loss is computed chunk by chunk from the hidden states of those tokens that have a target, and its"
        " gradient with it: 128 MiB of logits at a time, or 2 GiB where the head itself is trained, because after each"
        " chunk the whole sum of its gradient is read and written. A kernel turns the logits of a token into its loss"
        " and their gradient in two passes over them, of which the second finds them in the cache."
        " It is about as fast as what torch compiles of the whole, and takes less memory where the head is frozen.",
        ops=("linear_cross_entropy, frozen head", "linear_cross_entropy, trained head"),
        is_about_memory=True,
    ),
    Trick(
        "fp8_head",
        "The output head in fp8",
        "With frozen weights in fp8 the frozen output head is in fp8 too, with one scale for all of it, and both of"
        " its products run on the fp8 tensor cores: the gradient of the logits leaves its kernel in e5m2.",
        within="fp8_base",
        ops=("fp8_linear_cross_entropy",),
        is_about_memory=True,
    ),
    Trick(
        "varlen_attention",
        "Attention per document",
        "Packed documents are attended to with variable-length kernels: no mask is built, and no work is done across"
        " borders. Rows that are one document each take torch's causal attention, cuDNN's kernel first. On Hopper GPUs"
        " (compute capability 9.x) FlashAttention 4 does both, where it is installed: `pip install"
        " 'pantheraml[flash]'`. It is an extra, and pinned to one release, because that is a pre-release without a"
        " stable face, and because its kernels are compiled at first use, for 2 to 5 s each on an H200's machine. It"
        " takes bf16 and fp16, heads of 64, 96 or 128, with or without a window, and rows of 256 tokens or more, unless"
        " documents are so short (under 128 tokens on average, empty ones counted) that its padding would take more"
        " memory than they do. Each kind of call is first compared with torch's attention; the log says which kernels"
        " are used, and why not, if that fails. The order of its sums is not fixed: under"
        " `torch.use_deterministic_algorithms(True)` torch's kernels are used.",
        benchmark="packed_attention",
    ),
    Trick(
        "launch_cache",
        "Cheap kernel launches",
        "Triton looks over every argument at every launch, which takes longer than most of these kernels run. What it"
        " finds depends on types, integers and alignments alone, so for those it is asked once. And cuBLASLt gets no"
        " workspace for fp8 products: it would keep a counter there, and clear it before each of them, some 4 us in"
        " which the GPU does nothing else.",
        within="fused_layers",
    ),
    Trick(
        "cuda_graph",
        "A step recorded and replayed",
        "Packed batches have one shape, so the launches of a step's forward and backward pass are recorded once, as a"
        " CUDA graph, and replayed as a whole: small models no longer wait for the CPU. The first batch of a step"
        " writes its gradients over those of the step before, which are neither zeroed nor added to."
        " (`train.cuda_graph`) Under another's trainer, whose code runs between and after the two, passes of one shape"
        " through the fused layers are recorded, forward and backward apart; `ours-trl-1b-lora-fp8` in"
        " [benchmarks.md](benchmarks.md) shows the difference between its runs of `9b4965eff` and `fdbe8ad`. And the"
        " next batch is read once the forward pass is queued, not when the GPU has nothing else to do. Losses and"
        " metrics that such a trainer reads are sent to the host before all that it need not wait for, so that it"
        " queues the next work while the GPU has some left; and the next pass begins as soon as the optimizer's step"
        " is queued, before that is logged and the model is called.",
    ),
    Trick(
        "compile",
        "torch.compile where layers are not fused",
        "By default the layers of a full fine-tune in one process over packed data, with products in bf16, are"
        " compiled, one decoder layer for all: packed batches have one shape, so it happens once. Fused layers need no"
        " compiler. (`train.compile`)",
    ),
    Trick(
        "selective",
        "Selective checkpointing",
        "`train.activation_checkpointing=selective` keeps the results of matrix products and attention, which are dear"
        " to compute, and computes all else again in the backward pass. `full` keeps the input of each layer only.",
    ),
    Trick(
        "offload",
        "Layer inputs in host memory",
        "`train.activation_checkpointing=offload`, the memory-lean mode, is `full` with the layers' inputs in"
        " page-locked host memory. They are copied out beside the computation, and back one layer ahead of their use."
        " Fused layers leave out the MLP's last product when they are computed again, and in bf16, where gate and up"
        " have no adapters, write the gradients of these over them.",
    ),
    Trick(
        "stochastic_rounding",
        "bf16 weights with stochastic rounding",
        "With `train.weights=bf16` a full fine-tune keeps weights and gradients in bf16, and with"
        " `train.optimizer=adamw_bf16` also AdamW's moments. What is too small for bf16 is rounded up or down at"
        " random, so that it is right on average. The noise depends on seed, parameter and step alone: processes agree"
        " on it, and a resumed run repeats it.",
    ),
    Trick(
        "adamw8bit",
        "8-bit optimizer states",
        "With `train.optimizer=adamw8bit` AdamW's two moments take 8 bits each, with a scale per block of 256; small"
        " parameters keep theirs in float32. A step works in place, and clipping is a factor inside it.",
    ),
    Trick(
        "streamed_loading",
        "Streamed loading",
        "Weights go from safetensors files to the device and are packed there layer by layer, while four threads read"
        " ahead: no more than a few tensors are ever held as they were stored.",
        benchmark="load_model",
    ),
)


def page(records: Sequence[Record]) -> str:
    """The whole page; of several files, the newest row of each trick and of each kernel counts."""
    rows: dict[str, tuple[Mapping[str, Any], Record]] = {}
    for record in sorted((r for r in records if r["benchmark"] == ABLATION), key=lambda record: str(record["date"])):
        rows |= {row["trick"]: (row, record) for row in record["results"]}
    unknown = rows.keys() - {trick.name for trick in TRICKS}
    if unknown:
        raise ValueError(f"measured, but not described in {__name__}.TRICKS: {', '.join(sorted(unknown))}")
    times: Times = {}
    for record in sorted((r for r in records if r["benchmark"] == KERNELS), key=lambda record: str(record["date"])):
        for row in record["results"]:
            times.setdefault(row["op"], {})[row["implementation"]] = row
    sections = (_section(trick, rows.get(trick.name), times, _newest(records, trick.benchmark)) for trick in TRICKS)
    parts = [INTRODUCTION, _whole(records), *sections]
    return "\n".join(part for part in parts if part)


def _whole(records: Sequence[Record]) -> str:
    suites = sorted((r for r in records if r["benchmark"] == SUITE), key=lambda record: str(record["date"]))
    measured = newest_rows(suites[::-1])
    lines = [
        [row["case"], f"{row['tokens_per_second']:,.0f}", f"{row['peak_gib']:.1f} GiB"]
        for row in sorted(measured.values(), key=lambda row: -float(row["tokens_per_second"]))
        if row["model"] == "8b" and row["batch"] == 4 and row["data"] == "full"
    ]
    if not lines:
        return ""
    where = "The newest measurement of each; all settings are in [benchmarks.md](benchmarks.md)."
    table = markdown_table(["8B, 4 x 2048 tokens", "tokens/s", "peak"], lines)
    return "\n".join(["## The whole", "", where, "", *table, ""])


def _newest(records: Sequence[Record], benchmark: str | None) -> Record | None:
    return max(
        (r for r in records if r["benchmark"] == benchmark), key=lambda record: str(record["date"]), default=None
    )


def _section(trick: Trick, found: tuple[Mapping[str, Any], Record] | None, kernels: Times, own: Record | None) -> str:
    shares = [_share(*found)] if found else []
    times = _times(trick, kernels)
    if own is not None:
        table = importlib.import_module(own["benchmark"]).TABLE
        shares.append(f"{table.how} ({_where(own)}, {own['date'][:10]})")
        times = result_rows(table, own)
    if trick.within is not None:
        whole = next(other.title for other in TRICKS if other.name == trick.within)
        shares.append(f"Part of *{whole}*, and measured with it.")
    lines = [" ".join(shares)] if shares else []
    lines += [""] * bool(shares and times) + times
    text = textwrap.fill(trick.text, width=118)
    return "\n".join([f"## {trick.title}", "", text, "", *(lines or ["Not measured yet."]), ""])


def _times(trick: Trick, kernels: Times) -> list[str]:
    """A table of what the kernels of a trick take, beside torch's own ways to the same."""
    ways = ("ours", "torch, compiled", "torch, eager")
    lines = []
    for op in trick.ops:
        found = kernels.get(op, {})
        if "ours" in found:
            lines.append([op, *(_cost(found.get(way), with_memory=trick.is_about_memory) for way in ways)])
    if not lines:
        return []
    begun = any("*" in cell for line in lines for cell in line)
    legend = ["", "\\* Started from Python, which counts where kernels are short; the others were recorded."] * begun
    return [*markdown_table(["kernel", *ways], lines), *legend]


def _cost(row: Mapping[str, Any] | None, *, with_memory: bool) -> str:
    if row is None or row.get("milliseconds") is None:
        return ""
    memory = f", {row['peak_gib']:.2f} GiB" if with_memory and row.get("peak_gib") is not None else ""
    return f"{row['milliseconds']:.3g} ms{'' if row.get('recorded') else ' *'}{memory}"


def _share(row: Mapping[str, Any], record: Record) -> str:
    changes = [f"**{_speed(row)}**"] if row.get("off_tokens_per_second") else []
    changes += [f"**{_memory(row)}**"] if row.get("off_peak_gib") else []
    setting = f", {row['setting']}" if row.get("setting") else ""
    return f"Measured ({_where(record)}, {record['date'][:10]}{setting}): {'; '.join(changes) or 'no figures'}."


def _where(record: Record) -> str:
    gpus = record["hardware"]["gpus"]
    return str(gpus[0] if gpus else record["hardware"]["cpu"])


def _speed(row: Mapping[str, Any]) -> str:
    off, on = row["off_tokens_per_second"], row["on_tokens_per_second"]
    return f"{off:,.0f} tokens/s without, {on:,.0f} with ({on / off - 1:+.1%})"


def _memory(row: Mapping[str, Any]) -> str:
    off, on = row["off_peak_gib"], row["on_peak_gib"]
    return f"{off:.1f} GiB without, {on:.1f} with ({on - off:+.1f} GiB)"

"""Makes docs/stability.md and its pictures: the words are here, every number comes from the newest result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from line_chart import Line, LineChart
from table import markdown_table, percent

Record = Mapping[str, Any]

STABILITY, OVERHEAD = "stability", "guard_overhead"
NOT_MEASURED = "Not measured yet."

WORDS = """# Stability: the guard

Made by `python benchmarks/run.py --table` from the files in `benchmarks/results/`; do not edit.

After the backward passes of a step and before it is taken, all ranks look at the same few numbers (every rank's loss,
the gradient norm, the last update against the weights, now and then norms layer by layer), gathered in the one
exchange that the norm needs anyway, and come to one verdict. So ranks cannot disagree, under accumulation, fp16
scaling, FSDP, tensor or pipeline parallelism.
All settings are in the section `stability` of the [configuration](configuration.md).

## What is noticed

| anomaly | what it is | answered by |
|---|---|---|
| `nonfinite` | NaN or infinity in a loss or a gradient | `on_nonfinite` |
| `spike` | a loss more than `spike_zscore` standard deviations above its moving mean | `on_spike` |
| `jump` | a gradient norm more than 10 times its moving mean, and as many standard deviations above it | `on_spike` |
| `left_out` | with `parallel.leave_out_nonfinite`, ranks whose gradient is not finite do not enter | step |
| `overflow` | under fp16 a gradient is not finite | run again with a smaller loss scale; at 1: `on_nonfinite` |

The first `spike_warmup_steps` have no moving mean yet. There a spike is a loss 1.5 times above all losses so far and
above that of a uniform guess, ln V.

A run whose loss ends at ln V, or above where it began, says so in its last lines, in `run.json` (`concern`) and in the
report. It ends with exit code 0 all the same: what is to be done about the loss is not the trainer's to decide. The
final loss is the median of the last ten steps (of a short run, of its last quarter); it is at ln V within 3 %, after a
divergence or in a run of 20 steps or more that has not improved; and above the beginning from 1.25 times the largest of
the first five losses, and 0.1 more.

## A bad step is run once more

From the same weights, samples and random numbers. If it is in order then, the fault was **transient** (a bit that
flipped, a race): the second gradient is taken, and the run ends bit by bit as if nothing had been. If it is bad again
it is **persistent**, in the model or the data, and the policy answers. The event `verdict` says which it was
(`transient`). Bad steps in a row are run again only at the first: they have most likely one cause.

## What is done about it

| answer | for | meaning |
|---|---|---|
| `stop` | both; default for `nonfinite` | weights before the step are saved; the run ends with an error |
| `skip` | both | the step is not taken; its samples are used up |
| `zero` | `nonfinite` | gradient values that are not finite become 0, and the step is taken |
| `lower_rate` | both | `skip`, and the learning rate is multiplied by `rate_factor` from there on |
| `roll_back` | both | `skip`, and on with weights and optimizer of an older checkpoint |
| `detect` | both; default for spikes | it is reported, and the step taken |
| `ignore` | spikes | not even looked for |
| leave-rank-out | `nonfinite` | `parallel.leave_out_nonfinite`: bad ranks are left out, the others take the step |

A roll back goes to the newest checkpoint that is `rollback_steps` or more older than the weights; the samples since
then are used up, and steps are counted on. It needs `checkpoint.every_steps`.

Answers that let a run go on are bounded: `max_skipped_steps` in a row, `max_skipped_total` in all, `max_rollbacks`.
What the decisions go by is in every checkpoint, and a resumed run decides as the run that was never stopped. Weights
that are not finite are never saved, and a run that has such never ends with exit code 0.

## Incidents

A persistent NaN is looked for: the passes are run with every module watched, and the first tensor that is not finite is
named, with its module, rank and samples, and of each sample the file, line (or row) and first 60 characters of its
documents, so that the text can be looked up; of a pack the document in which it begins comes first. The message shows
three documents, the incident eight of each of eight samples, and both the number of the others.

Of a persistent spike or jump the largest gradient is named, whichever rank
holds it, and of a spike the rank with the largest loss. `incidents/step-N.json` holds that, every rank's samples and
loss, the numbers of both passes and what it takes to run the step again; `step-N.safetensors` beside it the adapter and
the random numbers that the step began with (not of a spike that is only detected: there may be many).

    pantheraml replay RUN_DIR/incidents/step-N.json [--device cpu]

runs it once more in one process, watched, and says whether it finds what was recorded (exit code 0) or not (8): the
tensor or, of a spike or jump, the loss and the norm within 5 %. What kept no adapter is replayed with the nearest
checkpoint at or before the step.

With `stability.debug: true` every step has a `train.groups` event (norms of gradients and weights, layer by layer; else
each `group_norms_every`-th), and an incident names, for each rank, the first operation whose backward pass gave NaN and
the line that called it.

## A seeded NaN

{nan_about}

![Loss of a run that meets NaN](images/stability-nan.svg)

{nan_table}

## A seeded spike, and every kind of clipping

{spike_about}

![Loss of a run that meets noise](images/stability-spike.svg)

{spike_table}

| `clipping` | limits |
|---|---|
| `none` | nothing |
| `value` | each value to `clip_value` |
| `norm` | each tensor to `train.max_grad_norm` |
| `global_norm` (default) | all as one to `train.max_grad_norm` |
| `adaptive` | each tensor to `clip_weight_ratio` of the norm of its weights (AGC) |
| `percentile` | all as one to the `clip_percentile` of the last `clip_history` norms (AutoClip) |
| `zclip` | all as one, if the norm is `clip_zscore` standard deviations above its moving mean (ZClip) |
| `adagc` | each tensor to `clip_growth` times its own moving mean (AdaGC) |

## What it costs

A step with the guard against one that neither looks at gradients nor clips them, taken in turns; median of the ratios
(one below 0 shows how far they scatter). On a clean run the result with the guard is bit-equal to that without it: in
one process (`tests/unit/engine/test_engine_guard_runs.py`), under DDP and FSDP (`tests/distributed/test_guard.py`).
Clean is a run in which nothing is clipped; `percentile` always clips the largest gradients.

{overhead}

## In TRL's trainers

    from pantheraml.hooks.guard_callback import GuardCallback

    SFTTrainer(..., callbacks=[GuardCallback(clipping="zclip", on_nonfinite="skip")])

takes the keys of `stability`, clips in the trainer's place, answers a bad step before it is taken, saves what it has
learnt in the trainer's checkpoints, and refuses to end with weights that are not finite.

| of `stability` | in a trainer |
|---|---|
| every `clipping` | yes |
| `nonfinite` by `stop`, `skip`, `zero`, `lower_rate`, `roll_back`, `detect` | yes |
| `jump` by `stop`, `skip`, `lower_rate`, `roll_back`, `detect`, `ignore` (`on_spike`) | yes |
| `spike` | no: a callback does not see the loss; `spike_warmup_steps` is refused |
| a bad step run once more, incidents, `replay` | no: a callback cannot run a step again |
| `debug`, `group_norms_every`, `update_ratio_every` | refused: `pantheraml train` has events for them |
| fp16, FSDP, DeepSpeed | refused: gradients have to be whole, and not scaled |

With `zero`, values are made 0 after every pass: before a callback is asked, the trainer has spread a NaN over all
gradients. What other processes have found enters as it is. With `lower_rate` the trainer's schedule, and the rate that
it logs, stay what they are; steps are taken with `rate_factor` of it. `roll_back` goes to copies of weights and
optimizer on the device: one is taken each `rollback_steps` steps and two are kept, with AdamW 24 bytes for each trained
weight. Samples and schedule go on. A training that was resumed has copies only of what it did since.

## In your own loop

```python
import torch

from pantheraml.stability import GradientClippingConfig, NaNHandlingConfig, create_training_wrapper

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapper = create_training_wrapper(GradientClippingConfig(clipping="zclip"), NaNHandlingConfig(on_nonfinite="skip"))
model = wrapper.wrap_model_for_multi_gpu(model)

skipped = 0
for step in range(10):
    inputs = torch.randn(4, 8)
    if step == 5:
        inputs[0, 0] = torch.nan
    loss = (model(inputs) - 1).square().mean()
    result = wrapper(model, loss, optimizer)
    skipped += result.action == "skip"
```

A call is one step: the backward pass, the verdict, clipping, the optimizer's step, and gradients cleared. Passes that
you ran before it, each under DDP's `no_sync`, count with it. The result has the action, its cause, loss and norm; a
verdict to stop is an error, and the weights are those before that step. A call that comes after processes have met
(`torch.distributed.init_process_group`) decides for all of them alike; `wrap_model_for_multi_gpu` then gives DDP.

The four configurations are `GradientClippingConfig` and `NaNHandlingConfig` (keys of `stability`, and `max_grad_norm`),
`PyTorchDebuggingConfig` (`debug`, `group_norms_every`, `update_ratio_every`: in the result) and
`PerformanceOptimizationConfig` (several GPUs). `state_dict` and `load_state_dict` carry on what was learnt. Not here:
running a step again, `roll_back`, fp16's loss scaling, and models that processes hold in parts.
"""

NAN_ABOUT = """\
At step {at} the hidden states of a layer are NaN. Without a guard all weights are NaN from then on, and so is the loss:
the grey line ends. A NaN that passes leaves no trace: the last two lines are one."""

SPIKE_ABOUT = """\
From step {at} on, {noisy} steps are given batches of random words (shaded). The model is small and learns to count; the
learning rate is constant and high, {rate:g}. The losses of those batches themselves are not drawn. One seed each, with
learning rate, length and moment chosen so that noise does visible damage: this shows what the kinds do, not which is
best."""


def page(records: Sequence[Record]) -> str:
    """What docs/stability.md should hold; `records` are oldest first."""
    measured = _newest(records, STABILITY)
    parts = dict.fromkeys(("nan_about", "nan_table", "spike_about", "spike_table"), NOT_MEASURED)
    if measured is not None:
        given = measured["parameters"]
        parts["nan_about"] = NAN_ABOUT.format(at=given["at"] + 1)
        parts["spike_about"] = SPIKE_ABOUT.format(
            at=given["at"] + 1, noisy=given["noisy_steps"], rate=given["learning_rate"]
        )
        parts["nan_table"], parts["spike_table"] = (_table(measured, run) for run in ("nan", "spike"))
    return WORDS.format(**parts, overhead=_overhead(records))


def pictures(records: Sequence[Record]) -> dict[str, str]:
    """File name -> SVG."""
    measured = _newest(records, STABILITY)
    if measured is None:
        return {}
    given = measured["parameters"]
    at = given["at"] + 1
    noise = range(at, at + given["noisy_steps"])
    return {
        "stability-nan.svg": _chart(measured, "nan", "One step is NaN", range(at, at + 1)),
        "stability-spike.svg": _chart(measured, "spike", "Some batches are noise", noise),
    }


def _newest(records: Sequence[Record], name: str) -> Record | None:
    return next((record for record in reversed(records) if record["benchmark"] == name), None)


def _of(record: Record, run: str) -> list[Mapping[str, Any]]:
    return [result for result in record["results"] if result["run"] == run]


def _chart(record: Record, run: str, title: str, shaded: range) -> str:
    """Without the losses of the steps in question, beside which all others would be flat."""
    lines = [
        Line(result["case"], [None if step in shaded else loss for step, loss in enumerate(result["losses"], start=1)])
        for result in _of(record, run)
    ]
    return LineChart(title, lines, "loss", shaded=shaded, first=max(1, shaded.start - 12)).svg()


def _table(record: Record, run: str) -> str:
    rows = [
        [
            result["case"],
            *("NaN" if result[name] is None else f"{result[name]:.3f}" for name in ("before", "worst", "end")),
        ]
        for result in _of(record, run)
    ]
    return "\n".join(markdown_table(["case", "loss before", "worst after", "in the end"], rows))


def _overhead(records: Sequence[Record]) -> str:
    """The newest of each device."""
    newest = {record["results"][0]["device"]: record for record in records if record["benchmark"] == OVERHEAD}
    if not newest:
        return NOT_MEASURED
    rows = [
        [
            *(result[name] for name in ("device", "method", "clipping")),
            f"{1000 * result['bare_seconds']:.1f} ms",
            percent(result["overhead"]),
        ]
        for record in newest.values()
        for result in record["results"]
    ]
    return "\n".join(markdown_table(["device", "method", "clipping", "bare step", "overhead"], rows))

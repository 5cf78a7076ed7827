"""TrainConfig: everything that a training run can be told, in one validated value.

The same names serve YAML (`train: {max_steps: 100}`), Python (`TrainConfig(train=TrainSettings(max_steps=100))`), the
command line (`--set train.max_steps=100`) and REST. Every field is read somewhere and has a test; a field that nothing
reads does not belong here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from pantheraml.specs.faults import FaultText
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode, split_commas
from pantheraml.specs.other_names import translate_to_sections

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Revision = Annotated[str, Field(pattern=r"^[\w+@=-]+([./][\w+@=-]+)*$", max_length=255)]
"""As git has them: no `..` and no `/` at the beginning, which would lead out of the hub's cache."""


def _as_switch(value: Any) -> Any:
    """YAML reads `on` and `off` as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)]


def _as_device(value: Any) -> Any:
    """A GPU's number, as YAML or JSON has it, is short for its name."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return f"cuda:{value}" if number or (isinstance(value, str) and value.isdigit()) else value


DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), BeforeValidator(_as_device)]
SplitStrategy = Literal["auto", "balanced", "sequential"]


def _checked_map(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """One message, not one for each kind of value."""
    try:
        return check(value)
    except ValidationError as err:
        raise ValueError("use auto, balanced, sequential, cuda:N, cpu, or a mapping from modules to devices") from err


DeviceMap = Annotated[SplitStrategy | DeviceName | dict[str, DeviceName], WrapValidator(_checked_map)]
Size = Positive | Annotated[str, Field(pattern=r"^\d+(\.\d+)? ?[KMG]i?B$")]

Checkpointing = Literal["none", "selective", "full", "offload"]


Clipping = Literal["none", "value", "norm", "global_norm", "adaptive", "percentile", "zclip", "adagc"]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_assignment=True, allow_inf_nan=False
    )


class ModelConfig(Section):
    path: str
    """Folder with a Hugging Face causal language model, or a hub name."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; None = the model's own."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "nf4"] = "auto"
    """Arithmetic; auto = bf16 where the device has it, and LoRA's frozen weights in fp8 on compute capability 9.0 or
    newer. fp8, int8 and nf4: what LoRA's frozen weights are kept in. In a full fine-tune, fp8 is what decoder layers
    multiply in, forward and for the gradients of their inputs, where they are fused of their weights, too; weights stay
    in train.weights."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: ignore weights and start from `config.json` alone (training from scratch)."""
    revision: Revision | None = None
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""
    allow_pickle: bool = False
    """Accept `.bin` weights, which can run code when loaded. Prefer safetensors."""
    device_map: DeviceMap | None = None
    """Spread the layers over the devices of one process, to save memory, not time: auto, balanced, sequential; or a
    device (cuda:1, cpu); or a mapping from modules to devices, GPU 0 being the first that the run may use. What is
    spread is loaded by way of the host's memory."""
    max_memory: dict[DeviceName, Size] | None = None
    """With device_map: how much weights may take on each device, such as {0: 10GiB, 1: 20GiB}; others get none."""


class DataConfig(Section):
    path: str
    """Training data: .jsonl, .json, .csv, .parquet, .txt, a folder of these, or a folder saved by `datasets`."""
    eval_path: str | None = None
    """Evaluation data in the same formats; None = split off `eval_fraction`."""
    eval_fraction: Fraction = 0.0
    """Share of the training rows held out for evaluation, chosen by content hash; 0 = none."""
    format: Literal["auto", "text", "prompt", "messages", "instruction"] = "auto"
    """Which columns to read: text | prompt+completion | messages | instruction(+input)+output; auto = look at them."""
    seq_len: Annotated[int, Field(ge=8, le=1 << 21)] = 2048
    """Longest sequence in tokens; packs are filled up to it."""
    packing: bool = True
    """Put several documents into one sequence (no attention across them, positions restart). Off, with a warning, for a
    model that would compute other values so: see families.md."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What to do with a row that cannot be used: stop with its file, line and field, or skip and count it."""
    on_long_row: Literal["truncate", "stop"] = "truncate"
    """What to do with a row longer than seq_len: cut its end and count it, or stop."""
    workers: NotNegative = 0
    """Tokenising processes; 0 = one per core."""
    cache_dir: str | None = None
    """Where tokenised data is kept; None = the user's cache folder (PANTHERAML_CACHE)."""


class MethodConfig(Section):
    kind: Literal["lora", "dora", "qlora", "full"] = "lora"
    """lora and dora train small adapters; qlora does so over a 4-bit (nf4) base; full trains every weight."""
    rank: Positive = 16
    """Rank of the adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapter scale: the update is multiplied by alpha/rank (alpha/sqrt(rank) with rslora)."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input. With dropout, N processes no longer equal one bit for bit."""
    target_modules: Annotated[str | list[str], BeforeValidator(split_commas)] = "all-linear"
    """Layers that get an adapter: names (`q_proj`), or all-linear (all but the output head)."""
    rslora: bool = False
    """Rank-stabilised scaling, alpha/sqrt(rank)."""


class TrainSettings(Section):
    max_steps: Positive | None = None
    """Optimizer steps; None = as many as `epochs` needs."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the training data, used when max_steps is None."""
    global_batch_size: Positive = 16
    """Sequences per optimizer step, over all processes and micro-batches. Adding GPUs does not change it."""
    micro_batch_size: Positive | Literal["auto"] = "auto"
    """Sequences per forward pass on one device; auto = planned."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the schedule ends, as a share of the peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises from zero."""
    optimizer: Literal["adamw", "adamw_bf16", "adamw8bit"] = "adamw"
    """AdamW with states in float32, in bf16 (rounded stochastically) or in 8 bits: 8, 4 or 2 bytes a trained weight."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """How a full fine-tune keeps weights and gradients. bf16: half the memory, updates are rounded stochastically."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; not applied to biases and norms."""
    beta1: Fraction = 0.9
    """AdamW's first decay rate."""
    beta2: Fraction = 0.999
    """AdamW's second decay rate."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0 = no clipping."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of sample order, adapter initialisation and dropout."""
    activation_checkpointing: Checkpointing = "none"
    """Recompute in backward. selective: cheap ops; full: whole layers; offload: full, inputs wait in host memory."""
    fused: Switch = "auto"
    """Run decoder layers of known families as fused kernels; auto = on GPUs, for LoRA without dropout, and for full
    fine-tunes with weights in bf16 whose products are in fp8, or whose layers are computed again by way of offload."""
    fp8_layouts: Literal["auto", 1, 2] = "auto"
    """How often fused layers keep the frozen fp8 weights of MLPs: once, transposing them in every backward pass; or for
    each direction, one more byte each, in as many layers as adds about three quarters to all. auto = 2 without
    activation checkpointing, if all weights twice would take at most a quarter of the GPU's memory."""
    cuda_graph: Switch = "auto"
    """Replay a step's kernels as a recorded whole; auto = for packed data and fused layers on a single GPU."""
    compile: Switch = "auto"
    """Compile layers that are not fused with torch.compile; auto = for packed data on a single GPU."""
    eval_every_steps: Positive | None = None
    """Steps between evaluations; None = only at the end (if there is evaluation data)."""
    early_stopping_patience: Positive | None = None
    """Stop after this many evaluations without a better loss; None = never."""
    log_every_steps: Positive = 1
    """Steps between `train.step` events."""


class ClippingSettings(Section):
    clipping: Clipping = "global_norm"
    """How gradients are clipped: by train.max_grad_norm (norm: each tensor), or as the clip_ keys of the kind say."""
    clip_value: Annotated[float, Field(gt=0)] = 1.0
    """value: the largest absolute value of a gradient."""
    clip_weight_ratio: Annotated[float, Field(gt=0)] = 0.01
    """adaptive: the largest norm of a tensor's gradient, as a share of the norm of its weights."""
    clip_percentile: Annotated[float, Field(gt=0, le=100)] = 90.0
    """percentile: the limit is this percentile of the last clip_history global norms."""
    clip_history: Positive = 100
    """percentile: how many global norms are remembered."""
    clip_zscore: Annotated[float, Field(gt=0)] = 2.5
    """zclip: standard deviations above the moving mean of the global norm from which it is clipped."""
    clip_growth: Annotated[float, Field(gt=0)] = 1.05
    """adagc: the largest norm of a tensor's gradient, as a multiple of its moving mean."""
    clip_decay: Fraction = 0.97
    """zclip and adagc: how much of a moving mean a step keeps."""
    clip_warmup_steps: Positive = 25
    """percentile, zclip and adagc: for this many steps norms are learnt, and train.max_grad_norm is the limit."""


class BadStepSettings(Section):
    on_nonfinite: Literal["stop", "skip", "zero", "lower_rate", "roll_back", "detect"] = "stop"
    """NaN or infinity that is there again when the step is run again: stop (last good weights saved), skip the step,
    zero those values, skip it and lower the rate, roll back to an older checkpoint, or report."""
    on_spike: Literal["ignore", "detect", "skip", "lower_rate", "roll_back", "stop"] = "detect"
    """A loss or a gradient norm far above recent ones, likewise: ignore it, report it, skip the step, skip it and lower
    the rate, roll back to an older checkpoint, or stop."""
    spike_zscore: Annotated[float, Field(gt=0)] = 6.0
    """Standard deviations above its moving mean from which a loss is a spike; a norm is one if it is 10 times its mean,
    besides."""
    spike_warmup_steps: Annotated[int, Field(ge=2)] = 20
    """Steps before a loss is compared with recent ones; until then it is a spike only far above all before and ln V."""
    rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """lower_rate: the step is skipped, and from there to the end the learning rate multiplied by this."""
    max_skipped_steps: NotNegative = 3
    """After this many bad steps in a row that were skipped or zeroed the run stops."""
    max_skipped_total: NotNegative = 100
    """The same, counted over the whole run."""


class DebugSettings(Section):
    update_ratio_every: NotNegative = 0
    """Steps between measurements of the update's norm over that of the weights; each copies what trains. 0 = never."""
    group_norms_every: NotNegative = 50
    """Steps between `train.groups` events: the norms of gradients and weights, layer by layer. 0 = never."""
    debug: bool = False
    """Those events for every step; and for a bad step of one process, the operation whose backward pass gave NaN, with
    the line that called it."""


# Fields come in the order of the classes from right to left.
class StabilityConfig(DebugSettings, BadStepSettings, ClippingSettings):
    rollback_steps: Positive = 1
    """roll_back: to the newest checkpoint that is at least this many steps older than the weights. Needs
    checkpoint.every_steps; the samples since then are not used again."""
    max_rollbacks: NotNegative = 3
    """roll_back: after this many the run stops."""

    @property
    def rolls_back(self) -> bool:
        """Whether some anomaly is met by rolling back."""
        return "roll_back" in (self.on_nonfinite, self.on_spike)


class CheckpointConfig(Section):
    every_steps: Positive | None = None
    """Steps between checkpoints; None = one at the end, and one when stopped."""
    keep: Positive = 2
    """How many of the newest checkpoints stay on disk; the best one stays besides."""
    final: Literal["last", "best"] = "last"
    """Which weights become `adapter/` or `model/`: the last ones, or those with the lowest evaluation loss."""
    background: bool = True
    """Write while training goes on, from a copy in host memory of what is saved; false: training waits for the disk."""
    allow_change: list[str] = []
    """Keys or sections that may differ from what the run began with (`resume --allow-change`)."""


class ReportConfig(Section):
    html: bool = True
    """Write report.html at the end of the run."""
    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Other tools that get the run's metrics; each needs its extra (`pip install 'pantheraml[tensorboard]'`)."""
    project: str = "pantheraml"
    """Project or experiment name in those tools."""


class TrainConfig(Section):
    model: ModelConfig
    data: DataConfig
    method: MethodConfig = MethodConfig()
    train: TrainSettings = TrainSettings()
    parallel: MultiGPUConfig = MultiGPUConfig()
    stability: StabilityConfig = StabilityConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto = GPUs if there are any."""
    faults: list[FaultText] = []
    """Failures on purpose, as RANK:STEP:KIND, for tests; refused unless PANTHERAML_FAULTS=1 is set."""

    @model_validator(mode="before")
    @classmethod
    def _translate_other_names(cls, values: Any) -> Any:
        parallel = values.get("parallel") if isinstance(values, dict) else None
        said = (
            vars(parallel) if isinstance(parallel, MultiGPUConfig) else parallel if isinstance(parallel, dict) else {}
        )
        if not said:
            return values
        return translate_to_sections(values, said.get("auto_device_map"), said.get("use_gradient_checkpointing"))

    @model_validator(mode="after")
    def _sections_agree(self) -> TrainConfig:
        has_eval = self.data.eval_path is not None or self.data.eval_fraction > 0
        if self.data.eval_path is not None and self.data.eval_fraction > 0:
            raise ValueError("data.eval_path and data.eval_fraction are both set; keep one")
        if not has_eval:
            for name, asked in (
                ("train.eval_every_steps", self.train.eval_every_steps is not None),
                ("train.early_stopping_patience", self.train.early_stopping_patience is not None),
                ("checkpoint.final=best", self.checkpoint.final == "best"),
            ):
                if asked:
                    raise ValueError(f"{name} needs evaluation data: set data.eval_path or data.eval_fraction")
        if self.train.early_stopping_patience is not None and self.train.eval_every_steps is None:
            raise ValueError("train.early_stopping_patience needs train.eval_every_steps")
        packing, other = self.model.precision, {"nf4": "qlora", "fp8": "full"}
        if packing in ("fp8", "int8", "nf4") and self.method.kind not in ("lora", other.get(packing)):
            raise ValueError(
                f"model.precision={packing} keeps LoRA's frozen weights in {packing}, which needs method.kind=lora"
            )
        if self.model.max_memory is not None and self.model.device_map is None:
            raise ValueError("model.max_memory needs model.device_map")
        if self.model.device_map is not None and self.parallel.mode == MultiGPUMode.DATAPARALLEL:
            raise ValueError("model.device_map spreads one model, and parallel.mode=dataparallel copies it; keep one")
        if self.train.weights == "bf16" and self.method.kind != "full":
            raise ValueError("train.weights=bf16 is for method.kind=full; adapters are small and stay in float32")
        if self.train.weights == "bf16" and self.model.precision in ("fp32", "fp16"):
            raise ValueError(f"train.weights=bf16 computes in bf16, but model.precision is {self.model.precision}")
        if self.method.kind in ("lora", "dora", "qlora") and self.model.init == "random":
            raise ValueError("model.init=random trains from scratch, which needs method.kind=full")
        return self

    @model_validator(mode="after")
    def _can_roll_back(self) -> TrainConfig:
        if self.stability.rolls_back and self.checkpoint.every_steps is None:
            raise ValueError("stability: roll_back needs checkpoints to go back to: set checkpoint.every_steps")
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

"""TrainConfig: the validated configuration of a training run.

YAML (`train: {max_steps: 100}`), Python (`TrainConfig(train=TrainSettings(max_steps=100))`), the command line
(`--set train.max_steps=100`) and REST use the same keys. Every field is used and tested; a field that no code reads
does not belong here. The field docstrings are the user documentation: docs/configuration.md is generated from them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

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

from pantheraml.specs.legacy_aliases import (
    OF_OTHER_SECTIONS,
    translate_to_sections,
    warn_of_aliases,
    without_removed_keys,
    without_removed_settings,
)
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode, split_commas
from pantheraml.specs.section_errors import explained

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Revision = Annotated[str, Field(pattern=r"^[\w+@=-]+([./][\w+@=-]+)*$", max_length=255)]
"""A git revision: no `..` and no leading `/`, which would escape the hub cache."""


def _as_names(value: Any) -> Any:
    """Accept one name, or names with commas, as on the command line."""
    return (value.split(",") if value else ()) if isinstance(value, str) else value


def _as_switch(value: Any) -> Any:
    """Accept booleans: YAML parses `on` and `off` as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)]


def _as_device(value: Any) -> Any:
    """Accept a GPU index as short for its name: 1 -> cuda:1."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return f"cuda:{value}" if number or (isinstance(value, str) and value.isdigit()) else value


DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), BeforeValidator(_as_device)]
SplitStrategy = Literal["auto", "balanced", "sequential"]
SPLIT_STRATEGIES: tuple[str, ...] = get_args(SplitStrategy)


def _checked_map(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Raise one message instead of one per union member."""
    try:
        return check(value)
    except ValidationError as err:
        raise ValueError("use auto, balanced, sequential, cuda:N, cpu, or a mapping from modules to devices") from err


DeviceMap = Annotated[SplitStrategy | DeviceName | dict[str, DeviceName], WrapValidator(_checked_map)]
Size = Positive | Annotated[str, Field(pattern=r"^\d+(\.\d+)? ?[KMG]i?B$")]

FIXED_LEARNING_RATE = 2e-4
"""Learning rate where no rule applies."""

Checkpointing = Literal["none", "selective", "full", "offload"]


Clipping = Literal["none", "value", "norm", "global_norm", "adaptive", "percentile", "zclip", "adagc"]


class ConfigSection(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_assignment=True, allow_inf_nan=False
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as err:
            raise explained(err, type(self)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # `model_validate` needs no call of it


class ModelConfig(ConfigSection):
    path: str
    """Folder of a Hugging Face causal language model, or a hub name."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; None = the one of the model."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "nf4"] = "auto"
    """Compute precision. auto: bf16 (fp16 on GPUs without it, fp32 on CPUs), with LoRA's frozen weights in fp8 on
    compute capability 9.0 or newer, and in nf4 if nothing else is predicted to fit into memory. fp8, int8, nf4:
    quantize LoRA's frozen weights. fp8 in a full fine-tune: fp8 matmuls in decoder layers for the forward and input
    gradients, plus weight gradients when fused; the weights stay in train.weights."""
    init: Literal["pretrained", "random"] = "pretrained"
    """random: initialize from `config.json` and ignore the weights (training from scratch)."""
    revision: Revision | None = None
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = False
    """Run Python code from the model repository. Leave it off unless you have read that code."""
    allow_pickle: bool = False
    """Load pickled `.bin` weights, which can run code when loaded. Prefer safetensors."""
    device_map: DeviceMap | None = None
    """Split the layers over the devices of one process, which saves memory, not time: auto, balanced, sequential; a
    device (cuda:1, cpu); or a mapping from modules to devices. GPU 0 is the first GPU of the run. A split model is
    loaded through host memory."""
    max_memory: dict[DeviceName, Size] | None = None
    """With device_map: memory for weights per device, such as {0: 10GiB, 1: 20GiB}; devices not listed hold none."""


class DataConfig(ConfigSection):
    path: str
    """Training data: .jsonl, .json, .csv, .parquet, .txt, a folder of these, or a folder saved by `datasets`."""
    eval_path: str | None = None
    """Evaluation data in the same formats; None = hold out `eval_fraction` of the training data."""
    eval_fraction: Fraction = 0.0
    """Fraction of the training rows held out for evaluation, selected by content hash; 0 = none."""
    format: Literal["auto", "text", "prompt", "messages", "instruction"] = "auto"
    """Columns to read: text | prompt+completion | messages | instruction(+input)+output; auto = detect."""
    seq_len: Annotated[int, Field(ge=8, le=1 << 21)] = 2048
    """Maximum sequence length in tokens; packed sequences are filled up to it."""
    packing: bool = True
    """Pack several documents into one sequence (no attention across documents, positions restart). Turned off with a
    warning for models whose outputs it would change: see families.md."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """Invalid rows: stop with file, line and field, or skip and count them."""
    on_long_row: Literal["truncate", "stop"] = "truncate"
    """Rows longer than seq_len: truncate and count them, or stop."""
    workers: NotNegative = 0
    """Tokenizer processes; 0 = one per core."""
    cache_dir: str | None = None
    """Cache folder for tokenized data; None = the user's cache folder (PANTHERAML_CACHE)."""


MAX_RANK = 65_536
"""Of an adapter: far beyond what helps, and a bound on what a few digits can ask for."""


class MethodConfig(ConfigSection):
    kind: Literal["lora", "dora", "qlora", "full"] = "lora"
    """lora, dora: train an adapter; qlora: LoRA on a 4-bit (nf4) base model; full: train all weights."""
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 16
    """Adapter rank."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapter scaling: alpha/rank, or alpha/sqrt(rank) with rslora."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input. With dropout, N processes no longer match one process bit for bit."""
    target_modules: Annotated[str | list[str], BeforeValidator(split_commas)] = "all-linear"
    """Layers that get an adapter: names (`q_proj`), or all-linear (every linear layer except the output head)."""
    target_parameters: Annotated[tuple[str, ...], BeforeValidator(_as_names)] = ()
    """Stacked experts that get an adapter, too: names of weights (`mlp.experts.gate_up_proj,mlp.experts.down_proj`)."""
    rslora: bool = False
    """Rank-stabilized scaling, alpha/sqrt(rank)."""


class TrainSettings(ConfigSection):
    max_steps: Positive | None = None
    """Number of optimizer steps; None = set by `epochs`."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Epochs over the training data; used if max_steps is None."""
    global_batch_size: Positive = 16
    """Sequences per optimizer step, over all processes and micro-batches; independent of the number of GPUs."""
    micro_batch_size: Positive | Literal["auto"] = "auto"
    """Sequences per forward pass on one device; auto = chosen by the planner."""
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Peak learning rate. auto: by hidden size, family and method from a hidden size of 1024 on (adapters: 256), else
    2e-4; the run reports it with its reason."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of the schedule, as a fraction of the peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after warmup."""
    warmup_steps: NotNegative = 0
    """Steps of linear warmup from zero."""
    optimizer: Literal["adamw", "adamw_bf16", "adamw8bit"] = "adamw"
    """AdamW with fp32, bf16 (stochastic rounding) or 8-bit states: 8, 4 or 2 bytes per trainable weight."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and gradients in a full fine-tune. bf16: half the memory; updates use stochastic rounding."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; not applied to biases and norm weights."""
    beta1: Fraction = 0.9
    """AdamW beta1."""
    beta2: Fraction = 0.999
    """AdamW beta2."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW epsilon."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip gradients to this norm; 0 = no clipping."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed for sample order, adapter initialization and dropout."""
    activation_checkpointing: Literal["auto", "none", "selective", "full", "offload"] = "auto"
    """Recompute activations in the backward. auto: none, unless the planner predicts that memory is short. selective:
    cheap ops; full: whole layers; offload: full, with the layers' inputs in host memory."""
    fused: Switch = "auto"
    """Fused kernels for decoder layers of supported families. auto: on GPUs, for LoRA without dropout, and for full
    fine-tunes with bf16 weights that use fp8 matmuls or `offload` activation checkpointing."""
    cuda_graph: Switch = "auto"
    """Capture a training step as a CUDA graph and replay it. auto: for packed data and fused or compiled layers on a
    single GPU."""
    compile: Switch = "auto"
    """Use torch.compile for layers that are not fused. auto: for packed data on a single GPU."""
    eval_every_steps: Positive | None = None
    """Steps between evaluations; None = only at the end, if there is evaluation data."""
    early_stopping_patience: Positive | None = None
    """Stop after this many evaluations without improvement; None = never."""
    log_every_steps: Positive = 1
    """Steps between `train.step` events."""

    @property
    def peak_learning_rate(self) -> float:
        """train.learning_rate as a number. While it is `auto` (see `planner.defaults`), the rate without a rule."""
        return FIXED_LEARNING_RATE if self.learning_rate == "auto" else self.learning_rate

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, values: Any) -> Any:
        return without_removed_settings("train", values) if isinstance(values, dict) else values


class ClippingSettings(ConfigSection):
    clipping: Clipping = "global_norm"
    """Gradient clipping. global_norm, norm (per tensor): at train.max_grad_norm; others: see their clip_ keys."""
    clip_value: Annotated[float, Field(gt=0)] = 1.0
    """value: maximum absolute value of a gradient element."""
    clip_weight_ratio: Annotated[float, Field(gt=0)] = 0.01
    """adaptive: maximum gradient norm of a tensor, as a fraction of its weight norm."""
    clip_percentile: Annotated[float, Field(gt=0, le=100)] = 90.0
    """percentile: clip at this percentile of the last clip_history global norms."""
    clip_history: Positive = 100
    """percentile: number of recent global norms to keep."""
    clip_zscore: Annotated[float, Field(gt=0)] = 2.5
    """zclip: clip global norms that are this many standard deviations above their moving mean."""
    clip_growth: Annotated[float, Field(gt=0)] = 1.05
    """adagc: maximum gradient norm of a tensor, as a multiple of its moving mean."""
    clip_decay: Fraction = 0.97
    """zclip, adagc: decay of the moving means, per step."""
    clip_warmup_steps: Positive = 25
    """percentile, zclip, adagc: first steps, which collect norms and clip at train.max_grad_norm."""


class BadStepSettings(ConfigSection):
    on_nonfinite: Literal["stop", "skip", "zero", "lower_rate", "roll_back", "detect"] = "stop"
    """Response to NaN or infinity that recurs when the step is rerun. stop: save the last good weights and stop; skip:
    skip the step; zero: zero these values; lower_rate: skip the step and lower the learning rate; roll_back: return to
    an older checkpoint; detect: report it."""
    on_spike: Literal["ignore", "detect", "skip", "lower_rate", "roll_back", "stop"] = "detect"
    """Response to a loss or gradient norm far above recent ones that recurs when the step is rerun; values as for
    on_nonfinite, and ignore: do not look for spikes."""
    spike_zscore: Annotated[float, Field(gt=0)] = 6.0
    """A loss this many standard deviations above its moving mean is a spike; a gradient norm must also exceed 10 times
    its mean."""
    spike_warmup_steps: Annotated[int, Field(ge=2)] = 20
    """Steps before losses are compared with their moving mean; until then a spike is a loss far above all earlier ones
    and ln(vocabulary size)."""
    rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """lower_rate: factor on the learning rate, from the skipped step to the end of the run."""
    max_skipped_steps: NotNegative = 3
    """Consecutive bad steps that may be skipped or zeroed; the next one stops the run."""
    max_skipped_total: NotNegative = 100
    """Bad steps that may be skipped or zeroed in the whole run; the next one stops it."""


class DebugSettings(ConfigSection):
    update_ratio_every: NotNegative = 0
    """Steps between measurements of the update norm relative to the weight norm; each copies the trainable weights.
    0 = never."""
    group_norms_every: NotNegative = 50
    """Steps between `train.groups` events with gradient and weight norms per layer. 0 = never."""
    debug: bool = False
    """Emit these events at every step; for a bad step of a single process, also find the op whose backward produced NaN
    and the line that called it."""


# Pydantic orders inherited fields by the bases from right to left.
class StabilityConfig(DebugSettings, BadStepSettings, ClippingSettings):
    rollback_steps: Positive = 1
    """roll_back: return to the newest checkpoint at least this many steps older than the current weights. Needs
    checkpoint.every_steps. The samples since then are not repeated."""
    max_rollbacks: NotNegative = 3
    """roll_back: number of rollbacks allowed; the next one stops the run."""

    @property
    def rolls_back(self) -> bool:
        return "roll_back" in (self.on_nonfinite, self.on_spike)


class CheckpointConfig(ConfigSection):
    every_steps: Positive | None = None
    """Steps between checkpoints; None = only at the end and when the run is interrupted."""
    keep: Positive = 2
    """Number of newest checkpoints to keep; the best one is kept as well."""
    final: Literal["last", "best"] = "last"
    """Weights to save as `adapter/` or `model/`: the last ones, or those with the lowest evaluation loss."""
    background: bool = True
    """Write checkpoints in the background from a copy in host memory; false: training waits for the disk."""
    allow_change: list[str] = []
    """Keys or sections that may differ from the original run when resuming (`resume --allow-change`)."""


class ReportConfig(ConfigSection):
    html: bool = True
    """Write report.html at the end of the run."""
    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Trackers to log metrics to; each needs its extra (`pip install 'pantheraml[tensorboard]'`)."""
    project: str = "pantheraml"
    """Project or experiment name in these trackers."""


class TrainConfig(ConfigSection):
    """Configuration of `pantheraml train`: one field per section."""

    model: ModelConfig
    data: DataConfig
    method: MethodConfig = MethodConfig()
    train: TrainSettings = TrainSettings()
    parallel: MultiGPUConfig = MultiGPUConfig()
    stability: StabilityConfig = StabilityConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto = GPUs if available."""

    @model_validator(mode="before")
    @classmethod
    def _warn_of_aliases(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = without_removed_keys(values)
        parallel = values.get("parallel") if isinstance(values, dict) else None
        if isinstance(parallel, dict):
            warn_of_aliases(parallel)
        return values

    @model_validator(mode="after")
    def _translate_legacy_aliases(self) -> TrainConfig:
        auto_map, checkpointing = self.parallel.auto_device_map, self.parallel.use_gradient_checkpointing
        if auto_map or checkpointing is not None:
            model, train = translate_to_sections(self.model, self.train, auto_map, checkpointing)
            parallel = replace(self.parallel, **OF_OTHER_SECTIONS)
            self.__dict__.update(model=model, train=train, parallel=parallel)  # assignment would validate again
        return self

    @model_validator(mode="after")
    def _check_across_sections(self) -> TrainConfig:
        has_eval = self.data.eval_path is not None or self.data.eval_fraction > 0
        if self.data.eval_path is not None and self.data.eval_fraction > 0:
            raise ValueError("data.eval_path and data.eval_fraction are both set; keep one")
        if not has_eval:
            for name, is_set in (
                ("train.eval_every_steps", self.train.eval_every_steps is not None),
                ("train.early_stopping_patience", self.train.early_stopping_patience is not None),
                ("checkpoint.final=best", self.checkpoint.final == "best"),
            ):
                if is_set:
                    raise ValueError(f"{name} needs evaluation data: set data.eval_path or data.eval_fraction")
        if self.train.early_stopping_patience is not None and self.train.eval_every_steps is None:
            raise ValueError("train.early_stopping_patience needs train.eval_every_steps")
        precision, other = self.model.precision, {"nf4": "qlora", "fp8": "full"}
        if precision in ("fp8", "int8", "nf4") and self.method.kind not in ("lora", other.get(precision)):
            raise ValueError(
                f"model.precision={precision} quantizes LoRA's frozen weights to {precision}, which needs"
                " method.kind=lora"
            )
        if self.model.max_memory is not None and self.model.device_map is None:
            raise ValueError("model.max_memory needs model.device_map")
        if self.model.device_map is not None and self.parallel.mode == MultiGPUMode.DATAPARALLEL:
            raise ValueError(
                "model.device_map splits the model, but parallel.mode=dataparallel replicates it; keep one"
            )
        if self.train.weights == "bf16" and self.method.kind != "full":
            raise ValueError("train.weights=bf16 is for method.kind=full; adapters are small and stay in fp32")
        if self.train.weights == "bf16" and self.model.precision in ("fp32", "fp16"):
            raise ValueError(f"train.weights=bf16 computes in bf16, but model.precision is {self.model.precision}")
        if self.method.kind in ("lora", "dora", "qlora") and self.model.init == "random":
            raise ValueError("model.init=random trains from scratch, which needs method.kind=full")
        return self

    @model_validator(mode="after")
    def _check_rollback(self) -> TrainConfig:
        if self.stability.rolls_back and self.checkpoint.every_steps is None:
            raise ValueError("stability: roll_back needs checkpoints to return to: set checkpoint.every_steps")
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

"""The registries of all kinds of parts that a run is built of, and the library's own parts in them. No torch.

An extension adds to the same registries: `NORMALIZATIONS.register("MyNorm", MyNorm)`, or as a decorator. Below each
registry stands how its parts are built. `config` is the section of the run's configuration that the part belongs to;
`config.options(Cls)` are the values of an extension's own flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from megatron.core.registry import NoFacts, Registry

NORMALIZATIONS: Registry[Any, NoFacts] = Registry("--normalization", NoFacts, "name, size, config, ctx, partial_over")
"""`Norm(name, size, config, ctx, partial_over)`: a module over the last dim, `size` wide. `partial_over` is that of its
parameters' ParamMeta."""

NORMALIZATIONS.register("LayerNorm", "megatron.core.transformer.norm:LayerNorm")
NORMALIZATIONS.register("RMSNorm", "megatron.core.transformer.norm:RMSNorm")


@dataclass(frozen=True)
class ActivationFacts:
    gated: bool = False
    """Whether it maps [..., 2f], gate before up, to [..., f]; else it keeps the width."""

    bounded: bool = False
    """Whether --activation-func-clamp-value and --glu-linear-offset apply to it."""


ACTIVATIONS: Registry[Any, ActivationFacts] = Registry("--activation-func", ActivationFacts, "name, config, ctx")
"""`Activation(name, config, ctx)`: a function or module between the two linear layers of MLPs and experts. It sees a
part of the width, so its parameters have `partial_over=("tp",)`."""

_ACTIVATIONS = "megatron.core.transformer.activations"
for _plain in ("gelu", "gelu_tanh", "squared_relu"):
    ACTIVATIONS.register(_plain, f"{_ACTIVATIONS}:build_plain")
ACTIVATIONS.register("xielu", f"{_ACTIVATIONS}:XIELU")
for _gated in ("swiglu", "geglu", "geglu_tanh", "quick_geglu"):
    ACTIVATIONS.register(_gated, f"{_ACTIVATIONS}:build_gated", gated=True, bounded=True)


class HeadWidths(NamedTuple):
    """Channels of heads."""

    key: int
    """Of a query or key head."""

    rotary: int
    """Those of a query or key head that --rotary-percent is a fraction of."""

    value: int
    """Of a value head."""


def grouped_widths(config: Any) -> HeadWidths:
    """Channels of the heads of self-attention."""
    key = config.kv_channels or config.hidden_size // config.num_attention_heads
    return HeadWidths(key, key, config.value_channels or key)


@dataclass(frozen=True)
class MixerFacts:
    parameters: str | None = None
    """Where its parameters are listed, "module:function" of a module without torch: (name, config, sequence_parallel)
    -> their ParamMetas. None: plans build the model on fake tensors to see them."""

    rules: str | None = None
    """Where its rules are, in the same form: (RunConfig, world size) -> problems of a model that has it."""

    described: Callable[[Any], str] = lambda config: ""
    """Model's configuration -> what a plan says of its heads beside their number and width."""


@dataclass(frozen=True)
class LinearAttentionFacts(MixerFacts):
    whole_sequences: bool = False
    """Whether it sees the tokens of all context-parallel ranks."""


@dataclass(frozen=True)
class AttentionFacts(MixerFacts):
    """Functions are of the model's configuration. The defaults are self-attention's."""

    chosen_by: Callable[[Any], bool] = lambda config: False
    """Whether a flag of its own chooses it in place of --attention-module."""

    widths: Callable[[Any], HeadWidths] = grouped_widths

    grouped: bool = True
    """Whether its heads are those of --kv-channels and --num-query-groups, of whose rows linear_qkv consists."""

    rotates: bool = False
    """Whether it has a rotary embedding whatever --position-embedding-type is."""

    rope_type: str = "rope"
    """Its --rope-type if none is given."""

    scales_scores: bool = False
    """Whether --mscale-all-dim scales attention scores."""


ATTENTIONS: Registry[Any, AttentionFacts] = Registry("--attention-module", AttentionFacts, "name, config, ctx")
"""`Attention(name, config, ctx)`: a module, (x [s, b, h], context) -> [s, b, h]."""

ATTENTIONS.register(
    "self_attention",
    "megatron.core.transformer.self_attention:SelfAttention",
    parameters="megatron.core.transformer.parameters:self_attention_metas",
)

LINEAR_ATTENTIONS: Registry[Any, LinearAttentionFacts] = Registry(
    "--experimental-attention-variant", LinearAttentionFacts, "name, config, ctx"
)
"""The same in the layers of --linear-attention-freq. What it reads of earlier tokens has a size of its own; generation
keeps it in `context.cache.states`."""

ATTENTION_BACKENDS: Registry[Any, NoFacts] = Registry(
    "--attention-backend", NoFacts, attributes=("causal", "tiles", "dropout", "always_tiles")
)
"""A `megatron.core.attention.core_attention.AttentionBackend`: the kernels of attention."""

_ATTENTION = "megatron.core.attention.core_attention"
ATTENTION_BACKENDS.register("auto", f"{_ATTENTION}:AttentionBackend")
ATTENTION_BACKENDS.register("flash", f"{_ATTENTION}:AttentionBackend")
ATTENTION_BACKENDS.register("unfused", f"{_ATTENTION}:Unfused")

LINEARS: Registry[Any, NoFacts] = Registry("linear layer", NoFacts, "linear, ctx")
"""`Linear(linear, ctx)`: a linear layer of transformer layers with sharded features, as a description of
`megatron.core.tensor_parallel.parameters` says. What it is substituted by computes and sends the same in another way.
`ctx.options(Cls)` are the values of an extension's own flags."""

LINEARS.register("column_parallel", "megatron.core.tensor_parallel.layers:ColumnParallelLinear")
LINEARS.register("row_parallel", "megatron.core.tensor_parallel.layers:RowParallelLinear")

MLPS: Registry[Any, NoFacts] = Registry("--mlp-module", NoFacts, "name, config, ctx")
"""`MLP(name, config, ctx)`: a module, (x [s, b, h], context) -> [s, b, h], in layers without experts."""

MLPS.register("mlp", "megatron.core.transformer.mlp:MLP")

LAYERS: Registry[Any, NoFacts] = Registry("--layer-module", NoFacts, "name, config, ctx")
"""`Layer(name, config, ctx)`: a module, (x [s, b, h], context) -> [s, b, h]; `ctx.layer` is its number."""

LAYERS.register("transformer_layer", "megatron.core.transformer.layer:TransformerLayer")


@dataclass(frozen=True)
class RecomputedFacts:
    within: str | None = None
    """A larger part that includes it."""

    needs: str = ""
    """What a model without it lacks: a flag."""


RECOMPUTED_PARTS: Registry[Any, RecomputedFacts] = Registry("--recompute-modules", RecomputedFacts, "config")
"""`has(config)`: whether the model has a part that selective recomputation can compute again. Modules that are such a
part ask `config.recomputes(name)`."""

RECOMPUTED_PARTS.register("core_attn", lambda config: True)
RECOMPUTED_PARTS.register("layernorm", lambda config: True)
RECOMPUTED_PARTS.register("mlp_act", lambda config: True, within="mlp")
RECOMPUTED_PARTS.register("mlp", lambda config: True)
RECOMPUTED_PARTS.register("moe_act", lambda config: config.num_experts is not None, within="moe", needs="--num-experts")
RECOMPUTED_PARTS.register("moe", lambda config: config.num_experts is not None, needs="--num-experts")
RECOMPUTED_PARTS.register(
    "shared_experts",
    lambda config: bool(config.moe_shared_expert_intermediate_size),
    within="moe",
    needs="--moe-shared-expert-intermediate-size",
)


@dataclass(frozen=True)
class LossFacts:
    multi_token: bool = False
    """Whether it may be called with the labels of a later token (--mtp-num-layers): each loss follows from its logits
    and its label alone."""


LOSSES: Registry[Any, LossFacts] = Registry("--loss-func", LossFacts, "config, ctx", attributes=("prepare",))
"""`Loss(config, ctx)`: see `megatron.core.models.gpt.loss.TokenLoss`."""

LOSSES.register("cross_entropy", "megatron.core.models.gpt.loss:CrossEntropy", multi_token=True)


@dataclass(frozen=True)
class OptimizerFacts:
    states: tuple[str, ...]
    """Names of the tensors kept for each element of the parameters beside the main parameter."""

    whole_matrices: bool = False
    """Whether it updates the matrices of hidden layers, each as a whole, and leaves the rest to another optimizer; else
    it updates all parameters, element by element."""

    matrices: str = "owners"
    """Entry of MATRIX_EXCHANGES that brings whole matrices together."""


OPTIMIZERS: Registry[Any, OptimizerFacts] = Registry(
    "--optimizer", OptimizerFacts, lambda facts: "config, shards" + ", exchange" * facts.whole_matrices
)
"""`MyOptimizer(config, shards)`: see `megatron.core.optimizer.optimizer.Optimizer`. With `whole_matrices` it is
`MyOptimizer(config, shards, exchange)`, the exchange being what the entry of MATRIX_EXCHANGES builds."""

OPTIMIZERS.register("adam", "megatron.core.optimizer.optimizer:AdamW", states=("exp_avg", "exp_avg_sq"))
OPTIMIZERS.register("sgd", "megatron.core.optimizer.optimizer:SGD", states=("momentum_buffer",))


@dataclass(frozen=True)
class MatrixFacts:
    roles: Callable[[Any], frozenset[str]]
    """OptimizerConfig -> roles (`ParamMeta.role`) of the matrices that are updated as wholes."""

    others: Callable[[Any], str]
    """OptimizerConfig -> the optimizer of all other parameters."""

    fields: tuple[str, ...] = ()
    """Fields of flags that say which optimizer a parameter has: a run has those of the checkpoint that it loads."""


MATRIX_EXCHANGES: Registry[Any, MatrixFacts] = Registry("exchange of matrices", MatrixFacts, "config, ddp, state")
"""`build(config, ddp, state)`: what brings the matrices of one rank's stage together for an optimizer of whole ones."""


class StatePlan:
    """How states of an optimizer are stored, as far as it is known without torch: here in the main dtype."""

    def holds(self, optimizer: Any) -> bool:
        """Whether an OptimizerConfig asks for it."""
        return True

    def main_kind(self, optimizer: Any, params_dtype: str, main_dtype: str, on_host: bool = False) -> str:
        """How main parameters are stored, given the names of both dtypes: "aliased" (the parameters themselves), or
        "stored" (a copy in the main dtype), which those `on_host` always are; extensions have others."""
        return "aliased" if params_dtype == main_dtype and not on_host else "stored"

    def main_bytes(self, numel: int, kind: str, main: int) -> int:
        """Bytes of main parameters of this kind, where the main dtype has `main`."""
        return 0 if kind == "aliased" else numel * main

    def state_bytes(self, optimizer: Any, numel: int, state: str, main: int) -> int:
        """Bytes of a state, by its name."""
        return numel * main

    def gradients_dtype(self, optimizer: Any) -> str | None:
        """Dtype in which gradients are summed over micro-batches; None: the main dtype."""
        return None

    def described(self, optimizer: Any, params_dtype: str, main_dtype: str) -> str:
        """Formats of main parameters and states, for a plan."""
        return f"{optimizer.optimizer} state {main_dtype}"


STATE_STORES: Registry[Any, StatePlan] = Registry("store of states", lambda plan: plan, attributes=("shard", "rule"))
"""What stores an optimizer's states and updates them, see `megatron.core.optimizer.optimizer.MainStates`. The last one
whose plan holds is taken."""

STATE_STORES.register("main", "megatron.core.optimizer.optimizer:MainStates", plan=StatePlan())


@dataclass(frozen=True)
class HostUpdateFacts:
    fraction: Callable[[Any], float]
    """OptimizerConfig -> share of the elements whose states are in host memory, and are updated there."""


HOST_UPDATES: Registry[Any, HostUpdateFacts] = Registry(
    "update on the host", HostUpdateFacts, "config, shards, rules, slots, threads"
)
"""`build(config, shards, rules, slots, threads)`: what updates shards in host memory; none of the trunk's. See
`megatron.core.optimizer.optimizer.HostUpdateRule`."""


@dataclass(frozen=True)
class WhenFacts:
    when: Callable[[Any], bool]
    """Section of the configuration -> whether it asks for the part."""


@dataclass(frozen=True)
class LinearFormatFacts:
    """Functions are of the ModelParallelConfig."""

    when: Callable[[Any], bool]
    """Whether it asks for the format."""

    layers: Callable[[Any, int], range]
    """(config, layers of the model) -> numbers of those whose linear layers use it."""

    alignment: Callable[[Any, int], tuple[int, str]]
    """(config, ranks) -> number that divides a rank's features if `ranks` have a part of them, and the flag that asks
    for it."""

    tokens: int
    """Number that divides the tokens of a micro-batch for every kernel."""

    described: Callable[[Any], str]
    """The format in a few words."""

    peak_tflops: Mapping[str, float]
    """Part of the name of a GPU -> peak of its data sheet."""


LINEAR_FORMATS: Registry[Any, LinearFormatFacts] = Registry(
    "format of products", LinearFormatFacts, attributes=("build", "check")
)
"""Number format of the products of linear layers beside that of the parameters; none of the trunk's. `build(config,
layers, casts)` makes a `megatron.core.tensor_parallel.linear_gemms.LinearFormat`; `check(config, device)` raises
ValueError if the device cannot compute it."""


def linear_format(config: Any) -> str | None:
    """The format of products that a ModelParallelConfig asks for; None for that of the parameters."""
    return next(iter(LINEAR_FORMATS.wanted(config)), None)


@dataclass(frozen=True)
class ShardingFacts:
    about: str
    """What is sharded, for --help."""

    gradients: bool = False
    """ZeRO-2: whether a rank keeps the gradients of its shards alone."""

    parameters: bool = False
    """ZeRO-3: whether a rank keeps the parameters of its shards alone."""


SHARDING_STRATEGIES: Registry[Any, ShardingFacts] = Registry(
    "--data-parallel-sharding-strategy", ShardingFacts, "modules, params, buckets, shards_params, queue, casts"
)
"""A `megatron.core.distributed.param_and_grad_buffer.WholeUnits`: what a strategy does around the passes of layers."""

_WHOLE_UNITS = "megatron.core.distributed.param_and_grad_buffer:WholeUnits"
SHARDING_STRATEGIES.register("no_shard", _WHOLE_UNITS, about="nothing")
SHARDING_STRATEGIES.register("optim", _WHOLE_UNITS, about="optimizer state (ZeRO-1)")

PARAM_GATHERS: Registry[Any, WhenFacts] = Registry("gather of parameters", WhenFacts, "ddp")
"""`build(ddp)`: casts weights of linear layers before a `DistributedDataParallel` gathers them; None if it has none
to cast. Its `cast_()` is called before the gathers. `when` is of the ModelParallelConfig; linear layers then have
buckets of their own, of which it takes those that it wants (`Bucket.gather_bytes`)."""


def param_gather(config: Any) -> str | None:
    """The gather of parameters that a ModelParallelConfig asks for; None for one in their own format."""
    return next(iter(PARAM_GATHERS.wanted(config)), None)


UPDATE_HOOKS: Registry[Any, WhenFacts] = Registry("hook of updates", WhenFacts, "config, modules, shards, state")
"""`hook(config, modules, shards, state)`: its `after_update(skip)` is called after each update of main parameters
on the device, before the parameters are written. `skip` is 1 on the device where nothing was updated, else 0."""


UPDATES_AHEAD: Registry[Any, WhenFacts] = Registry("update ahead", WhenFacts, "optimizer", attributes=("validate",))
"""`build(optimizer)`: what updates before the gradient norm is known, and rolls back if it must; none of the trunk's.
See `megatron.core.optimizer.distrib_optimizer.UpdateAhead`. `when` is of the OptimizerConfig. Lists of the pipeline
then have VALIDATE, where ranks learn whether the update stands."""


def update_ahead(config: Any) -> str | None:
    """The update ahead of the norm that an OptimizerConfig asks for; None for updates that wait for it."""
    return next(iter(UPDATES_AHEAD.wanted(config)), None)


@dataclass(frozen=True)
class StoreFacts:
    layers: Callable[[Any], int]
    """ModelParallelConfig -> layers of each stage, from its first one, whose activations it keeps."""

    with_layers: Callable[[Any, int], Any]
    """(ModelParallelConfig, layers) -> the same with at most so many, for plans."""


ACTIVATION_STORES: Registry[Any, StoreFacts] = Registry("store of activations", StoreFacts, "config, device")
"""`build(config, device)`: what keeps activations that are saved for the backward elsewhere than on the device; none of
the trunk's. See `megatron.core.transformer.activation_store.ActivationStore`."""

LR_SCHEDULES: Registry[Any, NoFacts] = Registry("--lr-decay-style", NoFacts, "samples, length, config")
"""`schedule(samples, length, config)`: learning rate after `samples` consumed samples, beyond the warm-up."""

for _style in ("constant", "linear", "cosine", "inverse_square_root", "WSD"):
    LR_SCHEDULES.register(_style.replace("_", "-"), f"megatron.core.optimizer.param_scheduler:{_style.lower()}")


@dataclass(frozen=True)
class ScheduleFacts:
    chunks: int = 1
    """Stages on a rank, where nobody says how many."""
    any_chunks: bool = False
    """Whether it is called with the number of stages on a rank as a third argument, and takes any."""
    any_groups: bool = False
    """Whether it is called with the number of micro-batches in a group as a fourth argument (None: its own choice)."""
    v_shaped: bool = False
    """Whether stages lie on the ranks there and back, so that rank 0 has the first and the last one."""
    splits_backward: bool = False
    """Whether it has I and W, the gradients of inputs and of weights, in place of B."""

    in_turns: bool = False
    """Whether it takes `in_turns=True`, for `PASS_PAIRS`: FB before each F and B, or I, that run in turns
    (`schedules.runs_in_turns`)."""

    def form(self) -> str:
        """The arguments of a schedule."""
        wider = ", v" * (self.any_chunks or self.any_groups) + ", group" * self.any_groups
        return f"p, m{wider}{', in_turns=' * self.in_turns}"


PIPELINE_SCHEDULES: Registry[Any, ScheduleFacts] = Registry("--pipeline-schedule", ScheduleFacts, ScheduleFacts.form)
"""`schedule(p, m)`: for each of p pipeline ranks its actions on m micro-batches, in order."""

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
PIPELINE_SCHEDULES.register("gpipe", f"{_SCHEDULES}:gpipe")
PIPELINE_SCHEDULES.register("1f1b", f"{_SCHEDULES}:one_f_one_b", in_turns=True)
PIPELINE_SCHEDULES.register(
    "interleaved", f"{_SCHEDULES}:interleaved", chunks=2, any_chunks=True, any_groups=True, in_turns=True
)
PIPELINE_SCHEDULES.register("zb-h1", f"{_SCHEDULES}:zb_h1", splits_backward=True)
PIPELINE_SCHEDULES.register("zb-h2", f"{_SCHEDULES}:zb_h2", splits_backward=True, in_turns=True)
PIPELINE_SCHEDULES.register("zb-v", f"{_SCHEDULES}:zb_v", chunks=2, v_shaped=True, splits_backward=True)


@dataclass(frozen=True)
class RunnerFacts:
    when: Callable[[Any], bool]
    """ModelParallelConfig -> whether it asks for the runner."""

    launches_once: bool = False
    """Whether the host launches all kernels of a micro-batch at once, for plans."""


MICROBATCH_RUNNERS: Registry[Any, RunnerFacts] = Registry("runner", RunnerFacts, attributes=("prepare", "build"))
"""What runs micro-batches in place of the pipeline's executor. `prepare(config, device)` is called before the model is
built. `build(config, run, device, casts)` builds an object whose `train(batches, seed)` returns the losses; `run(batch,
seed)` is the forward and backward of one micro-batch, and `config` the ModelParallelConfig."""

PASS_PAIRS: Registry[Any, WhenFacts] = Registry("pair of passes", WhenFacts, "config", ("run", "hand_over"))
"""`build(config)`: a `megatron.core.collectives.PassPair`, by which a forward and a backward pass share a rank; none of
the trunk's. The lists of schedules then mark such pairs (`ScheduleFacts.in_turns`). `when` and `config` are of the
ModelParallelConfig."""

DATASETS: Registry[Any, NoFacts] = Registry("--dataset-type", NoFacts, "config, format, seed, sizes")
"""`build(config, format, seed, sizes)`: the `Datasets` of training, validation and test, `sizes` being the samples
wanted of each (None: one epoch); see `megatron.core.datasets.streaming.GeneratorDataset`."""

DATASETS.register("gpt", "megatron.core.datasets.build:build_gpt")
DATASETS.register("mock", "megatron.core.datasets.build:build_mock")


@dataclass(frozen=True)
class DataReaderFacts:
    urls: bool = False
    """Whether it reads URLs."""


DATA_READERS: Registry[Any, DataReaderFacts] = Registry(
    "--data-path", DataReaderFacts, "data, tokenizer, vocab_size, prepare", attributes=("prefix", "describe")
)
"""`Reader(data, tokenizer, vocab_size, prepare)` of the kind of path of its name (`PATH_KINDS`): `prefix(flag, path)`
makes a dataset of the files, unless it is there, and returns its prefix; `Reader.describe(flag, path)` is a line about
them. Both raise ValueError. `prepare()` is due first in each process that it starts."""


DATASET_WRAPPERS: Registry[Any, WhenFacts] = Registry("data set wrapper", WhenFacts, "dataset, config, tokenizer, seed")
"""`Wrapper(dataset, config, tokenizer, seed)`: a data set that changes the samples of another one; `when` is of the
DatasetConfig."""


@dataclass(frozen=True)
class PlanFacts:
    field: str
    """Field of the flag that asks for it."""


PLANS: Registry[Any, PlanFacts] = Registry("plan", PlanFacts, attributes=("planned", "findings"))
"""A subclass of `megatron.training.plan.RunPlan`, for runs of several phases."""


@dataclass(frozen=True)
class TokenizerFacts:
    needs: tuple[str, ...] = ()
    """Fields of TokenizerConfig that must name a file."""
    finds_files: bool = False
    """Whether these may also be names that it finds files by."""


TOKENIZERS: Registry[Any, TokenizerFacts] = Registry("--tokenizer-type", TokenizerFacts, "config, vocab_size")
"""`build(config, vocab_size)`: a `megatron.core.tokenizers.tokenizer.Tokenizer`; `vocab_size` is --vocab-size."""

_TOKENIZERS, _MODEL = "megatron.core.tokenizers.tokenizer", ("tokenizer_model",)
TOKENIZERS.register("SentencePieceTokenizer", f"{_TOKENIZERS}:sentencepiece", needs=_MODEL)
TOKENIZERS.register("Llama2Tokenizer", f"{_TOKENIZERS}:llama2", needs=_MODEL)
TOKENIZERS.register("HuggingFaceTokenizer", f"{_TOKENIZERS}:huggingface", needs=_MODEL, finds_files=True)
TOKENIZERS.register("GPT2BPETokenizer", f"{_TOKENIZERS}:gpt2_bpe", needs=("vocab_file", "merge_file"))
TOKENIZERS.register("NullTokenizer", f"{_TOKENIZERS}:null")
TOKENIZERS.register("ByteTokenizer", f"{_TOKENIZERS}:byte")

MODEL_FLAGS: Registry[Any, NoFacts] = Registry("--load", NoFacts, "config, reader")
"""Kind of path that --load takes beside checkpoints (`megatron.core.dist_checkpointing.path_kind`) ->
`flags(config, reader)`: the configuration with the flags that the model there determines; problems and notes are added
to the `FlagReader`. No torch."""

MODEL_LOADERS: Registry[Any, NoFacts] = Registry("--load", NoFacts, attributes=("start", "stages"))
"""The same kinds of path -> a `megatron.training.checkpointing.ModelLoader`."""


EXPORTERS: Registry[Any, WhenFacts] = Registry("exporter", WhenFacts, "config, held")
"""`Exporter(config, held)`: what is done with complete checkpoints while training continues; see
`megatron.training.saving.Exporter`. `when` is of the RunConfig."""

HF_FAMILIES: Registry[Any, NoFacts] = Registry("model_type", NoFacts, attributes=("model_type", "architecture"))
"""A `megatron.extensions.hugging_face.families.Family` for each `model_type` of Hugging Face."""


def _always(*run: Any) -> bool:
    return True


@dataclass(frozen=True)
class CallbackFacts:
    when: Callable[[Any], bool] = _always
    """Whether a run of this RunConfig has it; where not, it is not imported."""

    evaluates: str = ""
    """The flag with which one of its tasks evaluates the model, so that --skip-train has something to do."""


CALLBACKS: Registry[Any, CallbackFacts] = Registry("callback", CallbackFacts, "config")
"""`Callback(config)`: see `megatron.training.hooks.Callback`; `config` is the whole RunConfig."""

METRICS: Registry[Any, NoFacts] = Registry("metric", NoFacts, "config")
"""`Metric(config)`: see `megatron.training.hooks.Metric`."""

SINKS: Registry[Any, WhenFacts] = Registry("sink", WhenFacts, "config, iteration", attributes=("write", "close"))
"""`Sink(config, iteration)`: where records are written beside `metrics.jsonl`, opened on the first rank of a run that
starts after `iteration`; see `megatron.training.metrics.sinks.Sink`. `config` is the whole RunConfig."""

LOG_FORMATS: Registry[Any, NoFacts] = Registry("--log-format", NoFacts, "config, train_iters")
"""`Lines(config, train_iters)`: a `megatron.training.metrics.console.LogLines`, the console's lines of a run."""

LOG_FORMATS.register("default", "megatron.training.metrics.console:LogLines")

STEP_SEARCHES: Registry[Any, NoFacts] = Registry("step search", NoFacts, "run, verdict")
"""`search(run, verdict)`: a `megatron.training.hooks.Finding` about a step whose loss or gradient was not finite, or
None. Called on every rank, before the next update of the weights; it may run the step again."""


HANG_ANALYSES: Registry[Any, NoFacts] = Registry("hang analysis", NoFacts, "status")
"""`Analysis(status)`: finds the rank that others wait for in vain, built as a rank starts, before its process groups.
The one registered last is used; see `megatron.training.reliability.rank_status.HangAnalysis`."""


@dataclass(frozen=True)
class WatchFacts:
    when: Callable[[Any, Any], bool] = _always
    """(RunConfig, Launch) -> whether ranks have it; where not, it is not imported."""


WATCHES: Registry[Any, WatchFacts] = Registry("watch", WatchFacts, "config, watchdog")
"""`Watch(config, watchdog)`: what else the watchdog of a rank looks at; see
`megatron.training.reliability.watchdog.Watch`."""


class Kernel(Protocol):
    """What may compute an operation in place of plain torch."""

    def suits(self, *operands: Any) -> bool:
        """Whether it computes with these operands: their device, precision and sizes."""

    def __call__(self, *operands: Any) -> Any: ...


KERNELS: Registry[Kernel, NoFacts] = Registry("kernel", NoFacts, attributes=("suits",))
"""Name of an operation -> the kernel that may compute it. The library itself has none."""

LEFT_OUT: set[str] = set()
"""Kernels that this process does not use: those that are wrong, fail or are slower than torch."""

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_for(name: str, *operands: Any) -> Kernel | None:
    """The kernel to compute an operation with these operands by; None for plain torch."""
    if name in LEFT_OUT or name not in KERNELS:
        return None
    kernel = _kernel(name)
    return kernel if kernel.suits(*operands) else None


def operation(plain: Function) -> Function:
    """Decorator of a function of plain torch, called by position, which a kernel of its name may compute."""

    @wraps(plain)
    def compute(*operands: Any) -> Any:
        return (kernel_for(plain.__name__, *operands) or plain)(*operands)

    return cast("Function", compute)


@cache
def _kernel(name: str) -> Kernel:
    return KERNELS[name]

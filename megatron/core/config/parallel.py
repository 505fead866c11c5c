"""Configuration of the parallel layout, devices, backends and number formats. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Protocol

from megatron.core.attention.backends import ATTENTION_BACKENDS, CONTEXT_PARALLEL
from megatron.core.config.flag_spec import Section, flag
from megatron.core.config.losses import AUTO
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.core.registry import Registry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HostFacts:
    """Properties of a registered store that keeps optimizer states or activations in host memory."""

    fraction: Callable[..., float]
    """Function that returns, for an `OptimizerConfig`, the fraction of the optimizer states that is kept and updated in
    host memory."""

    ranges: Callable[..., Mapping[tuple[int, int], Sequence[range]]]
    """Function that returns, for each bucket, the ranges of elements whose states are in host memory. The function
    receives the `OptimizerConfig` and the number of elements that the rank owns in each bucket. A bucket is identified
    by (buffer number, bucket number in the buffer). The numbers of elements are listed in the order in which the
    backward pass completes the buckets."""

    slots: Callable[[Sequence[int]], tuple[int, int]]
    """Function that returns the number and the size of the device slots. The gradients and parameters of ranges in host
    memory are copied through these slots. The argument of the function contains the sizes of all ranges. Only plans
    call this function."""

    layers: Callable[..., int]
    """Function that returns, for a `ModelParallelConfig`, the number of layers at the start of each stage whose
    activations the store keeps."""

    with_layers: Callable[..., Section]
    """Function that returns a copy of a `ModelParallelConfig` in which the activations of at most n layers are kept in
    host memory. The function receives the `ModelParallelConfig` and n. Only plans call this function."""


class HostMemory(Protocol):
    """Factory of two objects: the first keeps and updates optimizer states in host memory, and the second keeps saved
    activations in host memory."""

    def update(
        self,
        config: Section,
        shards: Sequence[object],
        chains: Sequence[object],
        threads: int | None,
    ) -> object:
        """Create the `megatron.core.optimizer.optimizer.HostUpdateRule` that updates shards in host memory.

        Args:
            config: The `OptimizerConfig`.
            shards: Shards of the main parameters and optimizer states that are in host memory.
            chains: Sequence of transforms that updates each shard, in the order of `shards`.
            threads: Number of threads.
        """

    def activations(self, config: Section, device: torch.device) -> object:
        """Return the `megatron.core.transformer.activation_store.ActivationStore` of a rank's stages."""


HOST_MEMORY = Registry("store in host memory", HostFacts, protocol=HostMemory)
"""Registry that maps names to implementations of `HostMemory`. Extensions register implementations as follows:

    HOST_MEMORY.register("host", f"{__package__}.memory:HostStores", fraction=..., ranges=..., slots=..., layers=...,
                         with_layers=...)
"""


def _nowhere(config: ModelParallelConfig) -> bool:
    return False


@dataclass(frozen=True)
class UnitFacts:
    """Properties of a registered unit store."""

    when: Callable[[ModelParallelConfig], bool]
    """Predicate that decides whether the configuration selects the store."""

    on_host: bool = True
    """True if the store keeps parameters and gradients in host memory. Plans use this value to predict memory."""

    on_disk: Callable[[ModelParallelConfig], bool] = _nowhere
    """Predicate that decides whether the host memory of the store and of the optimizer states is backed by files."""


class UnitStoreClass(Protocol):
    """Class or function that creates the unit store of one rank."""

    def __call__(self, config: ModelParallelConfig, device: torch.device) -> object:
        """Create a `megatron.core.distributed.param_and_grad_buffer.UnitStore` for a model that runs on `device`."""


UNIT_STORES = Registry("store of units", UnitFacts, protocol=UnitStoreClass)
"""Registry that maps names to unit stores, which are classes derived from `ShardedUnits`. A unit store keeps the
matrices of units (transformer layers, and modules outside of layers) and their gradients between the passes that use
them. Only extensions register unit stores. If a run uses no unit store, `DDPConfig` determines which states the
data-parallel ranks shard."""


@dataclass(frozen=True)
class SplitFacts:
    """Properties of a registered division of the layers among pipeline stages."""

    when: Callable[[ModelParallelConfig], bool]
    """Predicate that decides whether the configuration selects this division of the layers among pipeline stages."""


class StageSplit(Protocol):
    """Uneven division of the layers among pipeline stages. The argument `model` is a `TransformerConfig`. If the flags
    describe no valid division, all methods except `virtual` raise a ValueError that names the invalid flag."""

    def virtual(self, parallel: ModelParallelConfig) -> bool:
        """Return whether each pipeline rank holds several stages."""

    def num_stages(self, model: Section, parallel: ModelParallelConfig) -> int | None:
        """Return the number of stages; None if other flags determine it."""

    def end_costs(self, parallel: ModelParallelConfig, first: float, last: float) -> tuple[float, float]:
        """Return the costs of the embedding and the output layer, in units of one layer. `first` and `last` are the
        costs of the embedding and the output layer estimated from FLOPs alone."""

    def fixed(self, model: Section, parallel: ModelParallelConfig, layout: PipelineLayout) -> Mapping[int, int]:
        """Return the stages for which a flag sets the number of layers, as a mapping from stage number to number of
        layers."""


STAGE_SPLITS = Registry("split of layers", SplitFacts, protocol=StageSplit)
"""Registry that maps names to implementations of `StageSplit`. Only extensions register implementations of
`StageSplit`."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats of parameters, activations and matrix products."""

    fp16: bool = flag(False, first_run=True)
    """Parameters and activations in IEEE half precision, with dynamic loss scaling."""

    bf16: bool = flag(False, first_run=True)
    """Parameters and activations in bfloat16."""

    fp32: bool = False
    """Parameters and activations in single precision; the default."""

    fp64: bool = False
    """Parameters and activations in double precision, for tests."""

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype of parameters and activations."""
        for name, chosen in (("float16", self.fp16), ("bfloat16", self.bf16), ("float64", self.fp64)):
            if chosen:
                return name
        return "float32"

    @property
    def main_dtype(self) -> str:
        """Name of the torch dtype of gradients, main parameters and optimizer moments."""
        return "float64" if self.fp64 else "float32"


@dataclass(frozen=True)
class ModelParallelConfig(PrecisionConfig, Section):
    """Parallel sizes, pipeline schedule, devices and number formats."""

    tensor_model_parallel_size: int = flag(1, "--tp", first_run=True)
    """Ranks that share each matrix multiplication (tensor parallelism, TP)."""

    pipeline_model_parallel_size: int = flag(1, "--pp", first_run=True)
    """Ranks that share the layers (pipeline parallelism, PP)."""

    context_parallel_size: int = flag(1, "--cp", "--context-model-parallel-size", first_run=True)
    """Ranks that share each sequence (context parallelism, CP)."""

    cp_comm_type: str = flag("p2p", choices=CONTEXT_PARALLEL)
    """Communication of context-parallel attention: a ring of keys and values (p2p), gathered keys and values
    (all_gather), or an all-to-all over heads (a2a)."""

    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
    """Two factors of --context-parallel-size for --cp-comm-type a2a+p2p: the number of neighbouring ranks that exchange
    heads, such as the GPUs of a node, and the number of ranks in each ring between these groups."""

    expert_model_parallel_size: int = flag(1, "--ep", first_run=True)
    """Ranks that share the experts of a layer (expert parallelism, EP)."""

    expert_tensor_parallel_size: int | None = flag(None, "--etp")
    """Ranks that share each expert's matrix multiplications; default: TP."""

    data_parallel_size: int | None = flag(None, "--dp")
    """Number of model replicas (data parallelism, DP). By default, this number is derived from the world size; a
    different value is an error."""

    sequence_parallel: bool = flag(False, off_without="--tensor-model-parallel-size above 1", first_run=True)
    """Shard norms, residuals and dropout along the sequence over the TP ranks."""

    num_distributed_optimizer_instances: int = 1
    """Number of data-parallel groups, for example one per node, that each hold a complete set of shards (hybrid
    sharding, HSDP). Once per step, gradients are summed over these groups."""

    use_tp_pp_dp_mapping: bool = False
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    pipeline_schedule: str | None = flag(None, choices=PIPELINE_SCHEDULES)
    """Pipeline schedule; default: interleaved if virtual stages are given, else 1f1b."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Pipeline stages per rank; default: the schedule's, 2 for interleaved and zb-v."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, excludes="--num-virtual-stages-per-pipeline-rank", same_setting_as="num_virtual_stages_per_pipeline_rank"
    )
    """Average number of layers per pipeline stage. This flag replaces num-virtual-stages-per-pipeline-rank."""

    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Interleaved schedule: number of micro-batches that pass through one stage of a rank before the rank's next stage;
    default: PP."""

    cpu: bool = flag(False, first_run=True)
    """Train on the CPU even if a GPU is present."""

    compile: bool | None = None
    """Compile the element-wise regions between matrix products with torch.compile; default: on GPUs."""

    loss_chunk_tokens: int | None = flag(None, at_least=AUTO)
    """Compute the output layer, the loss and their gradients in chunks of this many tokens, so that the logits of only
    one chunk are in memory. auto: the smallest chunk size from 1,024 to 8,192 tokens that costs at most 1 % of the step
    time. 0, the default: all tokens at once."""

    attention_backend: str = flag("auto", choices=ATTENTION_BACKENDS)
    """Attention kernel on GPUs. auto: the kernel that is fastest when timed at the start of the run. flash: torch's
    FlashAttention-2. flash3: the FlashAttention-3 package. cudnn: cuDNN. triton: the only fused kernel with attention
    dropout, used only for dropout. fp8: the fastest kernel whose forward pass is in fp8 (see docs/precision.md).
    fp8_flash3 and fp8_triton: one of the fp8 kernels. unfused: plain torch, also on CPU."""

    distributed_backend: str | None = flag(None, choices=("nccl", "gloo"))
    """torch.distributed backend; default: nccl on GPUs, gloo on CPU."""

    distributed_timeout_minutes: float = 10.0
    """Longest time that a rank waits for another rank in a step or evaluation before the run ends."""

    startup_timeout_minutes: float = 30.0
    """Longest time of each start-up phase, including index building and checkpoint loading, and of the first step."""

    @property
    def activation_store(self) -> str | None:
        """Name of the store in `HOST_MEMORY` that keeps activations in host memory; None if all activations stay on the
        device."""
        return next((name for name in HOST_MEMORY if HOST_MEMORY.facts(name).layers(self)), None)

    @property
    def offloaded_layers(self) -> int:
        """Number of layers at the start of each stage whose saved activations are kept in the `activation_store`."""
        name = self.activation_store
        return 0 if name is None else HOST_MEMORY.facts(name).layers(self)

    @property
    def unit_store(self) -> str | None:
        """Name of the store in `UNIT_STORES` that keeps the parameters of units between passes; None if they stay on
        the device."""
        return UNIT_STORES.chosen(self)

    def with_offloaded_layers(self, layers: int) -> ModelParallelConfig:
        """Return a copy of the configuration that offloads the activations of at most `layers` layers."""
        if (name := self.activation_store) is None:
            return self
        fewer = HOST_MEMORY.facts(name).with_layers(self, layers)
        assert isinstance(fewer, ModelParallelConfig)
        return fewer

    def compiles(self, device_type: str) -> bool:
        """Return True if element-wise regions are compiled with torch.compile on devices of this type ("cuda" or
        "cpu")."""
        return device_type == "cuda" if self.compile is None else self.compile

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        virtual = self.num_virtual_stages_per_pipeline_rank or self.num_layers_per_virtual_pipeline_stage
        split = self.stage_split
        return "interleaved" if virtual or (split is not None and split.virtual(self)) else "1f1b"

    @property
    def stage_split(self) -> StageSplit | None:
        """Entry of STAGE_SPLITS that divides the layers among the pipeline stages; None if each stage has the same
        number of layers."""
        name = STAGE_SPLITS.chosen(self)
        return None if name is None else STAGE_SPLITS[name]

    @property
    def nests_context(self) -> bool:
        """True if the context-parallel ranks are arranged in two levels: groups of ranks, and ranks within a group."""
        return CONTEXT_PARALLEL.facts(self.cp_comm_type).nested and self.context_parallel_size > 1

    @property
    def ranks_by_heads(self) -> int:
        """Number of context-parallel ranks among which attention divides the heads of a token."""
        facts = CONTEXT_PARALLEL.facts(self.cp_comm_type)
        if facts.nested and self.hierarchical_context_parallel_sizes:
            return self.hierarchical_context_parallel_sizes[0]
        return self.context_parallel_size if facts.by_heads else 1

    @property
    def ranks_by_queries(self) -> int:
        """Number of context-parallel ranks among which attention divides the queries of a sample."""
        return self.context_parallel_size // self.ranks_by_heads

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one model replica, including its context-parallel ranks."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def smallest_world_size(self) -> int:
        """Smallest world size on which this layout can run, with --dp replicas if --dp is given."""
        dense = self.model_parallel_size * (self.data_parallel_size or 1)
        experts = self.pipeline_model_parallel_size * self.expert_model_parallel_size * self.expert_tp
        return lcm(max(1, dense), max(1, experts))

    @property
    def expert_tp(self) -> int:
        """Number of ranks over which the matrices of an expert are sharded (tensor parallelism of experts)."""
        given = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if given is None else given


@dataclass(frozen=True)
class DDPConfig:
    """Gradient reduction over the data-parallel ranks."""

    ddp_bucket_size: int | None = None
    """Parameters in one gradient bucket; default max(40,000,000, 1,000,000 * data-parallel size)."""

    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass: reduce a bucket as soon as its last gradient is complete."""

    overlap_param_gather: bool = False
    """Overlap the gather of updated parameters with the next forward pass, bucket by bucket."""

    data_parallel_sharding_strategy: str | None = flag(
        None, choices=("no_shard", "optim", "optim_grads", "optim_grads_params")
    )
    """State that is sharded over data-parallel ranks. no_shard: nothing. optim: optimizer state (ZeRO-1). optim_grads:
    also gradients, which are reduced with each micro-batch (ZeRO-2). optim_grads_params: also parameters, which are
    gathered layer by layer (ZeRO-3). Default: optim, or no_shard with --no-use-distributed-optimizer."""

    grad_reduce_in_bf16: bool = flag(False, excludes="--fp64")
    """Reduce gradients in bfloat16: half the bytes, but sums over ranks have only 8 significant bits. Accumulation over
    micro-batches stays in fp32."""

    @property
    def shards_gradients(self) -> bool:
        """True for ZeRO-2 and ZeRO-3, in which a rank keeps only the gradients of its shards."""
        return self.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")

    @property
    def shards_parameters(self) -> bool:
        """True for ZeRO-3: a rank keeps only the parameters of its shards."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"

    def unit_ranks(self, parallel: ModelParallelConfig) -> int | None:
        """Return the minimum data-parallel size at which the matrices of each unit, such as a transformer layer, form a
        separate bucket; None if they never form separate buckets."""
        if parallel.unit_store is not None:
            return 1
        return 2 if self.shards_gradients else None

    def drops_parameters(self, parallel: ModelParallelConfig) -> bool:
        """Return True if the complete matrices of a unit are on the device only during the forward and backward passes
        of the unit."""
        return self.shards_parameters or parallel.unit_store is not None

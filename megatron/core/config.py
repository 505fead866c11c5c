"""What a run is, as frozen dataclasses: the only source of configuration.

Each field is one command-line flag under Megatron's name; the string below a field is its help text
(`megatron.training.arguments` generates the parser from both). Nothing here imports torch, so that a
login node can read, validate and plan a run. Values that follow from others are properties.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.flag_spec import flag
from megatron.core.moe_config import MoEConfig, moe_pattern
from megatron.core.precision_config import PrecisionConfig


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ModelParallelConfig(PrecisionConfig):
    """How the model and the batch are cut over the ranks, and what they are computed on and in."""

    tensor_model_parallel_size: int = flag(1, "--tp")
    """Ranks that share each matrix multiplication (TP)."""

    pipeline_model_parallel_size: int = flag(1, "--pp")
    """Ranks that share the layers (PP)."""

    context_parallel_size: int = flag(1, "--cp", "--context-model-parallel-size")
    """Ranks that share each sequence (CP)."""

    cp_comm_type: str = flag("p2p", choices=("p2p", "all_gather", "a2a"))
    """Attention across context ranks: keys go round a ring (p2p), are gathered, or sequence is swapped for heads."""

    expert_model_parallel_size: int = flag(1, "--ep")
    """Ranks that share the experts of a mixture-of-experts layer (EP)."""

    expert_tensor_parallel_size: int | None = flag(None, "--etp")
    """Ranks that share each expert's matrix multiplications; default: as many as TP."""

    data_parallel_size: int | None = flag(None, "--dp")
    """Model replicas. Derived from the world size; an error if given and unequal."""

    sequence_parallel: bool = False
    """Shard norms, residuals and dropout along the sequence over the TP ranks."""

    tp_comm_overlap: bool = False
    """Overlap tensor-parallel collectives with matrix products, part by part, under --sequence-parallel."""

    tp_comm_overlap_method: str | None = flag(None, choices=("ring", "symmetric"))
    """--tp-comm-overlap: parts go around by sends and receives (ring, the default), or torch's fused operations over
    symmetric memory of the GPUs of one node (symmetric)."""

    use_tp_pp_dp_mapping: bool = False
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    pipeline_schedule: str | None = flag(None, choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"))
    """Order of forwards and backwards over the pipeline stages; default: interleaved with virtual stages, else 1f1b."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Pipeline stages on each rank; default: as many as the schedule takes, 2 for interleaved and zb-v."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """In place of num-virtual-stages-per-pipeline-rank: as many stages as give each this many layers on average."""

    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank, spread over its stages; under zb-v those of the first stage."""

    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank, spread over its stages; under zb-v those of the last stage."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are split, in place of its FLOPs, which are none."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the head and the loss as one layer when layers are split, in place of their FLOPs."""

    cpu: bool = False
    """Train on the CPU even where a GPU is present."""

    compile: bool | None = None
    """Compile the element-wise regions between matrix products with torch.compile; default: on GPUs."""

    cuda_graph_impl: str = flag("none", choices=("none", "local"))
    """GPUs: record the forward and backward of a micro-batch as a CUDA graph, and replay it for the others (local)."""

    cuda_graph_warmup_steps: int = 3
    """--cuda-graph-impl: steps before the recording, so that kernels are compiled and chosen."""

    distributed_backend: str | None = flag(None, choices=("nccl", "gloo"))
    """torch.distributed backend; default: nccl on GPUs, gloo on CPU."""

    distributed_timeout_minutes: float = 10.0
    """Ranks that wait longer than this for one another, in a step or an evaluation, end the run."""

    startup_timeout_minutes: float = 30.0
    """The same for each phase of start-up, index building and loading among them, and for the first step."""

    def compiles(self, device_type: str) -> bool:
        """Whether regions are compiled on devices of this type ("cuda", "cpu")."""
        return device_type == "cuda" if self.compile is None else self.compile

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        virtual = self.num_virtual_stages_per_pipeline_rank or self.num_layers_per_virtual_pipeline_stage
        return "interleaved" if virtual else "1f1b"

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one model replica, context ranks included."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of the experts."""
        given = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if given is None else given


@dataclass(frozen=True)
class TransformerConfig(MoEConfig):
    """The model: everything that fixes its parameters and what it computes."""

    num_layers: int = 0
    """Transformer layers."""

    hidden_size: int = 0
    """Width h of the residual stream."""

    ffn_hidden_size: int | None = None
    """Width of the MLP; default 4h, with --swiglu 8h/3 rounded up to a multiple of 64."""

    num_attention_heads: int = 0
    """Query heads."""

    kv_channels: int | None = None
    """Width of one head; default hidden-size / num-attention-heads."""

    group_query_attention: bool = False
    """Share keys and values among groups of query heads (GQA)."""

    num_query_groups: int | None = None
    """Key/value heads under --group-query-attention."""

    seq_length: int = 0
    """Tokens s in a training sample."""

    max_position_embeddings: int | None = None
    """Longest sequence the model can be run on; default seq-length."""

    position_embedding_type: str = flag("learned_absolute", choices=("learned_absolute", "rope", "none"))
    """How positions enter: a learned table, rotary embedding, or not at all."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""

    rotary_percent: float = 1.0
    """Share of each head that is rotated."""

    use_rope_scaling: bool = False
    """Stretch low rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = 8.0
    """Llama 3.1 scaling: factor by which low frequencies are slowed."""

    rope_scaling_low_freq_factor: float = 1.0
    """Llama 3.1 scaling: wavelengths above original length / this are fully scaled."""

    rope_scaling_high_freq_factor: float = 4.0
    """Llama 3.1 scaling: wavelengths below original length / this are left alone."""

    rope_scaling_original_max_position_embeddings: int = 8192
    """Llama 3.1 scaling: context length the model was first trained at."""

    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Norm before attention, before the MLP, and at the end."""

    norm_epsilon: float = flag(1e-5, "--layernorm-epsilon")
    """Added to the variance in norms."""

    swiglu: bool = False
    """Gated MLP with SiLU instead of GeLU."""

    squared_relu: bool = False
    """Squared ReLU in the MLP instead of GeLU."""

    qk_layernorm: bool = False
    """Normalise each query and key head before the positions are applied."""

    add_bias_linear: bool = flag(True, name="--disable-bias-linear")
    """No bias in the linear layers."""

    add_qkv_bias: bool = False
    """Bias in the query-key-value projection even under --disable-bias-linear."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own instead of the word embedding's."""

    attention_dropout: float = 0.1
    """Dropout probability of attention weights."""

    hidden_dropout: float = 0.1
    """Dropout probability of embeddings and of what each sublayer adds to the residual stream."""

    init_method_std: float = 0.02
    """Standard deviation of initial weights; of output projections it is divided by sqrt(2 * num-layers)."""

    vocab_size: int | None = None
    """Tokens in the vocabulary before padding; default: the tokenizer's."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this, whatever the layout."""

    window_size: int | None = None
    """Sliding-window attention: each token sees this many tokens, itself included."""

    recompute_granularity: str | None = flag(None, choices=("selective", "full"))
    """Recompute parts of each layer (selective) or whole layers (full) in the backward pass."""

    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """Full recomputation: groups of layers from end to end, or only the first layers of a stage."""

    recompute_num_layers: int | None = None
    """Full recomputation: layers in a group (uniform), or layers recomputed in each stage (block)."""

    recompute_modules: tuple[str, ...] | None = flag(
        None, many=True, choices=("core_attn", "layernorm", "mlp_act", "mlp")
    )
    """Selective recomputation: which parts of each layer; default core_attn. core_attn is attention without its
    projections, layernorm both norms, mlp_act the activation function, mlp the whole MLP, matrix products included."""

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads: the query heads themselves without GQA."""
        if self.group_query_attention and self.num_query_groups:
            return self.num_query_groups
        return self.num_attention_heads

    @property
    def queries_per_group(self) -> int:
        return self.num_attention_heads // self.query_groups

    @property
    def query_projection_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_projection_size(self) -> int:
        return self.query_groups * self.head_dim

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return round_up(8 * self.hidden_size // 3, 64) if self.swiglu else 4 * self.hidden_size

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers whose MLP is a mixture of experts, by number. ValueError if --moe-layer-freq cannot be read."""
        if self.num_experts is None:
            return ()
        pattern = moe_pattern(self.moe_layer_freq, self.num_layers)
        return tuple(number for number, moe in enumerate(pattern) if moe)

    @property
    def moe_ffn_size(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Parts of each layer that selective recomputation computes again."""
        return self.recompute_modules or ("core_attn",) if self.recompute_granularity == "selective" else ()

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding; independent of the layout."""
        assert self.vocab_size, "the vocabulary size is known once the tokenizer is"
        return round_up(self.vocab_size, self.make_vocab_size_divisible_by)

    @property
    def tied_embeddings(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def activation(self) -> str:
        return "swiglu" if self.swiglu else "squared_relu" if self.squared_relu else "gelu"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its learning rate and its loss scale."""

    optimizer: str = flag("adam", choices=("adam", "sgd"))
    """Adam with decoupled weight decay (AdamW), or SGD with momentum."""

    lr: float | None = flag(None, "--learning-rate")
    """Peak learning rate."""

    min_lr: float = 0.0
    """Learning rate that decay ends at."""

    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    """Shape of the decay after warm-up."""

    lr_decay_iters: int | None = None
    """Iterations at which decay ends; default: train-iters."""

    lr_decay_samples: int | None = None
    """Samples at which decay ends; default: train-samples."""

    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""

    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""

    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay length."""

    lr_warmup_init: float = 0.0
    """Learning rate that warm-up starts from."""

    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """WSD: shape of the final anneal."""

    lr_wsd_decay_iters: int | None = None
    """WSD: iterations of the final anneal."""

    lr_wsd_decay_samples: int | None = None
    """WSD: samples of the final anneal."""

    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""

    start_weight_decay: float | None = None
    """Weight decay at the first step; default: weight-decay."""

    end_weight_decay: float | None = None
    """Weight decay at the last step; default: weight-decay."""

    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Shape of the ramp from start to end weight decay."""

    adam_beta1: float = 0.9
    """Decay of the first moment."""

    adam_beta2: float = 0.999
    """Decay of the second moment."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    sgd_momentum: float = 0.9
    """Momentum of SGD."""

    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    loss_scale: float | None = None
    """fp16: fixed loss scale in place of the dynamic one."""

    initial_loss_scale: float = 2.0**32
    """fp16: first value of the dynamic loss scale."""

    min_loss_scale: float = 1.0
    """fp16: the dynamic loss scale never falls below this."""

    loss_scale_window: int = 1000
    """fp16: good steps in a row after which the loss scale doubles."""

    hysteresis: int = 2
    """fp16: overflowing steps after which the loss scale halves."""

    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""


@dataclass(frozen=True)
class DDPConfig:
    """How gradients are reduced over the data-parallel ranks."""

    ddp_bucket_size: int | None = None
    """Parameters in one gradient bucket; default max(40,000,000, 1,000,000 * data-parallel size)."""

    overlap_grad_reduce: bool = False
    """Start the reduction of a gradient bucket when its last gradient is complete, during the backward pass."""

    overlap_param_gather: bool = False
    """Gather the updated parameters during the next forward pass, bucket by bucket."""

    grad_reduce_in_bf16: bool = False
    """Reduce gradients in bfloat16: half the bytes, for sums over ranks that keep 8 bits. Accumulation stays fp32."""

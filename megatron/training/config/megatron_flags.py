"""Megatron-LM flags without a configuration field: accepted without effect, refused, or another spelling.

Tables only. When a feature is built, its flag becomes a dataclass field and is removed here; a test fails while a flag
is in both places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accepted:
    """A flag without effect: `arity` is 0, 1 or "*"; `reason` is logged.

    If `values` is given, only these values are accepted; any other value asks for a feature that is not built.
    """

    arity: int | str
    reason: str
    values: tuple[str, ...] | None = None


def _accept(
    reason: str, *flags: str, arity: int | str = 0, values: tuple[str, ...] | None = None
) -> dict[str, Accepted]:
    return {flag: Accepted(arity, reason, values) for flag in flags}


MEANINGLESS: dict[str, Accepted] = {
    **_accept("there is one implementation of the model", "--use-mcore-models", "--use-legacy-models"),
    **_accept("there is one implementation of the model", "--transformer-impl", arity=1),
    **_accept("attention selects its kernel automatically", "--use-flash-attn"),
    **_accept("attention selects its kernel automatically", "--attention-backend", arity=1),
    **_accept(
        "kernel fusion is not configurable",
        "--no-masked-softmax-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--cross-entropy-loss-fusion",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
        "--use-te-activation-func",
        "--no-clone-scatter-output-in-embedding",
    ),
    **_accept("kernel fusion is not configurable", "--cross-entropy-fusion-impl", arity=1),
    **_accept("attention scores and probabilities are always computed in fp32", "--attention-softmax-in-fp32"),
    **_accept(
        "it does not change the result, and fp32 scores do not overflow",
        "--apply-query-key-layer-scaling",
        "--no-query-key-layer-scaling",
    ),
    **_accept("gradients are always accumulated and reduced in fp32", "--accumulate-allreduce-grads-in-fp32"),
    **_accept("the cross entropy is always computed in fp32", "--fp16-lm-cross-entropy"),
    **_accept(
        "losses are always token sums, divided once by the global number of valid tokens",
        "--calculate-per-token-loss",
        "--ddp-average-in-collective",
        "--no-gradient-reduce-div-fusion",
    ),
    **_accept(
        "initial weights depend only on seed, name and position, on any device and layout",
        "--use-cpu-initialization",
        "--te-rng-tracker",
        "--init-model-with-meta-device",
        "--no-initialization",
    ),
    **_accept("it is read from the launcher's environment", "--local-rank", "--lazy-mpu-init", arity=1),
    **_accept("Megatron-LM ignores it as well", "--no-async-tensor-model-parallel-allreduce"),
    **_accept(
        "the pipeline schedule determines when sends and receives start",
        "--no-overlap-p2p-communication",
        "--overlap-p2p-communication-warmup-flush",
        "--no-scatter-gather-tensors-in-pipeline",
        "--no-align-grad-reduce",
        "--no-align-param-gather",
    ),
    **_accept("it is torch's default", "--pipeline-model-parallel-comm-backend", arity=1, values=("nccl",)),
    **_accept("attention builds its own mask", "--no-create-attention-mask-in-dataloader"),
    **_accept("index files are always memory-mapped", "--no-mmap-bin-files"),
    **_accept("index files are built in one thread", "--num-dataset-builder-threads", arity=1),
    **_accept("samples are always read in a single pass", "--dataloader-type", arity=1, values=("single",)),
    **_accept("blends always use this surplus", "--mid-level-dataset-surplus", arity=1, values=("0.005",)),
    **_accept(
        "checkpoints are torch.distributed.checkpoint folders, written by all ranks, that load at any layout",
        "--use-dist-ckpt",
        "--auto-detect-ckpt-format",
        "--ckpt-fully-parallel-save",
        "--no-ckpt-fully-parallel-save",
        "--ckpt-fully-parallel-load",
        "--ckpt-assume-constant-structure",
        "--dist-ckpt-optim-fully-reshardable",
        "--distrib-optim-fully-reshardable-mem-efficient",
        "--dist-ckpt-save-pre-mcore-014",
    ),
    **_accept("checkpoints are torch.distributed.checkpoint folders", "--ckpt-format", "--dist-ckpt-format", arity=1),
    **_accept("missing and extra keys are always an error", "--dist-ckpt-strictness", arity=1),
    **_accept("random-number state is part of every checkpoint", "--no-save-rng"),
    **_accept(
        "the schedule always follows the flags", "--override-opt_param-scheduler", "--override-opt-param-scheduler"
    ),
    **_accept(
        "it is always logged",
        "--log-loss-scale-to-tensorboard",
        "--log-learning-rate-to-tensorboard",
        "--log-batch-size-to-tensorboard",
        "--log-memory-to-tensorboard",
        "--log-progress",
    ),
    **_accept("the loss scale is always logged", "--no-log-loss-scale-to-tensorboard"),
    **_accept("it is in the resolved configuration", "--log-world-size-to-tensorboard"),
    **_accept("the resolved configuration is saved beside the checkpoints", "--config-logger-dir", arity=1),
    **_accept(
        "the step time is always logged; phases within a step are not timed",
        "--no-barrier-with-level-1-timing",
        "--log-timers-to-tensorboard",
    ),
    **_accept(
        "the step time is always logged; phases within a step are not timed",
        "--timing-log-level",
        "--timing-log-option",
        arity=1,
    ),
    **_accept(
        "TensorBoard receives a record every --log-interval",
        "--tensorboard-log-interval",
        "--tensorboard-queue-size",
        arity=1,
    ),
    **_accept("data workers are threads of the rank", "--exit-signal-handler-for-dataloader"),
    **_accept("there is only one logging level", "--logging-level", arity=1),
    **_accept("One Logger is not used", "--no-one-logger", "--one-logger-async"),
    **_accept(
        "One Logger is not used",
        "--one-logger-project",
        "--one-logger-run-name",
        "--app-tag-run-name",
        "--app-tag-run-version",
        arity=1,
    ),
    **_accept("results are not recomputed for validation", "--rerun-mode", arity=1, values=("disabled",)),
    **_accept("--log-straggler is always on from the start", "--disable-straggler-on-startup"),
    **_accept("the allocator's cache is never emptied", "--empty-unused-memory-level", arity=1, values=("0",)),
    **_accept("there is only one set of tokenizers", "--legacy-tokenizer"),
    **_accept("remote code is never executed", "--trust-remote-code"),
    **_accept("no token is added", "--vocab-extra-ids", arity=1, values=("0",)),
    **_accept("rotary frequencies are always those of RoPE", "--rope-type", arity=1, values=("rope",)),
    **_accept("softmax is always the standard one", "--softmax-type", arity=1, values=("vanilla",)),
    **_accept(
        "gradients, main parameters and moments are always fp32",
        "--main-grads-dtype",
        "--main-params-dtype",
        "--exp-avg-dtype",
        "--exp-avg-sq-dtype",
        arity=1,
        values=("fp32",),
    ),
    **_accept("there is one copy of the optimizer", "--num-distributed-optimizer-instances", arity=1, values=("1",)),
    **_accept("the router always computes in fp32, or fp64", "--moe-router-dtype", arity=1, values=("fp32", "fp64")),
    **_accept("kernel fusion is not configurable", "--moe-permute-fusion", "--moe-router-fusion"),
    **_accept("there is one kind of grouped matrix multiplication", "--moe-use-legacy-grouped-gemm"),
    **_accept("nothing is offloaded", "--cpu-offloading-num-layers", arity=1, values=("0",)),
}
"""Flags accepted without effect: they choose an implementation, or ask for the only behaviour there is."""


CONSTANTS: dict[str, tuple[str, Any]] = {
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--no-position-embedding": ("position_embedding_type", "none"),
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--enable-cuda-graph": ("cuda_graph_impl", "local"),
}
"""Switches that set one field to one value."""


RENAMED: dict[str, str] = {
    "--expert-interval": "use --moe-layer-freq",
    "--moe-layer-recompute": "use --recompute-granularity full",
    "--moe-extended-tp": "use --expert-tensor-parallel-size",
    "--batch-size": "use --micro-batch-size",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--warmup": "use --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    "--checkpoint-activations": "use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--encoder-num-layers": "use --num-layers",
    "--decoder-num-layers": "use --num-layers",
    "--encoder-seq-length": "use --seq-length",
    "--decoder-seq-length": "use --seq-length",
    "--padded-vocab-size": "use --vocab-size and --make-vocab-size-divisible-by",
    "--yaml-cfg": "use --config with the names of flags",
    "--data-args-path": "use --data-path with the file's contents",
    "--per-split-data-args-path": "use --train-data-path, --valid-data-path and --test-data-path",
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes",
    "--ddp-num-buckets": "use --ddp-bucket-size",
}
"""Flags that another flag replaces: an error that names it."""


def _refuse(feature: str, *flags: str) -> dict[str, str]:
    return dict.fromkeys(flags, feature)


NOT_BUILT: dict[str, str] = {
    **_refuse(
        "overlap of expert-parallel communication", "--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap"
    ),
    **_refuse(
        "this variant of mixture of experts",
        "--moe-input-jitter-eps",
        "--moe-router-num-groups",
        "--moe-router-group-topk",
        "--moe-router-force-load-balancing",
        "--moe-router-padding-for-fp8",
        "--moe-shared-expert-gate",
        "--moe-pad-expert-input-to-capacity",
        "--moe-apply-probs-on-input",
        "--moe-latent-size",
    ),
    **_refuse("upcycling of a dense model to experts", "--moe-use-upcycling"),
    **_refuse("this token dispatcher", "--moe-enable-deepep", "--moe-flex-dispatcher-backend"),
    **_refuse("hierarchical context parallelism", "--hierarchical-context-parallel-sizes"),
    **_refuse("this variant of fp8", "--keep-fp8-transpose-cache", "--no-fp8-wgrad"),
    **_refuse("another grouping of interleaved micro-batches", "--microbatch-group-size-per-virtual-pipeline-stage"),
    **_refuse(
        "a manual pipeline layout",
        "--pipeline-model-parallel-layout",
        "--pipeline-model-parallel-split-rank",
    ),
    **_refuse(
        "this overlap of data-parallel communication",
        "--overlap-param-gather-with-optimizer-step",
        "--delay-grad-reduce",
        "--delay-param-gather",
    ),
    **_refuse("overlap of tensor-parallel communication in user buffers", "--use-ring-exchange-p2p"),
    **_refuse(
        "turning off parts of the overlap of tensor-parallel communication",
        "--disable-tp-comm-overlap-ag",
        "--disable-tp-comm-overlap-rs",
        "--disable-tp-comm-bulk-dgrad",
        "--disable-tp-comm-bulk-wgrad",
        "--disable-tp-comm-split-ag",
        "--disable-tp-comm-split-rs",
    ),
    **_refuse(
        "tuning of the communication library",
        "--nccl-communicator-config-path",
        "--use-nccl-ub",
        "--use-sharp",
        "--sharp-enabled-group",
        "--high-priority-stream-groups",
        "--disable-gloo-process-groups",
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ),
    **_refuse("deferral of the head's weight gradient", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit"),
    **_refuse(
        "fully sharded data parallelism",
        "--use-megatron-fsdp",
        "--use-custom-fsdp",
        "--use-torch-fsdp2",
        "--data-parallel-sharding-strategy",
        "--fsdp-double-buffer",
        "--enable-full-sharding-in-hsdp",
    ),
    **_refuse(
        "optimizer state with less precision than fp32", "--use-precision-aware-optimizer", "--store-param-remainders"
    ),
    **_refuse(
        "offloading of optimizer state to host memory",
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction",
        "--use-torch-optimizer-for-cpu-offload",
        "--overlap-cpu-optimizer-d2h-h2d",
    ),
    **_refuse("offloading of activations to host memory", "--cpu-offloading", "--distribute-saved-activations"),
    **_refuse("a residual stream in fp32", "--fp32-residual-connection"),
    **_refuse("this setting of matrix-product precision", "--disable-bf16-reduced-precision-matmul"),
    **_refuse("this activation function", "--openai-gelu", "--quick-geglu", "--glu-linear-offset", "--onnx-safe"),
    **_refuse(
        "this normalization", "--apply-layernorm-1p", "--apply-residual-connection-post-layernorm", "--qk-l2-norm"
    ),
    **_refuse(
        "this position embedding",
        "--rotary-interleaved",
        "--rotary-seq-len-interpolation-factor",
        "--no-rope-freq",
        "--mrope-section",
        "--relative-attention-num-buckets",
        "--relative-attention-max-distance",
    ),
    **_refuse("sliding windows in some layers only", "--window-attn-skip-freq"),
    **_refuse(
        "multi-latent attention",
        "--multi-latent-attention",
        "--q-lora-rank",
        "--kv-lora-rank",
        "--qk-head-dim",
        "--qk-pos-emb-head-dim",
        "--v-head-dim",
    ),
    **_refuse("module specifications of layers", "--spec"),
    **_refuse(
        "this initialization",
        "--embedding-init-method-std",
        "--init-method-xavier-uniform",
        "--data-parallel-random-init",
    ),
    **_refuse("separate learning rates for some layers", "--decoupled-lr", "--decoupled-min-lr", "--head-lr-mult"),
    **_refuse("reading the schedule from a checkpoint", "--use-checkpoint-opt_param-scheduler"),
    **_refuse("reading the schedule from a checkpoint", "--use-checkpoint-opt-param-scheduler"),
    **_refuse(
        "reading flags from a checkpoint",
        "--use-checkpoint-args",
        "--use-mp-args-from-checkpoint-args",
        "--no-use-tokenizer-model-from-checkpoint-args",
    ),
    **_refuse(
        "this variant of saving or loading",
        "--use-persistent-ckpt-worker",
        "--pretrained-checkpoint",
        "--ckpt-step",
        "--load-main-params-from-ckpt",
        "--replication",
        "--replication-jump",
        "--replication-factor",
    ),
    **_refuse(
        "restarts within a job", "--enable-ft-package", "--calc-ft-timeouts", "--result-rejected-tracker-filename"
    ),
    **_refuse("a run without training", "--skip-train", "--test-mode"),
    **_refuse("a batch size that adapts to the number of ranks", "--decrease-batch-size-if-needed"),
    **_refuse("this kind of evaluation", "--full-validation", "--multiple-validation-sets"),
    **_refuse(
        "this log",
        "--log-params-norm",
        "--log-num-zeros-in-grad",
        "--log-validation-ppl-to-tensorboard",
        "--log-energy",
        "--wandb-entity",
        "--wandb-save-dir",
    ),
    **_refuse("profiling", "--profile", "--use-pytorch-profiler", "--record-memory-history", "--memory-snapshot-path"),
    **_refuse("CUDA graphs of Transformer Engine", "--external-cuda-graph"),
    **_refuse("an interval of synchronization between ranks", "--train-sync-interval"),
    **_refuse("this data format", "--fim-data", "--sft", "--object-storage-cache-path", "--tokenizer-metadata"),
    **_refuse("models other than GPT", "--bert-no-binary-head", "--mask-prob", "--short-seq-prob", "--is-hybrid-model"),
}
"""Refused flags: flag -> the feature that it asks for, which is not built."""


NOT_BUILT_FAMILIES: dict[str, str] = {
    "--moe-deepep-": "this token dispatcher",
    "--moe-hybridep-": "this token dispatcher",
    "--moe-upcycling-": "upcycling of a dense model to experts",
    "--fp8-": "this variant of fp8",
    "--fp4-": "fp4",
    "--tp-comm-": "overlap of tensor-parallel communication in user buffers",
    "--cuda-graph-": "CUDA graphs of some modules only",
    "--profile-": "profiling",
    "--mtp-": "multi-token prediction",
    "--muon-": "the Muon optimizer",
    "--mamba-": "state-space layers",
    "--hybrid-": "state-space layers",
    "--non-persistent-": "non-persistent checkpoints",
    "--ckpt-convert-": "this variant of saving or loading",
    "--inprocess-": "restarts within a job",
    "--straggler-": "switching the straggler report during a run",
    "--tiktoken-": "this tokenizer",
    "--retro-": "retrieval models",
    "--retriever-": "retrieval models",
    "--rl-": "reinforcement learning",
    "--grpo-": "reinforcement learning",
    "--inference-": "inference in a training run",
    "--vision-": "models other than GPT",
    "--dino-": "models other than GPT",
    "--heterogeneous-": "heterogeneous layers",
    "--adlr-": "restarts by this scheduler",
    "--error-injection-": "fault injection",
}
"""Refused prefixes: every flag with this prefix that is not a field -> the feature that it asks for."""

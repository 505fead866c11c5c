"""The built-in extensions: optional features of the framework. This module does not import torch.

Each extension is a folder within the folder of its subject (`mixers`, `attention`, `pipeline`, ...). An extension
registers its flags and components in the same way as a user's `--extension FILE.py`. To remove an extension, delete its
folder and its line in `BUILT_IN`; if one of its flags is then passed, the error message names the missing extension.
The core packages `megatron.core` and `megatron.training` import no extension.

    SUBJECT/NAME/__init__.py   purpose of the extension, its flags, and which file to read first
    SUBJECT/NAME/flags.py      flags with their valid ranges, and registrations; does not import torch
    SUBJECT/NAME/rules.py      rules that involve several flags, if there are any; does not import torch
    SUBJECT/NAME/hooks.py      callbacks, meters and tasks, if there are any
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from megatron.training.config.flags import FLAG_HOMES


@dataclass(frozen=True)
class BuiltIn:
    """A built-in extension."""

    place: str
    """Folder of the extension, in the form `SUBJECT/NAME`."""

    about: str
    """Purpose of the extension, in one line."""

    needs: tuple[str, ...] = ()
    """Names of the other extensions that this extension imports."""

    @property
    def name(self) -> str:
        """Name of the extension without its subject. Messages and tests use this name."""
        return self.place.partition("/")[2]


BUILT_IN: tuple[BuiltIn, ...] = (
    BuiltIn("plan/simulator", "times, bubbles and peak memory of pipeline schedules, by simulation"),
    BuiltIn(
        "observe/diagnosis",
        "Search for NaNs, dump and replay of a step, layer statistics, stragglers, traces, profiles.",
        needs=("simulator",),
    ),
    BuiltIn(
        "plan/planner",
        "memory, FLOPs and time of a run before it starts; the fastest layouts; rehearsals",
        needs=("fp8", "fusions", "simulator"),
    ),
    BuiltIn("data/tokenizers", "tokenizers that read files: SentencePiece, Hugging Face, GPT-2"),
    BuiltIn("interop/conversion", "conversion of checkpoints between formats", needs=("tokenizers",)),
    BuiltIn(
        "interop/hugging_face",
        "Hugging Face folders: start of a run, conversion, exports",
        needs=("conversion", "hybrid_layers"),
    ),
    BuiltIn(
        "interop/megatron_checkpoints", "checkpoints of Megatron-LM, to convert from and to", needs=("conversion",)
    ),
    BuiltIn("observe/logs", "TensorBoard, Weights & Biases, Megatron-LM's lines; samples, losses of data sets, norms"),
    BuiltIn("observe/goodput", "Share of the wall time in which a run was trained, over all its starts."),
    BuiltIn("observe/noise_scale", "gradient noise scale: how large a batch may be before it wastes samples"),
    BuiltIn("interop/megatron_flags", "lists of data as Megatron names them, and its flags without a field here"),
    BuiltIn(
        "optim/optimizers", "Muon, QK-clip, Adam with states in fewer bits than fp32; groups of parameters by name"
    ),
    BuiltIn("speed/cuda_graphs", "forward and backward pass of a micro-batch as one CUDA graph"),
    BuiltIn("optim/averaged_weights", "exponential moving averages of the weights, saved and evaluated"),
    BuiltIn(
        "optim/mup",
        "muP and CompleteP: what was tuned on a small model holds for a wide and deep one",
        needs=("optimizers",),
    ),
    BuiltIn("optim/schedules", "learning rates of several pieces, and decayed branches of a run"),
    BuiltIn(
        "plan/ladder",
        "small runs that predict the loss and the best learning rate of a large one",
        needs=("mup", "phases", "schedules"),
    ),
    BuiltIn("operate/checkpoint_cleanup", "deletion of older checkpoints: the newest, every N-th or the best are kept"),
    BuiltIn("operate/object_storage", "checkpoints, metrics and exports on s3://, gs:// and other URLs of fsspec"),
    BuiltIn(
        "pipeline/post_validation",
        "optimizer updates before the gradient norm is known, rolled back if it refuses them",
    ),
    BuiltIn("pipeline/pipeline_split", "layers of pipeline stages by hand: of both ends, or of all stages"),
    BuiltIn("pipeline/zero_bubble", "zero-bubble pipeline schedules: ZB-H1, ZB-H2, ZB-V"),
    BuiltIn("pipeline/pipedream_2bw", "PipeDream-2BW: pipelines that never flush, with two versions of the weights"),
    BuiltIn("memory/offload", "optimizer states and saved activations in host memory"),
    BuiltIn("speed/cpu_half", "matrix products of 16 bits in fp32, on CPUs without instructions for them"),
    BuiltIn("speed/half_sums", "partial sums of bf16 GEMMs in fp32, on GPUs"),
    BuiltIn("data/phases", "phases of a run, each with data, lengths and a learning rate of its own (--data-phases)"),
    BuiltIn("data/datasets", "for data sets of one's own: samples from a generator, and the writer of indexed files"),
    BuiltIn("data/packing", "whole documents in samples: best-fit packing (--sequence-packing)"),
    BuiltIn(
        "data/text_data",
        "training on text files, local or remote, without preprocessing; fill-in-the-middle samples",
        needs=("datasets", "tokenizers"),
    ),
    BuiltIn(
        "data/sources",
        "data sets of Hugging Face's datasets, WebDataset and MosaicML, each read by its own library",
        needs=("datasets", "text_data"),
    ),
    BuiltIn(
        "observe/evaluation",
        "Downstream tasks of lm-evaluation-harness, during training and on checkpoints.",
        needs=("inference",),
    ),
    BuiltIn("use/inference", "Generation of text from checkpoints, and its server.", needs=("cpu_half", "tokenizers")),
    BuiltIn(
        "operate/resilience",
        "Runs on several hosts, some of which may be lost: heartbeats, elastic restarts, a lease on --save.",
    ),
    BuiltIn(
        "operate/peer_copies",
        "Copies of the training state in the memory of other hosts, to resume from.",
        needs=("planner",),
    ),
    BuiltIn(
        "operate/audit",
        "Steps computed a second time by other means: ranks that compute wrong values are named.",
        needs=("diagnosis", "planner"),
    ),
    BuiltIn(
        "operate/job_restarts",
        "Ranks that have failed are started again within the processes of the launcher; spare ranks.",
        needs=("peer_copies", "planner"),
    ),
    BuiltIn(
        "operate/rollback",
        "Going back at a spike to the state of some steps before, past the batches since then.",
        needs=("peer_copies", "planner"),
    ),
    BuiltIn(
        "speed/fusions", "Kernels and layers that compute in one pass what the trunk does in several.", needs=("fp8",)
    ),
    BuiltIn("speed/fp8", "Products of linear layers in 8-bit floating point."),
    BuiltIn("speed/overlap", "Overlaps the collectives inside a layer with its computation."),
    BuiltIn("layers/hybrid_layers", "Layers of one sublayer each, as a pattern states them, as in Nemotron-H."),
    BuiltIn("moe/routing", "Sinkhorn routing, SparseMixer's weights, random choices of experts for benchmarks."),
    BuiltIn("moe/hash_routing", "Experts chosen by the ids of tokens in the first layers, as in DeepSeek-V4."),
    BuiltIn("moe/upcycling", "Experts that start as copies of a dense model's MLPs.", needs=("conversion",)),
    BuiltIn("moe/moe_shortcut", "Experts whose output is added a layer later, as in LongCat-Flash."),
    BuiltIn("attention/latent_attention", "Multi-latent attention (MLA), as in DeepSeek-V3."),
    BuiltIn(
        "attention/context_parallel", "Context parallelism with gathered keys and values, and by all-to-all of heads."
    ),
    BuiltIn(
        "mixers/linear_attention",
        "Gated delta nets, a linear attention, as in Qwen3-Next.",
        needs=("context_parallel", "hybrid_layers"),
    ),
    BuiltIn(
        "mixers/mamba",
        "Mamba-2, a state-space layer, as in Nemotron-H.",
        needs=("context_parallel", "hybrid_layers", "linear_attention"),
    ),
    BuiltIn(
        "mixers/parallel_mixers",
        "Attention and Mamba-2 side by side in a layer, as in Falcon-H1.",
        needs=("hybrid_layers", "mamba"),
    ),
    BuiltIn(
        "mixers/short_convolution",
        "Short convolutions between two gates, as in LFM2.",
        needs=("context_parallel", "hybrid_layers", "linear_attention"),
    ),
    BuiltIn(
        "mixers/mamba1",
        "Mamba-1, a state-space layer, as in Falcon-Mamba and Jamba.",
        needs=("context_parallel", "hybrid_layers", "linear_attention", "short_convolution"),
    ),
    BuiltIn(
        "mixers/rg_lru",
        "RG-LRU, a gated recurrence, as in RecurrentGemma.",
        needs=("context_parallel", "hybrid_layers", "linear_attention", "mamba1", "short_convolution"),
    ),
    BuiltIn(
        "attention/sparse_attention",
        "DeepSeek sparse attention (DSA), as in DeepSeek-V3.2, and compressed attention, as in DeepSeek-V4.",
        needs=("context_parallel", "fusions", "hybrid_layers", "latent_attention"),
    ),
    BuiltIn(
        "mixers/lightning_attention",
        "Lightning attention, a linear attention, as in MiniMax-Text-01.",
        needs=("context_parallel", "hybrid_layers", "linear_attention", "mamba"),
    ),
    BuiltIn(
        "mixers/kimi_delta_attention",
        "Kimi Delta Attention, a linear attention, as in Kimi Linear.",
        needs=("hybrid_layers", "linear_attention"),
    ),
    BuiltIn("attention/differential_attention", "The difference of two softmaxes of attention, as in DiffLlama."),
    BuiltIn("attention/biased_last_attention", "A bias of attention in the last layer, as in GPT-NeoX-Japanese."),
    BuiltIn("layers/normed_residual", "Layers that add to their normalized inputs, as in MiniMax-Text-01."),
    BuiltIn("attention/normed_values", "Self-attention with normalized values, as in Gemma 4."),
    BuiltIn("attention/biased_gates", "Self-attention with biases of its output gates, as in Beam."),
    BuiltIn("layers/depth_scaled_residual", "A residual stream whose additions are scaled by depth, as in Beam."),
    BuiltIn("layers/dense_head", "A dense layer before the output layer, as in ModernBERT's decoder."),
    BuiltIn("layers/gated_norms", "Norms multiplied by a gate of their own output, as in A.X K2."),
    BuiltIn("layers/no_first_norm", "A first layer without a norm before attention, as in ModernBERT."),
    BuiltIn("layers/scaled_layer", "Layers whose output is multiplied by a stored number, as in Gemma 4."),
    BuiltIn("layers/per_layer_embeddings", "Embeddings of its own for each layer, as in Gemma 4 E2B."),
    BuiltIn("layers/mean_of_experts", "The mean of the shared expert and the chosen experts, as in Command A+."),
    BuiltIn("layers/inner_norms", "Norms before the output projections of attention and MLP, as in BitNet."),
    BuiltIn("layers/hyper_connections", "Several residual streams (mHC), as in DeepSeek-V4."),
    BuiltIn("layers/scaled_swiglu", "SwiGLU with factors of its gates and outputs, as in Falcon-H1."),
    BuiltIn("layers/xielu", "xIELU, an activation function with two trainable scalars, as in Apertus."),
)
"""All built-in extensions."""

INDEX = Path(__file__).with_name("flag_index.txt")
"""File with one line per extension, in the form `name: --flag --flag=value`. A line lists the flags of the extension,
and the values that the extension registers for flags of other modules. If an extension was deleted, this file
distinguishes its flags and values from typing errors. `python -m tests.pure.test_arguments` writes the file."""


@cache
def load() -> None:
    """Import `flags.py` of each extension, which registers the flags and the components of the extension. Repeated
    calls have no effect. Every program must call this function before it parses flags or looks up components, because
    the core packages do not import extensions.

    Raise ModuleNotFoundError if the folder of an extension is missing, or if an extension needs another extension that
    is not listed in `BUILT_IN`."""
    here, listed = Path(__file__), {extension.name for extension in BUILT_IN}
    for extension in BUILT_IN:
        absent = [need for need in extension.needs if need not in listed]
        if not (here.parent / extension.place / "flags.py").is_file():
            what, remedy = "is missing", "restore the folder"
        elif absent:
            what, remedy = f"needs {absent[0]}", "restore that one"
        else:
            continue
        line = f'BuiltIn("{extension.place}", ...)'
        raise ModuleNotFoundError(
            f"{here} lists the extension {extension.name}, which {what}: remove the line {line} there, or {remedy}"
        )
    for extension in BUILT_IN:
        import_module(f"{__name__}.{extension.place.replace('/', '.')}.flags")
    FLAG_HOMES.update(_homes())


def _homes() -> dict[str, str]:
    lines = (line.partition(": ") for line in INDEX.read_text(encoding="utf-8").splitlines())
    return {flag: name for name, _, flags in lines for flag in flags.split()}

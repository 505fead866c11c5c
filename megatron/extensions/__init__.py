"""The built-in extensions: what a run can do without. No torch.

Each is a folder beside this file that registers its flags and parts as a user's `--extension FILE.py` does. It can be
deleted, with its line below: its flags then are errors that name it. The trunk (`megatron.core`, `megatron.training`)
imports none of them.

    NAME/__init__.py   what it is for, its flags, and what to read first
    NAME/flags.py      its flags, ranges stated on the fields, and where its parts are; imports no torch
    NAME/rules.py      rules of several fields, if there are any; imports no torch
    NAME/hooks.py      callbacks, meters and tasks, if there are any
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

    name: str
    about: str
    """One line of what it is for."""

    needs: tuple[str, ...] = ()
    """The extensions that it imports."""


BUILT_IN: tuple[BuiltIn, ...] = (
    BuiltIn("simulator", "times, bubbles and peak memory of pipeline schedules, by simulation"),
    BuiltIn(
        "diagnosis",
        "Search for NaNs, dump and replay of a step, layer statistics, stragglers, traces, profiles.",
        needs=("simulator",),
    ),
    BuiltIn(
        "planner",
        "memory, FLOPs and time of a run before it starts; the fastest layouts; rehearsals",
        needs=("fp8", "fusions", "simulator"),
    ),
    BuiltIn("tokenizers", "tokenizers that read files: SentencePiece, Hugging Face, GPT-2"),
    BuiltIn("conversion", "conversion of checkpoints between formats", needs=("tokenizers",)),
    BuiltIn(
        "hugging_face",
        "Hugging Face folders: start of a run, conversion, exports",
        needs=("conversion", "hybrid_layers"),
    ),
    BuiltIn("megatron_checkpoints", "checkpoints of Megatron-LM, to convert from and to", needs=("conversion",)),
    BuiltIn("logs", "TensorBoard, Weights & Biases, Megatron-LM's lines; samples, losses of data sets, norms"),
    BuiltIn("megatron_flags", "lists of data as Megatron names them, and its flags without a field here"),
    BuiltIn("optimizers", "Muon, QK-clip, Adam with states in fewer bits than fp32; groups of parameters by name"),
    BuiltIn("cuda_graphs", "forward and backward pass of a micro-batch as one CUDA graph"),
    BuiltIn("averaged_weights", "exponential moving averages of the weights, saved and evaluated"),
    BuiltIn("retention", "deletion of older checkpoints: the newest, every N-th or the best are kept"),
    BuiltIn("post_validation", "optimizer updates before the gradient norm is known, rolled back if it refuses them"),
    BuiltIn("pipeline_split", "layers of pipeline stages by hand: of both ends, or of all stages"),
    BuiltIn("zero_bubble", "zero-bubble pipeline schedules: ZB-H1, ZB-H2, ZB-V"),
    BuiltIn("pipedream_2bw", "PipeDream-2BW: pipelines that never flush, with two versions of the weights"),
    BuiltIn("offload", "optimizer states and saved activations in host memory"),
    BuiltIn("cpu_half", "matrix products of 16 bits in fp32, on CPUs without instructions for them"),
    BuiltIn("phases", "phases of a run, each with data, lengths and a learning rate of its own (--data-phases)"),
    BuiltIn("datasets", "for data sets of one's own: samples from a generator, and the writer of indexed files"),
    BuiltIn(
        "text_data",
        "training on text files, local or remote, without preprocessing; fill-in-the-middle samples",
        needs=("datasets", "tokenizers"),
    ),
    BuiltIn(
        "evaluation",
        "Downstream tasks of lm-evaluation-harness, during training and on checkpoints.",
        needs=("inference",),
    ),
    BuiltIn("inference", "Generation of text from checkpoints, and its server.", needs=("cpu_half", "tokenizers")),
    BuiltIn(
        "resilience",
        "Runs on several hosts, some of which may be lost: heartbeats, elastic restarts, a lease on --save.",
    ),
    BuiltIn("fusions", "Kernels and layers that compute in one pass what the trunk does in several.", needs=("fp8",)),
    BuiltIn("fp8", "Products of linear layers in 8-bit floating point."),
    BuiltIn("overlap", "Overlap of the collectives within layers with computation."),
    BuiltIn("hybrid_layers", "Layers of one sublayer each, as a pattern states them, as in Nemotron-H."),
    BuiltIn("routing", "Sinkhorn routing, SparseMixer's weights, random choices of experts for benchmarks."),
    BuiltIn("hash_routing", "Experts chosen by the ids of tokens in the first layers, as in DeepSeek-V4."),
    BuiltIn("moe_shortcut", "Experts whose output is added a layer later, as in LongCat-Flash."),
    BuiltIn("latent_attention", "Multi-latent attention (MLA), as in DeepSeek-V3."),
    BuiltIn("context_parallel", "Context parallelism with gathered keys and values, and by all-to-all of heads."),
    BuiltIn(
        "linear_attention",
        "Gated delta nets, a linear attention, as in Qwen3-Next.",
        needs=("context_parallel", "hybrid_layers"),
    ),
    BuiltIn(
        "mamba",
        "Mamba-2, a state-space layer, as in Nemotron-H.",
        needs=("context_parallel", "hybrid_layers", "linear_attention"),
    ),
    BuiltIn(
        "parallel_mixers",
        "Attention and Mamba-2 side by side in a layer, as in Falcon-H1.",
        needs=("hybrid_layers", "mamba"),
    ),
    BuiltIn(
        "short_convolution",
        "Short convolutions between two gates, as in LFM2.",
        needs=("context_parallel", "hybrid_layers", "linear_attention"),
    ),
    BuiltIn(
        "mamba1",
        "Mamba-1, a state-space layer, as in Falcon-Mamba and Jamba.",
        needs=("context_parallel", "hybrid_layers", "linear_attention", "short_convolution"),
    ),
    BuiltIn(
        "rg_lru",
        "RG-LRU, a gated recurrence, as in RecurrentGemma.",
        needs=("context_parallel", "hybrid_layers", "linear_attention", "mamba1", "short_convolution"),
    ),
    BuiltIn(
        "sparse_attention",
        "DeepSeek sparse attention (DSA), as in DeepSeek-V3.2, and compressed attention, as in DeepSeek-V4.",
        needs=("context_parallel", "hybrid_layers", "latent_attention"),
    ),
    BuiltIn(
        "lightning_attention",
        "Lightning attention, a linear attention, as in MiniMax-Text-01.",
        needs=("context_parallel", "hybrid_layers", "linear_attention", "mamba"),
    ),
    BuiltIn(
        "kimi_delta_attention",
        "Kimi Delta Attention, a linear attention, as in Kimi Linear.",
        needs=("hybrid_layers", "linear_attention"),
    ),
    BuiltIn("normed_residual", "Layers that add to their normalized inputs, as in MiniMax-Text-01."),
    BuiltIn("hyper_connections", "Several residual streams (mHC), as in DeepSeek-V4."),
    BuiltIn("scaled_swiglu", "SwiGLU with factors of its gates and outputs, as in Falcon-H1."),
    BuiltIn("xielu", "xIELU, an activation function with two trainable scalars, as in Apertus."),
)
"""The one list of built-in extensions."""

INDEX = Path(__file__).with_name("flag_index.txt")
"""A line for each extension, `name: --flag --flag=value`: flags of it, and values of other flags that it registers, by
which those of a deleted one are distinguished from typing errors.
`python -m tests.pure.test_arguments` writes it."""


@cache
def load() -> None:
    """Imports `flags.py` of each extension, which registers its flags and where its parts are. Only once. Every program
    calls it before it reads flags or looks up parts: the library itself does not know its extensions. Raises
    ModuleNotFoundError for an extension without its folder, and for one without another that it needs."""
    here, listed = Path(__file__), {extension.name for extension in BUILT_IN}
    for name, needs in ((extension.name, extension.needs) for extension in BUILT_IN):
        absent = [need for need in needs if need not in listed]
        if not (here.parent / name / "flags.py").is_file():
            what, remedy = "is missing", f'remove the line BuiltIn("{name}", ...) there, or restore the folder'
        elif absent:
            what, remedy = f"needs {absent[0]}", f'remove the line BuiltIn("{name}", ...) there, or restore that one'
        else:
            continue
        raise ModuleNotFoundError(f"{here} lists the extension {name}, which {what}: {remedy}")
    for extension in BUILT_IN:
        import_module(f"{__name__}.{extension.name}.flags")
    FLAG_HOMES.update(_homes())


def _homes() -> dict[str, str]:
    lines = (line.partition(": ") for line in INDEX.read_text(encoding="utf-8").splitlines())
    return {flag: name for name, _, flags in lines for flag in flags.split()}

"""Register the flags and rules for keeping optimizer states, activations and weights in host memory.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.core.config.flag_spec import flag
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.config.parallel import HOST_MEMORY, UNIT_STORES, ModelParallelConfig
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.extensions.memory.offload.placement import host_ranges, host_slots
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

HERE = "megatron.extensions.memory.offload"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(HostStateFlags)
    if own.optimizer_cpu_offload and config.optimizer.updates_together:
        name = config.optimizer.optimizer
        does = "needs whole matrices" if config.optimizer.whole_roles else "needs whole parameters"
        rule = f"updates elements independently on the host, but --optimizer {name} {does}"
        elementwise = [name for name in OPTIMIZERS if not replace(config.optimizer, optimizer=name).updates_together]
        remedy = f"remove it, or use --optimizer {' or '.join(elementwise)}"
        yield Problem("--optimizer-cpu-offload", None, rule, remedy)


@extension_flags("optimizer states in host memory", may_change=True, rules=rules)
@dataclass(frozen=True)
class HostStateFlags:
    optimizer_cpu_offload: bool = flag(
        False,
        excludes="--optimizer-post-validation: updates on the host cannot be rolled back",
    )
    """Keep a fraction of the optimizer states in host memory, and update these states there (ZeRO-Offload).
    --optimizer-offload-fraction sets the fraction. While some elements are updated, the gradients and updated
    parameters of other elements are copied between device and host."""

    optimizer_offload_fraction: float = flag(1.0, at_least=0, at_most=1, no_effect_without="--optimizer-cpu-offload")
    """--optimizer-cpu-offload: fraction of the elements whose states are in host memory, in [0, 1]."""

    pin_cpu_grads: bool = flag(True, name="--no-pin-cpu-grads", no_effect_without="--optimizer-cpu-offload")
    """--optimizer-cpu-offload: pass gradients through pageable instead of pinned host memory."""

    pin_cpu_params: bool = flag(True, name="--no-pin-cpu-params", no_effect_without="--optimizer-cpu-offload")
    """--optimizer-cpu-offload: pass parameters through pageable instead of pinned host memory."""


def rules_of_activation(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(ActivationFlags)
    model, layers = config.model, own.cpu_offloading_num_layers
    if not own.cpu_offloading:
        return
    try:
        longest = model.num_layers // pipeline_layout(model, config.parallel).num_stages
        # If `layers` exceeds the average stage length, compute the exact stage lengths, which depend on the vocabulary
        # size.
        if layers > longest:
            if model.vocab_size is None:
                # This rule runs again when the tokenizer, and thus the vocabulary size, is known.
                return
            from megatron.core.pipeline_parallel.layer_split import pipeline_stages  # imports torch

            longest = max(len(stage.layers) for stage in pipeline_stages(model, config.parallel))
    except (ArithmeticError, AssertionError, ValueError):
        # Another flag rule reports invalid stages.
        return
    if not 1 <= layers <= longest:
        rule = f"must be in [1, {longest}], where {longest} is the number of layers of the longest pipeline stage"
        near = f"nearest: {min(max(layers, 1), longest)}"
        yield Problem("--cpu-offloading-num-layers", layers, rule, near)


@extension_flags("activations in host memory", may_change=True, rules=rules_of_activation)
@dataclass(frozen=True)
class ActivationFlags:
    cpu_offloading: bool = flag(
        False,
        excludes="--optimizer-post-validation: activations of forward passes that are rolled back stay offloaded",
    )
    """Offload activations to host memory until the backward pass needs them. Only activations of the first layers of
    each pipeline stage are offloaded. For GPUs, the host memory is pinned. Activations are copied while the forward
    pass computes, and fetched one layer ahead of the backward pass."""

    cpu_offloading_num_layers: int = flag(0, at_least=0, no_effect_without="--cpu-offloading")
    """--cpu-offloading: number of layers whose activations are offloaded, counted from the first layer of each pipeline
    stage. If the last layer is not offloaded, the first fetch also overlaps with computation."""

    min_offloaded_tensor_size: int = flag(1024 * 1024, above=0, no_effect_without="--cpu-offloading")
    """--cpu-offloading: tensors with fewer elements than this number are not offloaded."""


@extension_flags("weights in host memory", may_change=True, rules=f"{HERE}.weight_rules:problems")
@dataclass(frozen=True)
class HostWeightFlags:
    offload_weights: bool = flag(False)
    """Keep weights and gradients in host memory together with the optimizer states. The weights of the transformer
    layers, the embedding and the output layer are copied to the device ahead of each pass that needs them. Weight
    gradients are copied to the host after each backward pass."""

    offload_weights_folder: str | None = flag(
        None, path="local", writes="folder", no_effect_without="--offload-weights"
    )
    """--offload-weights: keep weights, gradients and optimizer states in memory-mapped files in this folder, which
    should be on a fast local disk. Use this flag if the data does not fit into host memory."""


def _layers(config: ModelParallelConfig) -> int:
    options = config.options(ActivationFlags)
    return options.cpu_offloading_num_layers if options.cpu_offloading else 0


def _with_layers(config: ModelParallelConfig, layers: int) -> ModelParallelConfig:
    options = config.options(ActivationFlags)
    fewer = min(layers, options.cpu_offloading_num_layers)
    return config.with_options(replace(options, cpu_offloading=layers > 0, cpu_offloading_num_layers=fewer))


def _fraction(optimizer: OptimizerConfig) -> float:
    options = optimizer.options(HostStateFlags)
    return options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0


def _folder(config: RunConfig) -> str | None:
    options = config.options(HostWeightFlags)
    return options.offload_weights_folder if options.offload_weights else None


UNIT_STORES.register(
    "host",
    f"{HERE}.streamed_units:HostUnitStore",
    when=lambda config: config.options(HostWeightFlags).offload_weights,
    on_disk=lambda config: config.options(HostWeightFlags).offload_weights_folder is not None,
)

CALLBACKS.register(
    "offload_weights_folder",
    f"{HERE}.mapped_files:WeightsFolder",
    when=lambda config: _folder(config) is not None,
)

HOST_MEMORY.register(
    "host",
    f"{HERE}.host_stores:HostStores",
    fraction=_fraction,
    ranges=host_ranges,
    slots=host_slots,
    layers=_layers,
    with_layers=_with_layers,
)

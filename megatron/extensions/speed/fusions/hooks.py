"""Callbacks that choose GPU kernels at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.kernels import KERNELS, LEFT_OUT
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fusions.attention.choice import choose_attention
from megatron.extensions.speed.fusions.flags import Fusions
from megatron.extensions.speed.fusions.gemm_choice import (
    choose_additions,
    choose_weight_grads,
    keep_additions_in_norms,
    place_of,
)
from megatron.extensions.speed.fusions.grouped_choice import ADD_PRODUCTS
from megatron.extensions.speed.fusions.grouped_fp8_choice import ROW_PRODUCTS, WEIGHT_GRADS, said
from megatron.extensions.speed.fusions.kernel_choice import RunShapes, choose_kernels, device_clock
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime


class KernelChoice(Callback):
    """Callback that turns off kernels that are slower than torch. If an operation has several kernels, the callback
    chooses the fastest. --no-fusions turns all kernels off."""

    def choose(self, config: RunConfig, parallel: ModelParallelConfig, runtime: Runtime) -> ModelParallelConfig:
        LEFT_OUT.clear()
        if not config.options(Fusions).fusions:
            LEFT_OUT.update(KERNELS)
            own = parallel.attention_backend in TORCH
            return parallel if own else replace(parallel, attention_backend="auto")
        if runtime.device.type == "cuda":
            clock = None if config.training.deterministic else device_clock
            choose_kernels(RunShapes.of(config, runtime.device), runtime.state.world, clock, runtime.say)
            for (outputs, inputs), choice in ADD_PRODUCTS.found.items():
                name = f"{outputs} x {inputs}"
                runtime.say(f" kernel of weight gradients of experts {name}: {choice.winner} ({choice.times})")
            for line in said(
                {"fp8 weight gradients of experts": WEIGHT_GRADS, "fp8 products of experts": ROW_PRODUCTS}
            ):
                runtime.say(f" {line}")
        return replace(parallel, attention_backend=choose_attention(config, runtime))

    def on_model(self, config: RunConfig, stages: Mapping[int, GPTModel], runtime: Runtime) -> None:
        if config.options(Fusions).fusions:
            choose_gemms(config, runtime, stages)


TORCH = "auto", "flash", "unfused"
"""Names of torch's attention kernels."""


def choose_gemms(config: RunConfig, runtime: Runtime, stages: Mapping[int, GPTModel]) -> None:
    """On GPUs, choose the kernels for fp8 weight gradients and for the residual addition. In a deterministic run, no
    choice may depend on timings. The residual addition is therefore always computed by the next norm. Collective over
    the ranks of a pipeline stage."""
    parallel = config.parallel
    if runtime.device.type != "cuda":
        return
    if config.training.deterministic:
        keep_additions_in_norms(stages.values())
        return
    tokens = config.training.micro_batch_size * config.model.seq_length // parallel.context_parallel_size
    stage, device = runtime.state.axis("stage"), runtime.device
    for residual, choice in choose_additions(stages.values(), tokens, stage, device).items():
        runtime.say(f" residual addition after {residual}: in the {place_of(choice)} ({choice.times})")
    own = parallel.options(Fp8Flags)
    if own.fp8_format is None:
        return
    found = choose_weight_grads(stages.values(), tokens, own.fp8_recipe, stage, device)
    for shape, choice in found.items():
        name = f"{shape.outputs} x {shape.inputs}"
        runtime.say(f" kernel of fp8 weight gradients {name}: {choice.winner or 'torch'} ({choice.times})")

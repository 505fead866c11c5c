"""Rules of states and activations in host memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parts import OPTIMIZERS
from megatron.core.pipeline_parallel.stages import pipeline_layout, pipeline_stages
from megatron.extensions.offload.flags import ActivationFlags, HostStateFlags
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def states(c: RunConfig, world_size: int) -> Iterator[Problem]:
    switch = "--optimizer-cpu-offload"
    if c.options(HostStateFlags).optimizer_cpu_offload and c.optimizer.whole_roles:
        name = c.optimizer.optimizer
        rule = f"updates states element by element on the host, and --optimizer {name} multiplies whole matrices"
        elementwise = [name for name in OPTIMIZERS if not OPTIMIZERS.facts(name).whole_matrices]
        yield Problem(switch, None, rule, f"remove it, or use --optimizer {' or '.join(elementwise)}")


def activations(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, flag = c.options(ActivationFlags), "--cpu-offloading-num-layers"
    layers = o.cpu_offloading_num_layers
    if not o.cpu_offloading:
        return
    try:
        longest = c.model.num_layers // pipeline_layout(c.model, c.parallel).num_stages
        if layers > longest:  # than the average; how long stages are depends on the vocabulary
            if c.model.vocab_size is None:
                return  # judged again when the tokenizer is known
            longest = max(len(stage.layers) for stage in pipeline_stages(c.model, c.parallel))
    except (ArithmeticError, AssertionError, ValueError):
        return  # another rule reports the stages
    if not 1 <= layers <= longest:
        near = f"nearest: {min(max(layers, 1), longest)}"
        yield Problem(flag, layers, f"must be in [1, {longest}], the layers of the longest pipeline stage", near)

"""Rules of states and activations in host memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parts import OPTIMIZERS
from megatron.core.pipeline_parallel.stages import pipeline_layout, pipeline_stages
from megatron.extensions.offload.flags import ActivationFlags, HostStateFlags
from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def states(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, table, switch = c.options(HostStateFlags), field_table(), "--optimizer-cpu-offload"
    if not o.optimizer_cpu_offload:
        for flag in (table[name] for name in ("optimizer_offload_fraction", "pin_cpu_grads", "pin_cpu_params")):
            value = getattr(o, flag.field)
            if value != flag.default:
                yield Problem.no_effect(flag.name, None if isinstance(value, bool) else value, switch)
        return
    if c.optimizer.whole_roles:
        name = c.optimizer.optimizer
        rule = f"updates states element by element on the host, and --optimizer {name} multiplies whole matrices"
        elementwise = [name for name in OPTIMIZERS if not OPTIMIZERS.facts(name).whole_matrices]
        yield Problem(switch, None, rule, f"remove it, or use --optimizer {' or '.join(elementwise)}")
    if c.optimizer.optimizer_post_validation:
        why = "updates on the host are not copied for a roll-back"
        yield Problem.exclusive("--optimizer-post-validation", None, switch, why)


def activations(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, flag = c.options(ActivationFlags), "--cpu-offloading-num-layers"
    layers, smallest = o.cpu_offloading_num_layers, o.min_offloaded_tensor_size
    if not o.cpu_offloading:
        if layers:
            yield Problem.no_effect(flag, layers, "--cpu-offloading")
        if smallest != ActivationFlags.min_offloaded_tensor_size:
            yield Problem.no_effect("--min-offloaded-tensor-size", smallest, "--cpu-offloading")
        return
    if c.optimizer.optimizer_post_validation:
        why = "offloaded activations of forward passes are not taken back"
        yield Problem.exclusive("--optimizer-post-validation", None, "--cpu-offloading", why)
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

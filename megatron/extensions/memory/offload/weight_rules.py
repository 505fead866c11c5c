"""Check the flags that --offload-weights requires or excludes. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.memory.offload.flags import HostStateFlags, HostWeightFlags
from megatron.training.config.problem import Problem
from megatron.training.config.rules.pipeline import unsharded_by
from megatron.training.config.run_config import RunConfig

NAME = "--offload-weights"


def problems(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags that --offload-weights requires, and the flags that conflict with it."""
    if not c.options(HostWeightFlags).offload_weights:
        return
    states = c.options(HostStateFlags)
    if not states.optimizer_cpu_offload:
        rule = "needs --optimizer-cpu-offload: weights are updated in host memory"
        yield Problem(NAME, None, rule, f"add it, or remove {NAME}")
    elif states.optimizer_offload_fraction < 1:
        fraction = f"--optimizer-offload-fraction {states.optimizer_offload_fraction}"
        rule = "needs all optimizer states in host memory, where weights are updated"
        yield Problem(NAME, None, rule, f"remove {fraction}, or {NAME}")
    if not c.optimizer.use_distributed_optimizer:
        flag, other = unsharded_by(c)
        yield Problem(NAME, None, f"cannot be combined with {flag}: the host keeps shards", other)
    yield from _ranks(c, world_size)
    yield from _others(c)


def _ranks(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that parameters are sharded as in ZeRO-3 if there are several data-parallel ranks. Each rank then keeps
    only its own weight shards in host memory."""
    if c.parallel.num_distributed_optimizer_instances > 1:
        instances = f"--num-distributed-optimizer-instances {c.parallel.num_distributed_optimizer_instances}"
        yield Problem.exclusive(NAME, None, instances, "the gradients of instances are summed on the device")
    try:
        dims = ParallelDims.from_config(c.parallel, world_size)
    except (ValueError, ZeroDivisionError):
        # Another flag rule reports invalid sizes.
        return
    ranks = max(dims.shards(False), dims.shards(True))
    if ranks > 1 and not c.ddp.shards_parameters:
        flag = "--data-parallel-sharding-strategy optim_grads_params"
        rule = f"needs {flag} with {ranks} data-parallel ranks: each rank keeps its weight shards in host memory"
        yield Problem(NAME, None, rule, f"add {flag}, or remove {NAME}")


def _others(c: RunConfig) -> Iterator[Problem]:
    """Check for other features that are incompatible with offloaded weights: CUDA graphs, the fp8 gather of weights,
    and a second version of the weights."""
    given = {field: getattr(options, field) for options in c.extension_options for field in vars(options)}
    for field, value, text, why in (
        ("cuda_graph_impl", "local", "--cuda-graph-impl local", "offloaded weights are allocated during the passes"),
        ("fp8_param_gather", True, "--fp8-param-gather", "offloaded weights are not copied in fp8"),
    ):
        if given.get(field) == value:
            yield Problem.exclusive(NAME, None, text, why)
    if c.parallel.schedule == "2bw":
        yield Problem.exclusive(NAME, None, "--pipeline-schedule 2bw", "both weight versions are kept on the device")

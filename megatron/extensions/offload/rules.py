"""Rules of states and activations in host memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parts import OPTIMIZERS
from megatron.extensions.offload.flags import HostStateFlags
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

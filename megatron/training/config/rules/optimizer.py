"""Rules of the distributed optimizer, and of updates ahead of the gradient norm (--optimizer-post-validation)."""

from __future__ import annotations

from megatron.training.config.run_config import RunConfig


def unsharded_by(c: RunConfig) -> tuple[str, str]:
    """The flag that turns the distributed optimizer off, and what to do instead."""
    if c.ddp.data_parallel_sharding_strategy == "no_shard":
        flag = "--data-parallel-sharding-strategy"
        return f"{flag} no_shard", f"use {flag} optim"
    return "--no-use-distributed-optimizer", "remove --no-use-distributed-optimizer"

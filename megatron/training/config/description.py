"""Lines that say what a configuration is: model, number formats, batch. A run prints them as it starts. No torch."""

from __future__ import annotations

from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.training.config.batch_size import BatchSizes, num_microbatches
from megatron.training.config.run_config import RunConfig


def shape_line(m: TransformerConfig) -> str:
    """Layers, width, heads, MLP."""
    heads = f"{m.num_attention_heads} heads of {m.head_dim}"
    if m.query_groups != m.num_attention_heads:
        heads += f" in {m.query_groups} groups"
    if m.value_head_dim != m.head_dim or not m.attention_facts.grouped:
        heads += f", values of {m.value_head_dim}"
    heads += m.attention_facts.described(m)
    return f"{m.num_layers} layers, hidden size {m.hidden_size}, {heads}, MLP {_width(m)} ({m.activation})"


def _width(m: TransformerConfig) -> str:
    widths = {width for width, experts in zip(m.ffn_sizes, m.expert_pattern, strict=True) if not experts}
    return f"{min(widths)} to {max(widths)}" if len(widths) > 1 else str(m.ffn_size)


def formats_of_states(config: RunConfig) -> str:
    """Number formats of parameters, gradients and optimizer states."""
    params, main, optimizer = config.parallel.params_dtype, config.parallel.main_dtype, config.optimizer
    state = optimizer.state_plan.described(optimizer, params, main)
    return f"parameters {params}, gradients {optimizer.gradients_dtype or main}, {state}"


def microbatches_of(config: RunConfig, dims: ParallelDims) -> int:
    sizes = BatchSizes.from_config(config)
    return num_microbatches(sizes.final, config.training.micro_batch_size, dims.dp)


def batch_line(config: RunConfig, dims: ParallelDims) -> str:
    """What the global batch consists of."""
    size, micro = BatchSizes.from_config(config).final, config.training.micro_batch_size
    return (
        f"{size} = micro-batch {micro} x {microbatches_of(config, dims)} micro-batches x {dims.dp} replicas; "
        f"{size * config.model.seq_length:,} tokens a step"
    )


def byte_text(size: int) -> str:
    """In the largest binary unit that keeps the number at or above 1."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size} B"

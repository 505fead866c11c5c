"""Rules of optimizers: whole matrices (Muon), formats of states (--use-precision-aware-optimizer), states in host
memory (--optimizer-cpu-offload), and updates ahead of the gradient norm (--optimizer-post-validation)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megatron.core.distributed.param_layout import SCALE_BLOCK
from megatron.core.models.gpt.parameters import is_declared, parameter_metas
from megatron.core.parts import OPTIMIZERS
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def optimizer(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, table = c.optimizer, field_table()
    elementwise = [name for name in OPTIMIZERS if not OPTIMIZERS.facts(name).whole_matrices]
    if o.muon_scalar_optimizer not in elementwise:
        rule = "updates whole matrices, which embeddings, norms and biases are not"
        yield Problem("--muon-scalar-optimizer", o.muon_scalar_optimizer, rule, f"use {' or '.join(elementwise)}")
    for name in (name for name in vars(o) if name.startswith("muon_") or name == "moe_router_skip_muon"):
        flag, value = table[name], getattr(o, name)
        if value != flag.default and o.optimizer in elementwise:
            yield Problem.no_effect(flag.name, None if isinstance(value, bool) else value, "--optimizer muon")
    if o.moe_router_skip_muon and c.model.num_experts is None:
        yield Problem.no_effect("--moe-router-skip-muon", None, "--num-experts")


def unsharded_by(c: RunConfig) -> tuple[str, str]:
    """The flag that turns the distributed optimizer off, and what to do instead."""
    if c.ddp.data_parallel_sharding_strategy == "no_shard":
        flag = "--data-parallel-sharding-strategy"
        return f"{flag} no_shard", f"use {flag} optim"
    return "--no-use-distributed-optimizer", "remove --no-use-distributed-optimizer"


def qk_clip(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, m, p, table, switch = c.optimizer, c.model, c.parallel, field_table(), "--qk-clip"
    if not o.qk_clip:
        for flag in (table["qk_clip_threshold"], table["qk_clip_alpha"]):
            if getattr(o, flag.field) != flag.default:
                yield Problem.no_effect(flag.name, getattr(o, flag.field), switch)
        return
    if p.attention_backend not in ("auto", "unfused"):
        rule = f"does not return the largest logit of each head, which {switch} needs"
        yield Problem("--attention-backend", p.attention_backend, rule, "use unfused, or remove --attention-backend")
    if m.qk_layernorm and m.attention_facts.grouped:
        why = "norms of queries and keys undo any scale of their projections, and bound logits themselves"
        yield Problem.exclusive(switch, None, "--qk-layernorm", why)
    if m.alibi:
        why = "its biases are no products of queries and keys"
        yield Problem.exclusive(switch, None, "--position-embedding-type alibi", why)
    if m.attn_logit_softcapping is not None:
        yield Problem.exclusive(switch, None, "--attn-logit-softcapping", "logits are bounded already")
    if o.use_precision_aware_optimizer:
        why = "main parameters are scaled where they lie in fp32"
        yield Problem.exclusive(switch, None, "--use-precision-aware-optimizer", why)
    if p.cuda_graph_impl == "local":
        yield Problem.exclusive(switch, None, "--cuda-graph-impl local")


def cpu_offload(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, table, switch = c.optimizer, field_table(), "--optimizer-cpu-offload"
    if not o.optimizer_cpu_offload:
        for flag in (table[name] for name in ("optimizer_offload_fraction", "pin_cpu_grads", "pin_cpu_params")):
            value = getattr(o, flag.field)
            if value != flag.default:
                yield Problem.no_effect(flag.name, None if isinstance(value, bool) else value, switch)
        return
    if o.whole_roles:
        rule = f"updates states element by element on the host, and --optimizer {o.optimizer} multiplies whole matrices"
        elementwise = [name for name in OPTIMIZERS if not OPTIMIZERS.facts(name).whole_matrices]
        yield Problem(switch, None, rule, f"remove it, or use --optimizer {' or '.join(elementwise)}")
    if o.qk_clip:
        why = "main parameters are scaled on the device, after the update"
        yield Problem.exclusive(switch, None, "--qk-clip", why)


WAIT_FOR_RANK_0 = ("gpipe", "1f1b", "interleaved", "zb-h1")
"""Schedules whose steps end on the rank that begins the next one, with or without --optimizer-post-validation."""


def post_validation(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """A step is rolled back from copies of what an update changes, and the forward passes behind it are run again."""
    o, switch = c.optimizer, "--optimizer-post-validation"
    if not o.optimizer_post_validation:
        return
    strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
    for other, given, why in (
        ("--use-precision-aware-optimizer", o.use_precision_aware_optimizer, "states are copied in the main dtype"),
        ("--optimizer-cpu-offload", o.optimizer_cpu_offload, "updates on the host are not copied for a roll-back"),
        ("--qk-clip", o.qk_clip, "the largest logits of the step are gone when it is made again"),
        (strategy, c.ddp.shards_gradients, "gradients of units are not kept until the norm is known"),
        ("--fp8-param-gather", c.ddp.fp8_param_gather, "a roll-back gathers parameters in their own format"),
        ("--cpu-offloading", c.parallel.cpu_offloading, "offloaded activations of forward passes are not taken back"),
    ):
        if given:
            yield Problem.exclusive(switch, None, other, why)
    schedule = c.parallel.schedule
    if schedule in WAIT_FOR_RANK_0:
        rule = (
            f"saves no time with --pipeline-schedule {schedule}, whose steps end on the rank that begins the next one, "
            "and keeps copies of states"
        )
        yield Problem(switch, None, rule, f"use zb-h2 or zb-v, or remove {switch}", harmless=True)
        return
    try:
        tied = tied_stages(c.model, pipeline_layout(c.model, c.parallel))
    except (ArithmeticError, ValueError):
        return  # sizes that do not fit: other rules say which
    if tied:
        rule = "saves no time: the embedding on the first and on the last rank sums up its gradients over both"
        remedy = "use --pipeline-schedule zb-v, which has both on one rank"
        if not c.model.mtp_depths:
            remedy += ", or --untie-embeddings-and-output-weights"
        yield Problem(switch, None, rule, remedy, harmless=True)


FORMATS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Fields of --use-precision-aware-optimizer."""


def precision_aware(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, p, table, switch = c.optimizer, c.parallel, field_table(), "--use-precision-aware-optimizer"
    if not o.use_precision_aware_optimizer:
        for flag in (table[name] for name in FORMATS if getattr(o, name) != "fp32"):
            yield Problem(flag.name, getattr(o, flag.field), f"needs {switch}", f"add {switch}, or remove {flag.name}")
        if not o.store_param_remainders:
            yield Problem.no_effect("--no-store-param-remainders", None, switch)
        return
    if o.optimizer != "adam":
        yield Problem(switch, None, f"stores Adam's states, and --optimizer is {o.optimizer}", "use --optimizer adam")
    if not o.use_distributed_optimizer:
        off, remedy = unsharded_by(c)
        rule = f"cannot be combined with {off}: only the distributed optimizer stores states in these formats"
        yield Problem(switch, None, rule, f"remove {switch}, or {remedy}")
    wide = next((f"--{name}" for name in ("fp64", "fp32") if getattr(p, name)), "fp32, the default")
    if o.main_params_dtype == "fp16" and not (p.bf16 or p.fp16):
        rule = f"is the format of a copy of the parameters, and in {wide} they are the main parameters themselves"
        yield Problem("--main-params-dtype", "fp16", rule, "add --bf16, or remove --main-params-dtype")
    if o.main_grads_dtype == "bf16":
        if p.fp64:
            rule = "cannot be combined with --fp64: sums that are rounded depend on the micro-batches of each rank"
            yield Problem("--main-grads-dtype", "bf16", rule, "keep one of them")
        if c.ddp.shards_gradients:
            why = "a shard of gradients sums up the micro-batches of all ranks, and does so in fp32"
            strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
            yield Problem.exclusive("--main-grads-dtype", "bf16", strategy, why)
        if p.cuda_graph_impl == "local":
            why = "recorded steps sum gradients in fp32"
            yield Problem.exclusive("--main-grads-dtype", "bf16", "--cuda-graph-impl local", why)
    yield from _blocks_cut(c, world_size)


def _blocks_cut(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """fp8 has scales of blocks, and one result at all layouts only if no layout cuts a block: tensor parallelism must
    leave runs of whole blocks of each parameter."""
    o, m, p = c.optimizer, c.model, c.parallel
    flags = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(o, name) == "fp8"]
    sizes = {"tp": p.tensor_model_parallel_size, "expt_tp": p.expert_tensor_parallel_size or 1, "ep": 1}
    if not flags or not m.vocab_size or max(sizes.values()) == 1:
        return
    try:
        metas = parameter_metas(m) if is_declared(m) else []
    except (ArithmeticError, AssertionError, ValueError):
        return  # sizes that do not fit: other rules say which
    for meta in metas:
        for axis, dim in meta.sharded.items():
            run = meta.global_shape[dim] * prod(meta.global_shape[dim + 1 :])
            if sizes.get(axis, 1) > 1 and run % (sizes[axis] * SCALE_BLOCK):
                rule = (
                    f"scales blocks of {SCALE_BLOCK} elements, of which tensor parallelism over {sizes[axis]} ranks "
                    f"cuts those of {meta.name} {list(meta.global_shape)} along dimension {dim}"
                )
                flag = field_table()[flags[0]].name
                yield Problem(flag, "fp8", rule, "use bf16, or a smaller --tensor-model-parallel-size")
                return

"""The rules of a configuration: each a generator of problems, over a resolved `RunConfig` and a world size.

A rule must not raise on any values, as all of them run whatever is wrong; one that needs positive numbers asks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from megatron.core.config import ModelParallelConfig
from megatron.training.config import RunConfig
from megatron.training.context_rules import heads_over_context, sequence
from megatron.training.flags import Flag, all_flags
from megatron.training.graph_rules import graphs
from megatron.training.length_rules import batch, length, schedule
from megatron.training.moe_rules import experts
from megatron.training.pipeline_rules import overlap, pipeline, recomputation
from megatron.training.precision_rules import fp8, fp8_scaling, fp8_shapes, precision
from megatron.training.problem import Problem, divides, multiples

Rule = Callable[[RunConfig, int], Iterator[Problem]]

REQUIRED = {
    "num_layers": "say how many layers the model has",
    "hidden_size": "say how wide the model is",
    "num_attention_heads": "say how many heads attention has",
    "seq_length": "say how many tokens a sample has",
}

MAY_BE_ZERO = {
    "clip_grad",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "end_weight_decay",
    "eval_iters",
    "exit_margin_in_mins",
    "init_method_std",
    "num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16",
    "num_workers",
    "start_weight_decay",
    "weight_decay",
}
"""Numbers that may be 0 beside those that are 0 by default. All others must be above 0, unless they have a range."""

RANGES: dict[str, tuple[float, float, str]] = {
    "attention_dropout": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "hidden_dropout": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "adam_beta1": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "adam_beta2": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "sgd_momentum": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "fp8_margin": (0, 16, "in [0, 16], as e4m3 has 18 powers of two"),
    "rotary_percent": (math.nextafter(0.0, 1.0), 1.0, "in (0, 1]"),
    "lr_warmup_fraction": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "seed": (0, 2**32 - 1, "in [0, 2^32 - 1]"),
    "spiky_loss_factor": (math.nextafter(1.0, 2.0), math.inf, "above 1"),
    "large_grads_factor": (math.nextafter(1.0, 2.0), math.inf, "above 1"),
}


def single_values(config: RunConfig) -> Iterator[Problem]:
    """What is wrong with a value whatever the others are."""
    for flag in all_flags():
        value = getattr(getattr(config, flag.section), flag.field)
        if flag.field in REQUIRED and value == 0:
            yield Problem(flag.name, None, "is required, and must be at least 1", REQUIRED[flag.field])
        elif flag.kind in (int, float) and value is not None:
            values = value if flag.spec.many else (value,)
            broken = next(filter(None, (_number_rule(flag, number) for number in values)), None)
            if broken:
                yield Problem(flag.name, value, *broken)
    if config.optimizer.lr is None:
        yield Problem("--lr", None, "is required", "give the peak learning rate, for example --lr 3e-4")


def _number_rule(flag: Flag, value: float) -> tuple[str, str] | None:
    """(rule, remedy) of a number that is out of bounds."""
    default = f"the default is {flag.default}" if flag.default not in (None, 0) else "leave it out for the default"
    if not math.isfinite(value):
        return "must be finite", default
    if flag.field in RANGES:
        low, high, text = RANGES[flag.field]
        return None if low <= value <= high else (f"must be {text}", default)
    if flag.field in MAY_BE_ZERO or (flag.default == 0 and flag.field not in REQUIRED):
        return None if value >= 0 else ("must not be negative", default)
    return None if value > 0 else ("must be above 0", default)


def world(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p = c.parallel
    sizes = (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size)
    if min(sizes) < 1:
        return
    model, shown = math.prod(sizes), "TP {} * PP {} * CP {}".format(*sizes)
    if world_size % model:
        launch = f"start {round(world_size / model) * model or model} ranks (torchrun --nproc-per-node, or srun)"
        remedy = f"{launch}, or make the model-parallel sizes smaller"
        yield Problem("world size", world_size, f"must be a multiple of {shown} = {model}", remedy)
        return
    replicas = world_size // model
    if p.data_parallel_size is not None and p.data_parallel_size != replicas:
        yield Problem(
            "--data-parallel-size",
            p.data_parallel_size,
            f"must be world size {world_size} / ({shown}) = {replicas}",
            f"leave it out, or start {p.data_parallel_size * model} ranks",
        )


def tensor_parallel(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m, tp = c.model, c.parallel.tensor_model_parallel_size
    rule = f"must be a multiple of --tensor-model-parallel-size {tp}"
    if not divides(tp, m.num_attention_heads):
        yield Problem("--num-attention-heads", m.num_attention_heads, rule, multiples(m.num_attention_heads, tp))
    if not divides(tp, m.hidden_size):
        step = math.lcm(tp, m.num_attention_heads) if m.num_attention_heads > 0 and not m.kv_channels else tp
        yield Problem("--hidden-size", m.hidden_size, rule, multiples(m.hidden_size, step))
    if m.group_query_attention and not divides(tp, m.num_query_groups):
        remedy = f"{multiples(m.num_query_groups or 1, tp)}, or a TP size that divides it"
        yield Problem("--num-query-groups", m.num_query_groups, rule, remedy)
    if m.hidden_size > 0 and not divides(tp, m.ffn_size):
        yield Problem("--ffn-hidden-size", m.ffn_size, rule, multiples(m.ffn_size, tp))
    yield from _vocabulary(c, tp)
    if c.parallel.sequence_parallel and tp == 1:
        remedy = "leave it out, or raise --tensor-model-parallel-size"
        yield Problem("--sequence-parallel", None, "needs --tensor-model-parallel-size above 1", remedy)
    yield from _tensor_overlap(c.parallel)


def _tensor_overlap(p: ModelParallelConfig) -> Iterator[Problem]:
    method = p.tp_comm_overlap_method
    if p.tp_comm_overlap and not p.sequence_parallel:
        remedy = "add --sequence-parallel, which sends as many bytes, or leave it out"
        yield Problem("--tp-comm-overlap", None, "cuts along the sequence: needs --sequence-parallel", remedy)
    if method is not None and not p.tp_comm_overlap:
        remedy = "add that, or leave this out"
        yield Problem("--tp-comm-overlap-method", method, "counts only with --tp-comm-overlap", remedy)
    if method == "symmetric" and (p.cpu or p.distributed_backend == "gloo"):
        rule = "is memory that GPUs share under nccl, and --cpu or gloo is given"
        yield Problem("--tp-comm-overlap-method", method, rule, "use ring, on any device")


def _vocabulary(c: RunConfig, tp: int) -> Iterator[Problem]:
    """The padded vocabulary is cut over TP. Where it is not known yet, its divisor must do."""
    divisor, vocabulary = c.model.make_vocab_size_divisible_by, c.model.vocab_size
    if divisor < 1 or tp < 1 or (vocabulary is not None and vocabulary < 1):
        return
    padded = c.model.padded_vocab_size if vocabulary else divisor
    if padded % tp:
        shown = f"the vocabulary of {vocabulary} padded to {padded}" if vocabulary else "the padded vocabulary"
        rule = f"{shown} must be a multiple of --tensor-model-parallel-size {tp}"
        yield Problem("--make-vocab-size-divisible-by", divisor, rule, f"nearest: {math.lcm(divisor, tp)}")


def attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    heads, groups = m.num_attention_heads, m.num_query_groups
    if m.kv_channels is None and not divides(heads, m.hidden_size):
        tp = c.parallel.tensor_model_parallel_size
        remedy = f"{multiples(m.hidden_size, math.lcm(heads, max(tp, 1)))}, or give --kv-channels"
        yield Problem("--hidden-size", m.hidden_size, f"must be a multiple of --num-attention-heads {heads}", remedy)
    if m.group_query_attention and groups is None:
        remedy = f"give --num-query-groups, a divisor of --num-attention-heads {heads}"
        yield Problem("--group-query-attention", None, "needs --num-query-groups", remedy)
    if m.group_query_attention and not divides(groups, heads):
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        near = sorted(sorted(legal, key=lambda n: abs(n - (groups or 0)))[:2])
        rule = f"must divide --num-attention-heads {heads}"
        yield Problem("--num-query-groups", groups, rule, f"nearest: {' or '.join(map(str, near))}")
    if not m.group_query_attention and groups not in (None, heads):
        remedy = "add --group-query-attention, or leave it out"
        yield Problem("--num-query-groups", groups, "counts only with --group-query-attention", remedy)
    if m.swiglu and m.squared_relu:
        yield Problem("--swiglu", None, "and --squared-relu exclude each other", "keep one of them")


def positions(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    longest = m.max_position_embeddings
    if longest is not None and 0 < longest < m.seq_length:
        rule = f"must be at least --seq-length {m.seq_length}"
        yield Problem("--max-position-embeddings", longest, rule, f"nearest: {m.seq_length}")
    if m.position_embedding_type == "rope":
        if m.kv_channels and m.kv_channels > 0 and 0 < m.rotary_percent <= 1:
            rotated = int(m.kv_channels * m.rotary_percent)
            if rotated < 2 or rotated % 2:
                rule = f"a head of {m.kv_channels} rotates {rotated} channels, which must be an even number above 0"
                near = max(2, rotated // 2 * 2)
                shown = f"--kv-channels {m.kv_channels + 1}, or " if m.rotary_percent == 1 else ""
                yield Problem("--rotary-percent", m.rotary_percent, rule, f"nearest: {shown}{near / m.kv_channels:g}")
        low, high = m.rope_scaling_low_freq_factor, m.rope_scaling_high_freq_factor
        if m.use_rope_scaling and low >= high:
            rule = f"must be below --rope-scaling-high-freq-factor {high}"
            yield Problem("--rope-scaling-low-freq-factor", low, rule, "Llama 3.1 has 1 and 4")
    elif m.use_rope_scaling:
        remedy = "add --position-embedding-type rope, or leave it out"
        yield Problem("--use-rope-scaling", None, "scales rotary embeddings, which this model has not", remedy)


def data(c: RunConfig, world_size: int) -> Iterator[Problem]:
    d = c.data
    names = ("--train-data-path", "--valid-data-path", "--test-data-path")
    own = [n for n, v in zip(names, (d.train_data_path, d.valid_data_path, d.test_data_path), strict=True) if v]
    kinds = [
        n for n, given in (("--data-path", d.data_path), (", ".join(own), own), ("--mock-data", d.mock_data)) if given
    ]
    if not kinds:
        yield Problem("--data-path", None, "no data is named", "give --data-path, --train-data-path or --mock-data")
    if len(kinds) > 1:
        yield Problem(kinds[0], None, f"and {' and '.join(kinds[1:])} exclude each other", "keep one kind")
    if own and not d.train_data_path:
        yield Problem("--train-data-path", None, f"is required beside {own[0]}", "name the training data")
    yield from _blends(c)


def _blends(c: RunConfig) -> Iterator[Problem]:
    # Reading these flags needs numpy, which help and parsing do without.
    from megatron.core.datasets.build import parse_blend
    from megatron.core.datasets.indices import parse_split

    d = c.data
    for flag, values in (
        ("--data-path", d.data_path),
        ("--train-data-path", d.train_data_path),
        ("--valid-data-path", d.valid_data_path),
        ("--test-data-path", d.test_data_path),
    ):
        if values:
            try:
                parse_blend(flag, values)
            except ValueError as error:
                yield Problem.of_message(flag, values, str(error))
    if d.data_path:
        try:
            shares = parse_split(d.split)
        except ValueError as error:
            yield Problem.of_message("--split", d.split, str(error))
        else:
            if shares[0] <= 0:
                yield Problem("--split", d.split, "leaves nothing to train on", "give training a share, as 969,30,1")


def tokenizer(c: RunConfig, world_size: int) -> Iterator[Problem]:
    from megatron.core.tokenizers.build import NEEDED_FILES

    t = c.tokenizer
    if t.tokenizer_type is None:
        if c.model.vocab_size is None:
            remedy = "give --tokenizer-type, or --vocab-size for data that is tokenized already"
            yield Problem("--tokenizer-type", None, "the size of the vocabulary is not known", remedy)
        for field in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(c.data, field):
                name = f"--{field.replace('_', '-')}"
                rule = "needs the end-of-document token, which only the tokenizer knows"
                yield Problem(name, None, rule, "give --tokenizer-type")
        return
    for field in NEEDED_FILES.get(t.tokenizer_type, ()):
        if not getattr(t, field):
            name = f"--{field.replace('_', '-')}"
            yield Problem(name, None, f"is required by --tokenizer-type {t.tokenizer_type}", "name the file")
    if t.tokenizer_type == "NullTokenizer" and c.model.vocab_size is None:
        remedy = "say how many token ids the data has"
        yield Problem("--vocab-size", None, "is required by --tokenizer-type NullTokenizer", remedy)


def checkpoints(c: RunConfig, world_size: int) -> Iterator[Problem]:
    if c.checkpoint.load is None:
        for field in ("finetune", "exit_on_missing_checkpoint", "override_data_fingerprint"):
            if getattr(c.checkpoint, field):
                name = f"--{field.replace('_', '-')}"
                yield Problem(name, None, "needs a checkpoint to load", "give --load")
    if c.checkpoint.save is None:
        for field in ("keep_last", "keep_every", "save_retain_best", "fatal_save_errors"):
            if value := getattr(c.checkpoint, field):
                name = f"--{field.replace('_', '-')}"
                shown = None if value is True else value
                yield Problem(name, shown, "is about checkpoints, and none are saved", "give --save")
    metric, interval = c.checkpoint.save_retain_best, c.checkpoint.save_interval
    name = "--eval-interval" if metric == "valid_loss" else "--log-interval"
    measured = c.training.eval_interval if metric == "valid_loss" else c.logging.log_interval
    if metric and interval and measured > 0 and interval % measured:
        rule = f"{metric} is measured every {name} {measured}, and --save-interval {interval} is no multiple of it"
        yield Problem("--save-retain-best", metric, rule, f"give {name} {interval}")
    if metric == "valid_loss" and c.training.eval_iters == 0:
        yield Problem("--save-retain-best", metric, "needs evaluation, and --eval-iters is 0", "raise --eval-iters")


def skipping(c: RunConfig, world_size: int) -> Iterator[Problem]:
    k = c.checks
    checked = (k.check_for_nan_in_loss_and_grad, k.check_for_spiky_loss, k.check_for_large_grads)
    if k.max_skipped_iterations > 0 and not any(checked):
        rule = "limits what the checks skip, and all of them are off"
        remedy = "leave out --no-check-for-nan-in-loss-and-grad, or add --check-for-spiky-loss"
        yield Problem("--max-skipped-iterations", k.max_skipped_iterations, rule, remedy)


def garbage(c: RunConfig, world_size: int) -> Iterator[Problem]:
    t = c.training
    if t.manual_gc:
        return
    for name, value, given in (
        ("--manual-gc-interval", t.manual_gc_interval, t.manual_gc_interval != 0),
        ("--no-manual-gc-eval", None, not t.manual_gc_eval),
    ):
        if given:
            yield Problem(name, value, "counts only with --manual-gc", "add --manual-gc, or leave it out")


RULES: tuple[Rule, ...] = (
    world,
    attention,
    tensor_parallel,
    sequence,
    heads_over_context,
    positions,
    experts,
    pipeline,
    recomputation,
    overlap,
    precision,
    fp8,
    fp8_scaling,
    fp8_shapes,
    batch,
    length,
    schedule,
    data,
    tokenizer,
    checkpoints,
    skipping,
    garbage,
    graphs,
)

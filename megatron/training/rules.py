"""The rules of a configuration: each a generator of problems, over a resolved `RunConfig` and a world size.

A rule must not raise on any values, as all of them run whatever is wrong; one that needs positive numbers asks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from megatron.training.config import RunConfig
from megatron.training.flags import Flag, all_flags
from megatron.training.problem import Problem

Rule = Callable[[RunConfig, int], Iterator[Problem]]

REQUIRED = {
    "num_layers": "say how many layers the model has",
    "hidden_size": "say how wide the model is",
    "num_attention_heads": "say how many heads attention has",
    "seq_length": "say how many tokens a sample has",
}

NOT_NEGATIVE = {
    "min_lr",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_init",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "clip_grad",
    "num_workers",
    "eval_iters",
    "init_method_std",
    "seed",
}
"""Numbers that may be 0. All others must be above 0, unless they have a range."""

RANGES: dict[str, tuple[float, float, str]] = {
    "attention_dropout": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "hidden_dropout": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "adam_beta1": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "adam_beta2": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "sgd_momentum": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "rotary_percent": (math.nextafter(0.0, 1.0), 1.0, "in (0, 1]"),
    "lr_warmup_fraction": (0.0, math.nextafter(1.0, 0.0), "in [0, 1)"),
    "seed": (0, 2**32 - 1, "in [0, 2^32 - 1]"),
}

ONE_FOR_NOW = {
    "context_parallel_size": "context parallelism",
    "expert_model_parallel_size": "expert parallelism",
    "expert_tensor_parallel_size": "expert parallelism",
}
"""Sizes of what is not built: only 1 is legal."""


def single_values(config: RunConfig) -> Iterator[Problem]:
    """What is wrong with a value whatever the others are."""
    for flag in all_flags():
        value = getattr(getattr(config, flag.section), flag.field)
        if flag.field in REQUIRED and value == 0:
            yield Problem(flag.name, None, "is required", REQUIRED[flag.field])
        elif flag.field in ONE_FOR_NOW and value not in (None, 1):
            feature = ONE_FOR_NOW[flag.field]
            yield Problem(flag.name, value, f"asks for {feature}, which is not built", "leave it out or use 1")
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
    if flag.field in NOT_NEGATIVE:
        return None if value >= 0 else ("must not be negative", default)
    return None if value > 0 else ("must be above 0", default)


def multiples(value: int, divisor: int) -> str:
    """The nearest legal values: `nearest: 996 or 1008`."""
    below = value // divisor * divisor
    return f"nearest: {below} or {below + divisor}" if below > 0 else f"nearest: {divisor}"


def divides(divisor: int | None, value: int | None) -> bool:
    """Whether `divisor` divides `value`; True where either is missing or not positive, which another rule reports."""
    return not divisor or not value or divisor < 0 or value < 0 or value % divisor == 0


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
    if c.parallel.sequence_parallel:
        if tp == 1:
            remedy = "leave it out, or raise --tensor-model-parallel-size"
            yield Problem("--sequence-parallel", None, "needs --tensor-model-parallel-size above 1", remedy)
        if not divides(tp, m.seq_length):
            sp_rule = f"{rule} under --sequence-parallel"
            yield Problem("--seq-length", m.seq_length, sp_rule, multiples(m.seq_length, tp))


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


def pipeline(c: RunConfig, world_size: int) -> Iterator[Problem]:
    pp, layers = c.parallel.pipeline_model_parallel_size, c.model.num_layers
    if layers > 0 and pp > layers + 2:
        rule = f"{layers} layers, the embedding and the head fill at most {layers + 2} stages"
        yield Problem("--pipeline-model-parallel-size", pp, rule, f"nearest: {layers + 2}")


def recomputation(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m = c.model
    if m.recompute_granularity == "full":
        return
    for flag, value in (
        ("--recompute-method", m.recompute_method),
        ("--recompute-num-layers", m.recompute_num_layers),
    ):
        if value is not None:
            rule = "counts only with --recompute-granularity full"
            yield Problem(flag, value, rule, "add that, or leave this out")


def precision(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p, o = c.parallel, c.optimizer
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp32", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield Problem(chosen[0], None, f"and {', '.join(chosen[1:])} exclude each other", "keep one of them")
    if o.loss_scale is not None and not p.fp16:
        yield Problem("--loss-scale", o.loss_scale, "counts only with --fp16", "add --fp16, or leave it out")
    if o.min_loss_scale > o.initial_loss_scale:
        rule = f"must be at most --initial-loss-scale {o.initial_loss_scale:g}"
        yield Problem("--min-loss-scale", o.min_loss_scale, rule, f"nearest: {o.initial_loss_scale:g}")
    if p.cpu and p.distributed_backend == "nccl":
        remedy = "use gloo, or leave out --cpu"
        yield Problem("--distributed-backend", "nccl", "runs on GPUs only, and --cpu is given", remedy)


def batch(c: RunConfig, world_size: int) -> Iterator[Problem]:
    t = c.training
    model = c.parallel.model_parallel_size
    if t.micro_batch_size < 1 or model < 1 or world_size % model:
        return
    dp = world_size // model
    step = t.micro_batch_size * dp
    shown = f"--micro-batch-size {t.micro_batch_size} * data-parallel size {dp} = {step}"
    if not divides(step, t.global_batch_size):
        remedy = multiples(t.global_batch_size or step, step)
        yield Problem("--global-batch-size", t.global_batch_size, f"must be a multiple of {shown}", remedy)
    elif t.num_microbatches and t.global_batch_size and t.num_microbatches * step != t.global_batch_size:
        rule = f"must be --global-batch-size {t.global_batch_size} / ({shown})"
        remedy = f"leave it out, or use {t.global_batch_size // step}"
        yield Problem("--num-microbatches", t.num_microbatches, rule, remedy)
    if t.rampup_batch_size is not None:
        yield from _rampup(c, step, shown)


def _rampup(c: RunConfig, step: int, shown: str) -> Iterator[Problem]:
    values, final = c.training.rampup_batch_size or (), c.training.global_batch_size or 0
    name = "--rampup-batch-size"
    if len(values) != 3:
        yield Problem(name, values, "takes three numbers", "give START INCREMENT SAMPLES")
        return
    start, increment, _ = values
    if min(values) < 1 or final < 1:
        return
    if c.training.train_iters is not None:
        remedy = "use --train-samples or --train-tokens instead"
        yield Problem(name, values, "cannot go with --train-iters, as iterations differ in samples", remedy)
    if start % step:
        yield Problem(name, values, f"START {start} must be a multiple of {shown}", multiples(start, step))
    if increment % step:
        yield Problem(name, values, f"INCREMENT {increment} must be a multiple of {shown}", multiples(increment, step))
    if start > final:
        rule = f"START {start} must be at most --global-batch-size {final}"
        yield Problem(name, values, rule, f"nearest: {final}")
    elif (final - start) % increment:
        rule = f"--global-batch-size {final} - START {start} must be a multiple of INCREMENT {increment}"
        near = start + (final - start) // increment * increment
        yield Problem(name, values, rule, f"nearest: --global-batch-size {near} or {near + increment}")


def length_of_run(c: RunConfig) -> int | None:
    """Samples that a run given in samples or tokens takes; None where it is given in iterations or not at all."""
    t = c.training
    if t.train_tokens is not None and c.model.seq_length > 0:
        return t.train_tokens // c.model.seq_length
    return t.train_samples


def length(c: RunConfig, world_size: int) -> Iterator[Problem]:
    t = c.training
    given = {"--train-iters": t.train_iters, "--train-samples": t.train_samples, "--train-tokens": t.train_tokens}
    if t.train_tokens is not None and t.train_samples == length_of_run(c):
        del given["--train-samples"]  # derived
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        yield Problem(names[0], given[names[0]], f"and {', '.join(names[1:])} exclude each other", "keep one of them")
    if not names and c.data.mock_data:
        remedy = "give --train-iters, --train-samples or --train-tokens"
        yield Problem("--mock-data", None, "made-up data has no epoch to end after", remedy)
    samples, size = length_of_run(c), t.global_batch_size
    if t.rampup_batch_size and len(t.rampup_batch_size) == 3:
        size = t.rampup_batch_size[0]
    if names and samples is not None and size and 0 <= samples < size:
        unit = c.model.seq_length if names[0] == "--train-tokens" else 1
        rule = f"is less than one step of {size} samples"
        yield Problem(names[0], given[names[0]], rule, f"nearest: {size * unit}")


def schedule(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, t = c.optimizer, c.training
    by_samples = t.train_samples is not None or t.train_tokens is not None
    by_iters = t.train_iters is not None
    wrong, right = ("iters", "samples") if by_samples else ("samples", "iters")
    if by_samples or by_iters:
        for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            value = getattr(o, f"{stem}_{wrong}")
            if value:
                name = f"--{stem.replace('_', '-')}"
                rule = f"the length of this run is given in {'samples or tokens' if by_samples else 'iterations'}"
                yield Problem(f"{name}-{wrong}", value, rule, f"use {name}-{right}")
    warmups = [n for n in ("lr_warmup_iters", "lr_warmup_samples") if getattr(o, n)]
    if o.lr_warmup_fraction is not None and warmups:
        name = f"--{warmups[0].replace('_', '-')}"
        yield Problem(
            "--lr-warmup-fraction", o.lr_warmup_fraction, f"and {name} exclude each other", "keep one of them"
        )
    if o.lr is not None and o.lr > 0:
        for flag, value in (("--min-lr", o.min_lr), ("--lr-warmup-init", o.lr_warmup_init)):
            if value > o.lr:
                yield Problem(flag, value, f"must be at most --lr {o.lr:g}", f"nearest: {o.lr:g}")
    yield from _decay_length(c, right, by_samples or by_iters)
    yield from _weight_decay(c)


def _decay_length(c: RunConfig, unit: str, known: bool) -> Iterator[Problem]:
    o = c.optimizer
    whole = length_of_run(c) if unit == "samples" else c.training.train_iters
    decay = getattr(o, f"lr_decay_{unit}") or whole
    warmup, anneal = getattr(o, f"lr_warmup_{unit}"), getattr(o, f"lr_wsd_decay_{unit}")
    if known and decay and warmup >= decay > 0:
        rule = f"must be below the length of the decay, {decay}"
        yield Problem(f"--lr-warmup-{unit}", warmup, rule, f"nearest: {decay - 1}, or raise --lr-decay-{unit}")
    given = o.lr_wsd_decay_iters or o.lr_wsd_decay_samples
    if o.lr_decay_style == "WSD":
        if not given:
            remedy = f"give --lr-wsd-decay-{unit}"
            yield Problem("--lr-decay-style", "WSD", "needs the length of its final anneal", remedy)
        elif known and decay and anneal and anneal > decay:
            rule = f"must be at most the length of the decay, {decay}"
            yield Problem(f"--lr-wsd-decay-{unit}", anneal, rule, f"nearest: {decay}")
    elif given:
        name = "--lr-wsd-decay-iters" if o.lr_wsd_decay_iters else "--lr-wsd-decay-samples"
        yield Problem(name, given, "counts only with --lr-decay-style WSD", "add that, or leave this out")


def _weight_decay(c: RunConfig) -> Iterator[Problem]:
    o = c.optimizer
    start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
    end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
    if o.weight_decay_incr_style == "constant" and start != end:
        rule = f"keeps weight decay as it is, but it starts at {start:g} and ends at {end:g}"
        yield Problem("--weight-decay-incr-style", "constant", rule, "use linear or cosine, or equal values")


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


NEEDS = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": (),
    "ByteTokenizer": (),
}
"""Files that each kind of tokenizer is made from."""


def tokenizer(c: RunConfig, world_size: int) -> Iterator[Problem]:
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
    for field in NEEDS.get(t.tokenizer_type, ()):
        if not getattr(t, field):
            name = f"--{field.replace('_', '-')}"
            yield Problem(name, None, f"is required by --tokenizer-type {t.tokenizer_type}", "name the file")
    if t.tokenizer_type == "NullTokenizer" and c.model.vocab_size is None:
        remedy = "say how many token ids the data has"
        yield Problem("--vocab-size", None, "is required by --tokenizer-type NullTokenizer", remedy)


def checkpoints(c: RunConfig, world_size: int) -> Iterator[Problem]:
    if c.checkpoint.load is None:
        for field in ("finetune", "exit_on_missing_checkpoint"):
            if getattr(c.checkpoint, field):
                name = f"--{field.replace('_', '-')}"
                yield Problem(name, None, "needs a checkpoint to load", "give --load")


RULES: tuple[Rule, ...] = (
    world,
    attention,
    tensor_parallel,
    positions,
    pipeline,
    recomputation,
    precision,
    batch,
    length,
    schedule,
    data,
    tokenizer,
    checkpoints,
)

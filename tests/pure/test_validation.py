"""Every rule of a configuration: what breaks it, and what is said about it."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.core.parallel_dims import ParallelDims
from megatron.core.parts import LINEAR_ATTENTIONS
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import Flag, all_flags
from megatron.training.config.validation import notices, resolve, validate

GOOD = {
    "num-layers": "4",
    "hidden-size": "48",
    "num-attention-heads": "12",
    "seq-length": "16",
    "lr": "1e-3",
    "mock-data": "",
    "train-iters": "100",
}


def argv(flags: str, without: str = "") -> list[str]:
    """GOOD without some of its flags, and with `flags`."""
    words = []
    for name, value in GOOD.items():
        if name not in without.split():
            words += [f"--{name}", *value.split()]
    return words + flags.split()


def problems(flags: str, world_size: int = 1, without: str = "") -> list[str]:
    config = parse_args(argv(flags, without))
    found = [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]
    assert validate(config, world_size) == validate(resolve(config, world_size), world_size)
    return found


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("--tp 2 --sequence-parallel", 2),
        ("--tp 4 --pp 2", 16),
        ("--pp 3", 3),
        ("--pp 4 --num-layers 2", 4),
        ("--dp 4 --global-batch-size 8 --num-microbatches 2", 4),
        ("--num-microbatches 3", 2),
        ("--group-query-attention --num-query-groups 4 --tp 4", 4),
        ("--num-query-groups 12", 1),
        ("--hidden-size 50 --kv-channels 8", 1),
        ("--position-embedding-type rope --kv-channels 5 --rotary-percent 0.8", 1),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 10", 1),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 0", 1),
        ("--exit-interval 0 --exit-duration-in-mins 0 --save-interval 0 --skip-train", 1),
        ("--global-batch-size 10 --decrease-batch-size-if-needed", 4),
        ("--lr-warmup-iters 10 --lr-decay-iters 50 --min-lr 1e-4", 1),
        ("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1", 1),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 1),
        ("--fp64 --clip-grad 0 --attention-dropout 0 --eval-iters 0 --num-workers 0", 1),
        ("--use-distributed-optimizer --bf16 --distributed-backend gloo --cpu", 2),
        ("--ep 1 --cp 1 --etp 1", 1),
        ("--cp 4 --tp 2 --sequence-parallel --cp-comm-type all_gather", 8),
        ("--cp 2 --tp 2 --cp-comm-type a2a", 4),
    ],
)
def test_legal(flags: str, world_size: int) -> None:
    assert problems(flags, world_size) == []


def test_one_expert_is_a_dense_mlp() -> None:
    flags = "--num-experts 1 --moe-router-topk 2 --ep 4 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --tp 2"
    config = parse_args(argv(flags))
    resolved = resolve(config, 4)
    assert resolved.model.num_experts is None and resolved.parallel.expert_model_parallel_size == 1
    assert validate(config, 4) == [] and "a dense MLP" in " ".join(map(str, notices(config, 4)))
    for own in (
        "moe-router-score-function sigmoid",
        "moe-shared-expert-intermediate-size 8",
        "moe-eval-capacity-factor 0.5",
    ):
        config = parse_args(argv(f"--num-experts 1 --{own}"))
        assert resolve(config, 1).model.num_experts == 1


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        # one value
        ("--num-layers 0", 1, "--num-layers 0: must be at least 1; give --num-layers N"),
        ("--num-layers -1", 1, "--num-layers -1: must be at least 1"),
        ("--micro-batch-size 0", 1, "--micro-batch-size 0: must be above 0; the default is 1"),
        ("--adam-beta2 1", 1, "--adam-beta2 1.0: must be in [0, 1); the default is 0.999"),
        ("--hidden-dropout 1.0", 1, "--hidden-dropout 1.0: must be in [0, 1)"),
        ("--rotary-percent 0", 1, "--rotary-percent 0.0: must be in (0, 1]"),
        # heads of their own in layers with windows
        ("--window-rotary-percent 0.5 --window-size 4", 1, "has no effect without --position-embedding-type rope"),
        (
            "--window-rotary-percent 0.2 --window-size 4 --position-embedding-type rope",
            1,
            "--window-rotary-percent 0.2: rotates 0 of the 4 channels of a head; it must be an even number above 0",
        ),
        (
            "--window-num-query-groups 5 --window-size 4",
            1,
            "--window-num-query-groups 5: must divide --num-attention-heads 12; nearest: 4 or 6",
        ),
        (
            "--window-num-attention-heads 6 --window-size 4 --group-query-attention --num-query-groups 4",
            1,
            "--num-query-groups 4: must divide --window-num-attention-heads 6; nearest: 2 or 3, or add --window-num-qu",
        ),
        (
            "--window-num-attention-heads 6 --window-num-query-groups 2 --window-size 4 --tp 4",
            4,
            "--window-num-query-groups 2: must be a multiple of --tensor-model-parallel-size 4; nearest: 4",
        ),
        (
            "--window-num-attention-heads 6 --window-size 4 --cp 4 --cp-comm-type a2a",
            4,
            "--window-num-attention-heads 6: must be a multiple of --tensor-model-parallel-size 1 * --context-parallel",
        ),
        (
            "--ffn-hidden-size-pattern [8]",
            1,
            "--ffn-hidden-size-pattern [8]: the list must have a number above 0 for each of 4 layers, and has 1 ",
        ),
        (
            "--ffn-hidden-size-pattern [8]*3+[0]",
            1,
            "the list must have a number above 0 for each layer, and has 0 for layer 3",
        ),
        ("--ffn-hidden-size-pattern 64", 1, "64 must be a list with a number for each of 4 layers"),
        ("--ffn-hidden-size-pattern a", 1, "--ffn-hidden-size-pattern a: 'a' is not a list of numbers; use for"),
        (
            "--ffn-hidden-size-pattern [8]*3+[9] --tp 2",
            2,
            "has 9 for layer 3, which must be a multiple of --tensor-model-parallel-size 2; nearest: 8 or 10",
        ),
        (
            "--attn-logit-softcapping 30 --attention-backend flash3 --bf16",
            1,
            "--attention-backend flash3: has no effect beside --attn-logit-softcapping 30.0: plain torch computes capp",
        ),
        ("--lr inf", 1, "--lr inf: must be finite"),
        ("--clip-grad -1", 1, "--clip-grad -1.0: must not be negative"),
        ("--seed 4294967296", 1, "--seed 4294967296: must be in [0, 4294967295]"),
        ("--window-size 0", 1, "--window-size 0: must be above 0"),
        ("--rampup-batch-size 1 0 3", 1, "--rampup-batch-size 1 0 3: must be above 0"),
        ("--iterations-to-skip 0 3", 1, "--iterations-to-skip 0 3: must be above 0"),
        ("--spiky-loss-factor 1", 1, "--spiky-loss-factor 1.0: must be above 1; the default is 2.0"),
        (
            "--no-check-for-nan-in-loss-and-grad --max-skipped-iterations 3",
            1,
            "--max-skipped-iterations 3: needs --check-for-nan-in-loss-and-grad or --check-for-spiky-loss or "
            "--check-for-large-grads: without a check no step is skipped; remove --no-check-for-nan-in-loss-and-",
        ),
        # layout
        ("--tp 2", 3, "world size 3: must be a multiple of TP 2 * PP 1 * CP 1 = 2; start 4 ranks"),
        ("--tp 2", 1, "world size 1: must be a multiple of TP 2 * PP 1 * CP 1 = 2; start 2 ranks"),
        ("--dp 3", 4, "--data-parallel-size 3: must be world size 4 / (TP 1 * PP 1 * CP 1) = 4; remove it"),
        ("--ep 2", 2, "--expert-model-parallel-size 2: has no effect without --num-experts"),
        ("--pp 7", 7, "--pipeline-model-parallel-size 7: 4 layers, the embedding and the head fill at most 6 stages"),
        ("--cpu --distributed-backend nccl", 1, "--distributed-backend nccl: cannot be combined with --cpu"),
        # tensor parallel
        ("--tp 5 --num-attention-heads 4 --hidden-size 40", 5, "--num-attention-heads 4: must be a multiple of"),
        (
            "--tp 8",
            8,
            "--num-attention-heads 12: must be a multiple of --tensor-model-parallel-size 8; nearest: 8 or 16",
        ),
        ("--tp 4 --hidden-size 54 --kv-channels 4", 4, "--hidden-size 54: must be a multiple of"),
        (
            "--tp 4 --ffn-hidden-size 50",
            4,
            "--ffn-hidden-size 50: must be a multiple of --tensor-model-parallel-size 4",
        ),
        (
            "--tp 4 --group-query-attention --num-query-groups 2",
            4,
            "--num-query-groups 2: must be a multiple of --tensor-model-parallel-size 4; nearest: 4",
        ),
        (
            "--tp 3 --vocab-size 100",
            3,
            "--make-vocab-size-divisible-by 128: the vocabulary of 100 padded to 128 must be a multiple of "
            "--tensor-model-parallel-size 3; nearest: 384",
        ),
        ("--sequence-parallel", 1, "--sequence-parallel: has no effect without --tensor-model-parallel-size above 1"),
        (
            "--tp 3 --sequence-parallel --make-vocab-size-divisible-by 3",
            3,
            "--seq-length 16: must be a multiple of --tensor-model-parallel-size 3 under --sequence-parallel; "
            "nearest: 15 or 18",
        ),
        # context parallel
        ("--cp 3", 3, "--seq-length 16: must be a multiple of 2 * --context-parallel-size 3 = 6; nearest: 12 or 18"),
        (
            "--cp 2 --tp 3 --sequence-parallel --make-vocab-size-divisible-by 3",
            6,
            "--seq-length 16: must be a multiple of 2 * --context-parallel-size 2 and, under --sequence-parallel, "
            "of --context-parallel-size 2 * --tensor-model-parallel-size 3: of 12; nearest: 12 or 24",
        ),
        (
            "--cp 8 --cp-comm-type a2a",
            8,
            "--num-attention-heads 12: must be a multiple of --tensor-model-parallel-size 1 * --context-parallel-size 8"
            " = 8 for a2a; nearest: 8 or 16, or use --cp-comm-type p2p or all_gather",
        ),
        (
            "--cp 4 --cp-comm-type a2a --group-query-attention --num-query-groups 6",
            4,
            "--num-query-groups 6: must be a multiple of --tensor-model-parallel-size 1 * --context-parallel-size 4 "
            "= 4 for a2a; nearest: 4 or 8, or use",
        ),
        # model
        ("--hidden-size 50", 1, "--hidden-size 50: must be a multiple of --num-attention-heads 12; nearest: 48 or 60"),
        ("--group-query-attention", 1, "--group-query-attention: needs --num-query-groups"),
        (
            "--group-query-attention --num-query-groups 5",
            1,
            "--num-query-groups 5: must divide --num-attention-heads 12; nearest: 4 or 6",
        ),
        ("--num-query-groups 4", 1, "--num-query-groups 4: has no effect without --group-query-attention"),
        ("--swiglu --squared-relu", 1, "--swiglu: cannot be combined with --squared-relu"),
        ("--quick-geglu --activation-func gelu", 1, "--activation-func gelu: cannot be combined with --quick-geglu"),
        (
            "--attention-temperature-coeff 0.1 --position-embedding-type rope",
            1,
            "--attention-temperature-coeff 0.1: has no effect without --no-rope-freq",
        ),
        ("--attention-temperature-coeff -1", 1, "--attention-temperature-coeff -1.0: must not be negative"),
        ("--activation-func-clamp-value 7", 1, "--activation-func-clamp-value 7.0: is not known to the activation"),
        ("--squared-relu --glu-linear-offset 1", 1, "--glu-linear-offset 1.0: is not known to the activation function"),
        (
            "--num-experts 4 --etp 5 --moe-ffn-hidden-size 20",
            5,
            "--hidden-size 48: must be a multiple of --expert-tensor-parallel-size 5, which cuts biases of experts",
        ),
        (
            "--max-position-embeddings 8",
            1,
            "--max-position-embeddings 8: must be at least --seq-length 16; nearest: 16",
        ),
        (
            "--position-embedding-type rope --kv-channels 5",
            1,
            "--rotary-percent 1.0: rotates 5 of the 5 channels of a head",
        ),
        (
            "--rotary-seq-len-interpolation-factor 0 --position-embedding-type rope",
            1,
            "--rotary-seq-len-interpolation-factor 0.0: must be above 0",
        ),
        (
            "--no-bias-gelu-fusion --swiglu",
            1,
            "--no-bias-gelu-fusion: has no effect without GeLU in a model with biases",
        ),
        ("--no-bias-gelu-fusion --disable-bias-linear", 1, "--no-bias-gelu-fusion: has no effect without GeLU"),
        (
            "--reset-position-ids --tokenizer-type ByteTokenizer --position-embedding-type rope",
            1,
            "--reset-position-ids: has no effect without --position-embedding-type learned_absolute",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-low-freq-factor 5",
            1,
            "--rope-scaling-low-freq-factor 5.0: must be at most",
        ),
        ("--bf16 --fp16", 1, "--fp16: cannot be combined with --bf16"),
        ("--fp32 --fp64 --bf16", 1, "--bf16: cannot be combined with --fp32 and --fp64"),
        ("--fp16 --min-loss-scale 8 --initial-loss-scale 4", 1, "--min-loss-scale 8.0: must be at most"),
        # batch
        (
            "--global-batch-size 64 --micro-batch-size 3",
            2,
            "--global-batch-size 64: must be a multiple of --micro-batch-size 3 * data-parallel size 2 = 6; "
            "nearest: 60 or 66",
        ),
        ("--global-batch-size 8 --num-microbatches 3", 1, "--num-microbatches 3: must be --global-batch-size 8"),
        ("--rampup-batch-size 2 2", 1, "--rampup-batch-size 2 2: must be three numbers"),
        ("--global-batch-size 8 --rampup-batch-size 3 2 9", 2, "START 3 must be a multiple of"),
        ("--global-batch-size 8 --rampup-batch-size 2 3 9", 2, "INCREMENT 3 must be a multiple of"),
        ("--global-batch-size 8 --rampup-batch-size 9 1 9", 1, "START 9 must be at most --global-batch-size 8"),
        ("--global-batch-size 8 --rampup-batch-size 3 2 9", 1, "nearest: --global-batch-size 7 or 9"),
        # length and schedule
        ("--train-samples 80", 1, "--train-iters 100: cannot be combined with --train-samples"),
        ("--lr-warmup-samples 3", 1, "the run's length is given in iterations; use --lr-warmup-iters 3"),
        ("--lr-decay-samples 3", 1, "--lr-decay-samples 3: the run's length is given in iterations"),
        ("--lr-warmup-iters 100", 1, "--lr-warmup-iters 100: must be below the length of the decay, 100; nearest: 99"),
        ("--lr-warmup-iters 9 --lr-decay-iters 5", 1, "--lr-warmup-iters 9: must be below the length of the decay, 5"),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 5",
            1,
            "--lr-warmup-fraction 0.1: cannot be combined with --lr-warmup-iters",
        ),
        ("--lr-warmup-fraction 1", 1, "--lr-warmup-fraction 1.0: must be in [0, 1)"),
        ("--min-lr 1", 1, "--min-lr 1.0: must be at most --lr 0.001; nearest: 0.001"),
        ("--skip-train --eval-iters 0", 1, "--skip-train: leaves nothing to do with --eval-iters 0"),
        ("--global-batch-size 3 --decrease-batch-size-if-needed", 4, "--global-batch-size 3: must be a multiple of"),
        ("--lr-decay-style WSD", 1, "--lr-decay-style WSD: needs the length of the final anneal"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 101", 1, "--lr-wsd-decay-iters 101: must be at most"),
        ("--lr-wsd-decay-iters 10", 1, "--lr-wsd-decay-iters 10: has no effect without --lr-decay-style WSD"),
        ("--end-weight-decay 0.1", 1, "--weight-decay-incr-style constant: cannot start at 0.01 and end at 0.1"),
        # data, tokenizer, checkpoints
        ("--data-path a", 1, "--data-path: cannot be combined with --mock-data"),
        ("--train-data-path a --valid-data-path b", 1, "--train-data-path, --valid-data-path: cannot be combined"),
        ("--eod-mask-loss", 1, "--eod-mask-loss: needs the end-of-document token"),
        ("--tokenizer-type NullTokenizer", 1, "--vocab-size: is required by --tokenizer-type NullTokenizer"),
        (
            "--tokenizer-type GPT2BPETokenizer --vocab-file v",
            1,
            "--merge-file: is required by --tokenizer-type GPT2BPE",
        ),
        ("--valid books=b", 1, "--valid: mock data has no files to evaluate"),
        ("--no-mock-data --data-path a --valid books", 1, "--valid books: must be NAME=PREFIX"),
        (
            "--no-mock-data --data-path a --valid b=b --valid b=c",
            1,
            "--valid b=b b=c: there is a validation set b already",
        ),
        (
            "--no-mock-data --data-path a --multiple-validation-sets",
            1,
            "--multiple-validation-sets: needs --valid-data",
        ),
        (
            "--no-mock-data --data-path a --full-validation --eval-iters 0",
            1,
            "--full-validation: needs --eval-iters above 0; raise it",
        ),
    ],
)
def test_each_rule(flags: str, world_size: int, expected: str) -> None:
    found = problems(flags, world_size)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ["--data-path: the run has no data; add --data-path, --train-data-path or --mock-data"]),
        ("--valid-data-path b", ["--train-data-path: is required with --valid-data-path"]),
        ("--data-path a --train-data-path b", ["--data-path: cannot be combined with --train-data-path"]),
        ("--data-path 0.5 a 0.5", ["--data-path 0.5 a 0.5: 3 values are not pairs of weight and prefix"]),
        ("--data-path 0.5 a -1 b", ["--data-path 0.5 a -1 b: weight -1 must be positive"]),
        ("--data-path a --split 1,x", ["--split 1,x: must be up to three numbers separated by commas"]),
        ("--data-path a --split 0,1,1", ["--split 0,1,1: leaves no training data"]),
        ("--data-path a b --split 90/5/5", []),
        ("--train-data-path 2 a", []),
    ],
)
def test_data(flags: str, expected: list[str]) -> None:
    found = problems(f"--vocab-size 100 {flags}", without="mock-data")
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


def test_every_flag_of_a_path_says_whether_it_takes_urls() -> None:
    named = re.compile(r"_(path|paths|dir|file)$|^(save|load|valid|extension|sample_log|eval_tasks|tokenizer_model)$")
    flags = [flag for flag in all_flags() if flag.kind is str and (flag.spec.path or named.search(flag.field))]
    local = [flag for flag in flags if flag.spec.path == "local"]
    assert {flag.field for flag in flags if flag.spec.path == "url"} == {
        *("data_path", "train_data_path", "valid_data_path", "test_data_path", "valid"),
        *(f"{split}_weighted_split_paths" for split in ("train", "valid", "test")),
    }
    assert len(local) == len(flags) - 8 and {"save", "metrics_file"} < {flag.field for flag in local}
    for flag in local:
        if flag.field != "extension":  # imported before anything is validated
            said = (
                f"{flag.name} gs://a/b: is a URL, and only paths of mounted file systems are taken here; "
                "use such a path, and copy from or to the other storage yourself"
            )
            assert said in problems(f"{flag.name} gs://a/b")


def test_length_is_required_where_data_has_no_end() -> None:
    assert problems("", without="train-iters") == [
        "--mock-data: synthetic data has no epochs, so the run needs a length; add --train-iters, "
        "--train-samples or --train-tokens"
    ]
    assert problems("--vocab-size 9 --data-path a", without="train-iters mock-data") == []


def test_an_evaluation_needs_nothing_that_only_training_uses() -> None:
    (said,) = problems("--skip-train --vocab-size 9", without="lr mock-data train-iters")
    assert said.startswith("--data-path: the run has no data"), "losses need data"
    assert problems("--skip-train", without="lr train-iters") == []
    (said,) = problems("--skip-train --eval-iters 0")
    assert said.startswith("--skip-train: leaves nothing to do with --eval-iters 0; raise --eval-iters")


def test_a_run_shorter_than_a_step() -> None:
    found = problems("--train-tokens 100 --global-batch-size 8", without="train-iters")
    assert found == ["--train-tokens 100: is less than one step of 8 samples; nearest: 128"]
    for tokens in ("", "--train-tokens 1e6"):  # of two lengths the shorter one holds, and is named
        found = problems(f"{tokens} --train-samples 7 --global-batch-size 8", without="train-iters")
        assert found == ["--train-samples 7: is less than one step of 8 samples; nearest: 8"]
    found = problems("--train-tokens 100 --train-samples 700 --global-batch-size 8", without="train-iters")
    assert found == ["--train-tokens 100: is less than one step of 8 samples; nearest: 128"]


def test_iterations_and_samples_exclude_each_other_beside_tokens_too() -> None:
    found = problems("--train-tokens 1e6 --train-samples 70")
    assert found == ["--train-iters 100: cannot be combined with --train-samples; keep one of them"]


def test_nothing_follows_from_a_negative_number_of_tokens() -> None:
    assert problems("--train-tokens -5", without="train-iters") == [
        "--train-tokens -5: must be above 0; give another number, or remove it"
    ]
    for flag in ("--lr-decay-tokens", "--lr-warmup-tokens"):
        (found,) = problems(f"{flag} -50")
        assert found.startswith(f"{flag} -50: must")


def test_sample_based_schedules() -> None:
    flags = "--train-samples 100 --lr-warmup-samples 10 --lr-decay-samples 50 --global-batch-size 4"
    assert problems(f"{flags} --rampup-batch-size 2 2 20", without="train-iters") == []
    for sizes in "--step-batch-size-schedule 0:2,1K:8", "--global-batch-size 8 --rampup-batch-size 2 2 9":
        assert problems(f"{sizes} --train-iters 1", without="train-iters") == []
    found = problems("--train-samples 100 --lr-warmup-iters 3 --lr-decay-iters 5", without="train-iters")
    assert [problem.split(":")[0] for problem in found] == ["--lr-decay-iters 5", "--lr-warmup-iters 3"]
    found = problems("--train-samples 100 --lr-warmup-iters 3 --global-batch-size 8", without="train-iters")
    assert [problem.partition("; ")[2] for problem in found] == ["use --lr-warmup-samples 24"]


def test_unknown_vocabulary() -> None:
    found = problems("--data-path a --tp 3", 3, without="mock-data")
    assert any(line.startswith("--tokenizer-type: the vocabulary size is unknown") for line in found)
    assert any(line.startswith("--make-vocab-size-divisible-by 128: the padded vocabulary must be") for line in found)


def test_all_at_once() -> None:
    """The plan of 64 ranks that a newcomer gets wrong in several ways."""
    model = "--num-layers 30 --hidden-size 1000 --num-attention-heads 12 --seq-length 2048 --mock-data"
    config = parse_args(f"{model} --tp 8 --pp 4 --micro-batch-size 3 --global-batch-size 64".split())
    flags = [problem.flag for problem in validate(config, 64)]
    assert flags == ["--lr", "--hidden-size", "--num-attention-heads", "--global-batch-size", "--mock-data"]
    assert all(problem.remedy for problem in validate(config, 64))


@pytest.mark.parametrize(
    "sizes", ["--step-batch-size-schedule a", "--rampup-batch-size 0", "--rampup-batch-size 1 0 3"]
)
def test_sizes_that_cannot_be_read_beside_a_length_in_tokens(sizes: str) -> None:
    """The length is not derived from them; rules say what is wrong."""
    flag = sizes.split()[0]
    config = parse_args(argv(f"{sizes} --train-tokens 4096"))
    assert any(problem.flag == flag for problem in validate(config, 1))


def _text(flag: Flag) -> st.SearchStrategy[list[str]]:
    """The flag with some value of its type, legal or not."""
    if flag.kind is bool:
        return st.just([flag.name])
    if flag.spec.choices:
        values = st.sampled_from(tuple(flag.spec.choices))
    elif flag.kind is int:
        values = st.integers(-3, 20).map(str)
    elif flag.kind is float:
        values = st.sampled_from(["-1", "0", "0.5", "1", "3", "1e30", "inf"])
    else:
        values = st.sampled_from(["a", "0.5", "1,2,3", ""])
    count = 4 if flag.spec.many else 1
    return st.lists(values, min_size=1, max_size=count).map(lambda texts: [flag.name, *texts])


# What --extension names is imported as the command line is read, and read no further where that fails.
ANY_FLAGS = st.lists(
    st.sampled_from([flag for flag in all_flags() if flag.field != "extension"]).flatmap(_text), max_size=12
)


@settings(max_examples=400, deadline=None)
@given(ANY_FLAGS, st.integers(1, 16), st.booleans())
@example([["--num-distributed-optimizer-instances", "2"], ["--tensor-model-parallel-size", "-1"]], 1, True)
def test_no_configuration_raises(flags: list[list[str]], world_size: int, good: bool) -> None:
    """Whatever is wrong, it is reported and not raised; what is legal makes a layout."""
    words = [word for flag in flags for word in flag]
    config = parse_args([*(argv("") if good else []), *words])
    found = validate(config, world_size)
    assert all(problem.flag and problem.rule and problem.remedy for problem in found)
    if not found:
        resolved = resolve(config, world_size)
        dims = ParallelDims.from_config(resolved.parallel, world_size)
        assert dims.world_size == world_size
        assert resolved.training.global_batch_size


def test_a_linear_attention_of_an_extension_sees_its_own_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LINEAR_ATTENTIONS, "_entries", dict(LINEAR_ATTENTIONS._entries))
    for name, whole in (("own", False), ("own_whole", True)):
        LINEAR_ATTENTIONS.register(name, lambda name, config, ctx: None, whole_sequences=whole)
        found = problems(f"--experimental-attention-variant {name} --cp 2", 2)
        assert any("its layers see the tokens of their own rank only" in problem for problem in found) != whole

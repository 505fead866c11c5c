"""Tests of configuration rules that a table cannot express, and of defaults that are derived from other values.
test_rules.py tests the tables of rules."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.training.config.arguments import parse_args, read_flags
from megatron.training.config.flags import Flag, all_flags, spelling_table
from megatron.training.config.problem import NO_STORAGE, Problem
from megatron.training.config.rules.nearest import NAMED, with_legal_values
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import MOCK_VOCAB_SIZE, notices, resolve, validate
from tests import rules
from tests.pure.test_rules import TESTS

GOOD = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 16 --lr 1e-3 --mock-data --train-iters 100"
)


def argv(flags: str) -> list[str]:
    return f"{GOOD} {flags}".split()


def problems(flags: str, world_size: int = 1) -> list[str]:
    return rules.problems(flags, world_size, GOOD)


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


def test_every_path_flag_declares_whether_it_accepts_urls() -> None:
    named = re.compile(r"_(path|paths|dir|file)$|^(save|load|valid|extension|sample_log|eval_tasks|tokenizer_model)$")
    flags = [flag for flag in all_flags() if flag.kind is str and (flag.spec.path or named.search(flag.field))]
    local = [flag for flag in flags if flag.spec.path == "local"]
    stored = [flag for flag in flags if flag.spec.path == "stored"]
    assert [flag.field for flag in stored] == [
        *("tokenizer_model", "vocab_file", "merge_file"),
        *("metrics_file", "save", "load", "export_hf_dir", "branch_from"),
    ]
    assert {flag.field for flag in flags if flag.spec.path == "url"} == {
        *("data_path", "train_data_path", "valid_data_path", "test_data_path", "valid"),
        *(f"{split}_weighted_split_paths" for split in ("train", "valid", "test")),
    }
    assert len(local) == len(flags) - 16 and {"sample_log", "tensorboard_dir"} < {flag.field for flag in local}
    for flag in stored:
        said = f"{flag.name} none://a/b: is a URL, but no storage is registered for none://; {NO_STORAGE}"
        assert said in map(str, read_flags([flag.name, "none://a/b"]).problems)
    for flag in local:
        if flag.field != "extension":  # the module that --extension names is imported before validation
            said = (
                f"{flag.name} gs://a/b: is a URL, but only paths of mounted file systems are accepted here; "
                "use such a path, and copy from or to the other storage yourself"
            )
            assert said in map(str, read_flags([flag.name, "gs://a/b"]).problems)


def _text(flag: Flag) -> st.SearchStrategy[list[str]]:
    """Return a hypothesis strategy for command-line words that set the flag to a valid or invalid value of its type."""
    if flag.kind is bool:
        return st.just([flag.name])
    if flag.spec.choices:
        values = st.sampled_from(tuple(flag.spec.choices))
    elif flag.kind is int:
        values = st.integers(-3, 20).map(str)
    elif flag.kind is float:
        values = st.sampled_from(["-1", "0", "0.5", "1", "3", "1e30", "inf"])
    else:
        values = st.sampled_from(["a", "0.5", "1,2,3"])
    count = 4 if flag.spec.many else 1
    return st.lists(values, min_size=1, max_size=count).map(lambda texts: [flag.name, *texts])


# --extension is excluded, because its module is imported while the command line is parsed. If the import fails, parsing
# stops.
ANY_FLAGS = st.lists(
    st.sampled_from([flag for flag in all_flags() if flag.field != "extension"]).flatmap(_text), max_size=12
)


@settings(max_examples=150, deadline=None)
@given(ANY_FLAGS, st.integers(1, 16), st.booleans())
@example([["--cuda-graph-impl", "local"], ["--hybrid-layer-pattern", "a"]], 1, False)
@example([["--attention-backend", "fp8"]], 1, False)
@example([["--attention-module", "normed_values"]], 1, False)
@example([["--num-distributed-optimizer-instances", "2"], ["--tensor-model-parallel-size", "-1"]], 1, True)
def test_no_configuration_raises(flags: list[list[str]], world_size: int, good: bool) -> None:
    """Every error is reported rather than raised, and every valid configuration has a layout."""
    words = [word for flag in flags for word in flag]
    config = parse_args([*(argv("") if good else []), *words])
    found = validate(config, world_size)
    assert all(problem.flag and problem.rule and problem.remedy for problem in found)
    if not found:
        resolved = resolve(config, world_size)
        dims = ParallelDims.from_config(resolved.parallel, world_size)
        assert dims.world_size == world_size
        assert resolved.training.global_batch_size


def test_an_extensions_linear_attention_sees_only_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MIXERS, "_entries", dict(MIXERS._entries))
    for name, whole in (("own", False), ("own_whole", True)):
        MIXERS.register(name, lambda name, config, ctx: None, whole_sequences=whole)
        found = problems(f"--experimental-attention-variant {name} --cp 2", 2)
        assert any("a layer of this kind uses only the tokens of its own rank" in problem for problem in found) != whole


def test_resolve_fills_derived_values() -> None:
    config = resolve(parse_args(argv("--tp 2 --micro-batch-size 2 --swiglu")), 8)
    assert config.parallel.data_parallel_size == 4
    assert (config.training.global_batch_size, config.training.num_microbatches) == (8, 1)
    model = config.model
    assert (model.kv_channels, model.ffn_hidden_size, model.max_position_embeddings) == (4, 128, 16)
    assert model.vocab_size == MOCK_VOCAB_SIZE
    assert resolve(config, 8) == config
    assert resolve(parse_args(argv("--num-microbatches 3")), 2).training.global_batch_size == 6


@pytest.mark.parametrize(
    ("hidden_size", "width"), [(8, 64), (24, 64), (47, 64), (48, 128), (1024, 2688), (4096, 10880), (5120, 13632)]
)
def test_default_width_of_a_gated_mlp_is_rounded_down(hidden_size: int, width: int) -> None:
    """The default widths are the same as in Megatron-LM, except that the minimum width is 64."""
    assert TransformerConfig(hidden_size=hidden_size, swiglu=True).ffn_size == width
    assert TransformerConfig(hidden_size=hidden_size).ffn_size == 4 * hidden_size


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "gelu_tanh"),
        ("--disable-bias-linear", "gelu"),
        ("--no-bias-gelu-fusion", "gelu"),
        ("--no-bias-gelu-fusion --activation-func gelu_tanh", "gelu_tanh"),
        ("--activation-func gelu", "gelu"),
        ("--swiglu", "swiglu"),
        ("--squared-relu --no-bias-gelu-fusion", "squared_relu"),
    ],
)
def test_gelu_is_exact_without_the_fused_kernel_of_bias_and_gelu(flags: str, name: str) -> None:
    config = parse_args(argv(flags))
    resolved = resolve(config, 1)
    assert config.model.activation == resolved.model.activation == name
    # Checkpoints record which variant of GeLU was used.
    assert resolved.model.activation_func == (name if "gelu" in name else None)
    assert not validate(resolved, 1) and resolve(resolved, 1) == resolved


def test_resolve_takes_the_larger_vocabulary() -> None:
    """The vocabulary size is the larger of the tokenizer's vocabulary size and --vocab-size, which may reserve room for
    more tokens."""
    flags = argv("--tokenizer-type ByteTokenizer --vocab-size 100")
    assert resolve(parse_args(flags), 1, vocab_size=101).model.vocab_size == 101
    assert resolve(parse_args(flags), 1, vocab_size=99).model.vocab_size == 100
    assert resolve(parse_args(argv("")), 1, vocab_size=259).model.vocab_size == 259


def broken_remedies(words: list[str], world_size: int) -> list[str]:
    """Return the problems of a command line whose suggested "nearest" value is refused by another rule for the same
    flag."""
    config = parse_args(words)

    def judge(config: RunConfig) -> list[Problem]:
        return validate(config, world_size)

    found, broken = with_legal_values(judge(config), config, judge), []
    for problem in found:
        flag, named = spelling_table().get(problem.flag), NAMED.fullmatch(problem.remedy)
        if flag is None or named is None or flag[0].takes_several or flag[0].kind is str:
            continue
        rules_before = {numberless(each.rule) for each in found if each.flag == problem.flag and each != problem}
        for value in filter(None, (named["first"], named["second"])):
            after = [each for each in judge(parse_args([*words, problem.flag, value])) if each.flag == problem.flag]
            broken += [
                f"{problem} -> {each}"
                for each in after
                if numberless(each.rule) == numberless(problem.rule) or numberless(each.rule) not in rules_before
            ]
    return broken


def numberless(rule: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", rule)


def test_the_nearest_values_in_the_tables_are_valid() -> None:
    tables = sorted([*TESTS.glob("pure/rules/*.txt"), *TESTS.glob("extensions/*/rules.txt")])
    cases = [case for table in tables for case in rules.read_table(table) if case.told]
    tried = 0
    for case in cases:
        words = [*case.base.split(), *case.flags.split()]
        if case.extension is None and any(
            "nearest: " in each.remedy for each in validate(parse_args(words), case.ranks)
        ):
            assert broken_remedies(words, case.ranks) == []
            tried += 1
    assert tried > 40


SIZES = {
    "--num-layers": (1, 9),
    "--hidden-size": (8, 50),
    "--num-attention-heads": (1, 12),
    "--seq-length": (4, 60),
    "--tp": (1, 6),
    "--pp": (1, 4),
    "--cp": (1, 4),
    "--ep": (1, 6),
    "--etp": (1, 4),
    "--num-experts": (2, 12),
    "--moe-router-topk": (2, 5),
    "--moe-ffn-hidden-size": (8, 40),
    "--num-query-groups": (1, 12),
    "--micro-batch-size": (1, 6),
    "--global-batch-size": (1, 40),
    "--num-virtual-stages-per-pipeline-rank": (1, 5),
    "--num-layers-per-virtual-pipeline-stage": (1, 5),
    "--make-vocab-size-divisible-by": (1, 130),
    "--decoder-first-pipeline-num-layers": (0, 9),
}
SWITCHES = ("--sequence-parallel", "--group-query-attention", "--disable-bias-linear", "--bf16 --fp8-format e4m3")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(SIZES)), max_size=9, unique=True).flatmap(
        lambda names: st.tuples(*(st.integers(*SIZES[name]).map(f"{name} {{}}".format) for name in names))
    ),
    st.lists(st.sampled_from(SWITCHES), unique=True),
    st.sampled_from([1, 2, 4, 6, 8, 12, 16]),
)
@example(("--num-attention-heads 12", "--hidden-size 16", "--tp 5"), ["--bf16 --fp8-format e4m3"], 5)
@example(("--num-query-groups 5", "--num-attention-heads 12", "--tp 3"), ["--group-query-attention"], 3)
@example(("--seq-length 16", "--cp 3"), ["--bf16 --fp8-format e4m3"], 3)
def test_the_nearest_values_are_valid(sizes: tuple[str, ...], switches: list[str], world_size: int) -> None:
    assert broken_remedies(argv(" ".join([*sizes, *switches])), world_size) == []


@pytest.mark.parametrize(
    ("flags", "ranks", "remedy"),
    [
        ("--global-batch-size 12 --micro-batch-size 8", 4, "nearest: 32, or use --micro-batch-size 1"),
        ("--global-batch-size 24 --micro-batch-size 4", 4, "nearest: 16 or 32, or use --micro-batch-size 2"),
        ("--global-batch-size 10 --micro-batch-size 1", 4, "nearest: 8 or 12"),
        (
            "--tp 4 --sequence-parallel --num-experts 4 --ep 2",
            4,
            "nearest: 1, or use --expert-tensor-parallel-size 1",
        ),
        ("--num-attention-heads 6 --tp 4 --group-query-attention --num-query-groups 6", 4, "correct another flag"),
        ("--hidden-size 16 --tp 5", 5, "nearest: 60"),
        ("--hidden-size 72 --position-embedding-type rope --rotary-percent 0.5", 1, "nearest: 0.333334"),
        ("--seq-length 14 --cp 3 --bf16 --fp8-format e4m3 --hidden-size 192", 3, "nearest: 48"),
    ],
)
def test_remedies_are_possible(flags: str, ranks: int, remedy: str) -> None:
    config = parse_args(argv(flags))
    found = with_legal_values(validate(config, ranks), config, lambda config: validate(config, ranks))
    assert any(each.remedy.startswith(remedy) for each in found), [*map(str, found)]

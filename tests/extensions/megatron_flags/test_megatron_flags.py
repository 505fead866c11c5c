"""Tests of Megatron-LM flags for which this program has no field."""

from __future__ import annotations

import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.extensions.interop.megatron_flags.head_flags import (
    NO_EFFECT,
    REFUSED,
    TRANSLATED,
    UNKNOWN,
    read_table,
    treatment,
    unknown_values,
)
from megatron.extensions.interop.megatron_flags.tables import (
    Accepted,
    Exchange,
    ForeignFlags,
    NotBuilt,
    SameAs,
    read_tables,
)
from megatron.training.config.arguments import command_line, parse_args, read_flags
from megatron.training.config.commands import options
from megatron.training.config.flags import flat_values, spelling_table
from megatron.training.config.reading import FOREIGN_PROGRAMS, known_spelling
from megatron.training.reliability.launch import Launch
from tests.pure.test_arguments import TINY, failure, write

TABLE = read_tables()


VALUES = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("argv", "field", "value"), [tuple(case.values()) for case in VALUES])
def test_flag_values_are_translated(argv: str, field: str, value: Any) -> None:
    found = flat_values(parse_args(argv.split()))[field]
    assert found == value and type(found) is type(value)


def test_unimplemented_features_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    lines = failure(
        "--mtp-detach-heads --moe-input-jitter-eps 1 --padded-vocab-size 8 --dataloader-type cyclic --gibberish "
        "--onnx-safe --num-experts 64 128",
        capsys,
    )
    assert lines[:7] == [
        "--mtp-detach-heads: asks for this variant of multi-token prediction, which is not implemented; remove it",
        "--moe-input-jitter-eps 1: asks for this variant of mixture of experts, which is not implemented; remove it",
        "--padded-vocab-size 8: asks for a padded vocabulary size given directly, which is not implemented; "
        "use --vocab-size and --make-vocab-size-divisible-by",
        "--dataloader-type cyclic: asks for a different sample order, which is not implemented; use single",
        "--gibberish: unknown flag; neither this program nor Megatron-LM has this flag; remove it",
        "--onnx-safe: asks for this activation function, which is not implemented; remove it",
        "--num-experts 64 128: asks for layers that differ in their number of experts, which is not implemented; "
        "give one value",
    ]


def test_flags_in_a_file_are_translated_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.yaml: onnx-safe: asks for this activation function"):
        parse_args(["--config", write(tmp_path, "onnx-safe: true")])
    assert len(command_line(["--config", write(tmp_path, "use-mcore-models: true"), *TINY.split()]).notes) == 1


def test_tables_do_not_overlap() -> None:
    """A flag must not be listed as missing if it exists. When a feature is implemented, its flags must be removed from
    the tables of missing features."""
    text = (
        files("megatron.extensions.interop.megatron_flags").joinpath("megatron_flags.toml").read_text(encoding="utf-8")
    )
    tables = tomllib.loads(text)
    groups = [*tables["no_effect"], *tables["not_built"]]
    foreign = [flag for group in groups for flag in (*group.get("flags", ()), *group.get("prefixes", ()))]
    foreign += [*tables["usual"], *tables["exchanged"], *tables["replaced"]]
    twice = [flag for flag, times in Counter([*foreign, *spelling_table()]).items() if times > 1]
    assert not twice
    for flag, values in (*tables["same_values"].items(), *tables["values_not_built"].items()):
        known, _ = spelling_table()[flag]
        assert known.spec.choices and not set(values) & set(known.spec.choices), flag


def test_replacements_of_flags_exist() -> None:
    """Every flag that the table of foreign flags mentions as a replacement, switch or remedy must exist."""
    foreign = TABLE
    known = {*spelling_table(), *foreign.spellings(), *options()}
    for name, entry in (*foreign.entries.items(), *foreign.prefixes.items()):
        text = entry.flags if isinstance(entry, SameAs) else ""
        if isinstance(entry, NotBuilt):
            text = " ".join([entry.remedy, entry.reason, *entry.switch, *entry.beside])
        named = {word.strip(",:;.") for word in text.split() if word.startswith("--")}
        assert named <= known, (name, named - known)


def test_meaningless_flags_get_one_line_each() -> None:
    command = command_line(f"{TINY} --use-mcore-models --transformer-impl local --use-flash-attn".split())
    assert len(command.notes) == 3
    assert command.notes[0].startswith("--use-mcore-models has no effect: ")
    assert command.notes[1].startswith("--transformer-impl local has no effect: ")
    assert command.config == parse_args(TINY.split())


def test_megatrons_fused_head_is_the_loss_in_chunks() -> None:
    command = command_line(f"{TINY} --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear".split())
    assert command.config.parallel.loss_chunk_tokens == 4096
    command = command_line(f"{TINY} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te".split())
    assert command.config.parallel.loss_chunk_tokens is None


@pytest.mark.usefixtures("forget_extensions_at_once")
@pytest.mark.parametrize("name", TABLE.entries)
def test_every_foreign_flag_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each foreign flag is either an alias of a field, or produces an error or a notice that begins with the flag."""
    entry = TABLE.entries[name]
    argv = [*TINY.split(), *(entry.switch[0].split() if isinstance(entry, NotBuilt) and entry.switch else ())]
    if isinstance(entry, Accepted):
        value = [] if not entry.arity else [entry.values[0] if entry.values else "1"]
        assert command_line([*argv, name, *value], Launch()).notes[0].startswith(f"{name} ")
    elif isinstance(entry, SameAs):
        reader = read_flags([*argv, *name.split(), *(["7"] if "{}" in entry.flags else [])])
        assert " ".join(reader.readings[-1].given).startswith(name)
        assert bool(reader.notes) != entry.quiet or reader.problems
    elif isinstance(entry, Exchange):
        for flags, note in ([name], False), ([name, entry.flag, "alibi"], True):
            assert bool(read_flags([*argv, *flags]).notes) == note
    else:
        assert any(
            line.startswith(name) and "not implemented" in line for line in failure(" ".join([*argv, name]), capsys)
        )


def test_settings_of_missing_features_have_no_effect_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = command_line(f"{TINY} --engram-dim 4 --lion-beta1 0.9".split(), Launch())
    assert command.notes[0] == (
        "--engram-dim 4 has no effect: it is a setting of an n-gram memory, which --engram-layer-ids asks for"
    )
    assert command.notes[1].startswith("--lion-beta1 0.9 has no effect: it is a setting of the Lion optimizer")
    (note,) = command_line(f"{TINY} --dsa-indexer-k-norm-epsilon 1e-3".split(), Launch()).notes
    assert note.endswith("it is a setting of sparse attention, which --experimental-attention-variant asks for")
    lines = failure(f"{TINY} --engram-dim 4 --engram-layer-ids 1", capsys)
    assert [line.partition(":")[0] for line in lines] == ["--engram-layer-ids 1", "--engram-dim 4"]


STANDARD_STACKS = (
    "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
    "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
)


@pytest.mark.parametrize("stack", STANDARD_STACKS)
@pytest.mark.parametrize("pattern", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_flags_that_a_pattern_replaces_have_no_effect(
    stack: str, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training scripts of Megatron-LM's hybrid models pass flags that a layer pattern replaces."""
    theirs = f"--is-hybrid-model --spec {stack} --hybrid-attention-ratio 0.5 --hybrid-mlp-ratio 0.5"
    plain = TINY.replace("--num-layers 4", "")
    command = command_line(f"{plain} {theirs} {pattern} *-*-".split(), Launch())
    assert [note.partition(" has no effect: ")[0] for note in command.notes] == [
        "--is-hybrid-model",
        f"--spec {stack}",
        "--hybrid-attention-ratio 0.5",
        "--hybrid-mlp-ratio 0.5",
    ]
    assert command.config == parse_args(f"{plain} {pattern} *-*-".split())
    lines = failure(f"{TINY} {theirs}", capsys)
    assert len(lines) == 4 and all("state the layers with --hybrid-layer-pattern" in line for line in lines)
    other = failure(f"{plain} --spec {stack}_of_mine {pattern} *-*-", capsys)
    assert "asks for layer module specifications" in other[0]


HEAD = read_table()
"""Table rows for all flags of Megatron-LM's branches main and dev."""


def test_every_current_megatron_flag_is_known() -> None:
    assert len(HEAD) > 900 and not [row for row in HEAD if row.treatment == UNKNOWN]
    wrong = [(row.flag.name, row.treatment, found) for row in HEAD if (found := treatment(row.flag)) != row.treatment]
    assert not wrong, "write the table again: python tools/compare_megatron_flags.py"
    assert not [(row.flag.name, values) for row in HEAD if (values := unknown_values(row.flag))]


@pytest.mark.parametrize("kind", [TRANSLATED, NO_EFFECT, REFUSED])
def test_every_current_megatron_flag_is_answered_with_a_reason(kind: str) -> None:
    """For each flag, the program prints one line that begins with the flag. The line names the equivalent flags, or
    states why the flag has no effect or is refused."""
    signs = {TRANSLATED: " is read as --", NO_EFFECT: " has no effect: ", REFUSED: ": "}
    usual = {name for name, entry in TABLE.entries.items() if isinstance(entry, SameAs) and entry.quiet}
    for row in HEAD:
        name = known_spelling(row.flag.name)
        if row.treatment == kind and name not in usual | {*EXCHANGES}:
            reader = read_flags([name, *row.flag.example])
            (line,) = {*map(str, reader.problems), *reader.notes} if kind != TRANSLATED else {*reader.notes}
            head, _, reason = line.partition(signs[kind])
            assert head.startswith(name) and len(reason.split()) > (kind != TRANSLATED), line


EXCHANGES = [name for name, entry in TABLE.entries.items() if isinstance(entry, Exchange)]


@pytest.mark.parametrize(
    ("flags", "cost"),
    [
        ("--moe-token-dispatcher-type flex", "a token travels once for each of its experts"),
        ("--moe-enable-deepep", "a token travels once for each of its experts"),
        ("--cross-entropy-fusion-impl linear", "kernels are launched for each of these chunks"),
        ("--cuda-graph-impl full_iteration", "the host launches every kernel"),
    ],
)
def test_substitutes_state_their_cost(flags: str, cost: str) -> None:
    (note,) = read_flags(flags.split()).notes
    assert note.startswith(f"{flags} is read as ") and cost in note


def test_other_spellings_are_read_as_ours(capsys: pytest.CaptureFixture[str]) -> None:
    old = "--checkpoint-activations --checkpoint-num-layers 2 --use-rotary-position-embeddings --micro_batch_size 3"
    command = command_line(f"{TINY} {old} --lr-decay-style wsd --lr-wsd-decay-iters 2".split(), Launch())
    ours = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    ours += " --position-embedding-type rope --micro-batch-size 3 --lr-decay-style WSD --lr-wsd-decay-iters 2"
    assert command.config == parse_args(f"{TINY} {ours}".split())
    assert command.notes == (
        "--checkpoint-activations is read as --recompute-granularity full --recompute-method uniform",
        "--checkpoint-num-layers 2 is read as --recompute-num-layers 2",
        "--lr-decay-style wsd is read as WSD",
    )
    theirs = "--optimizer dist_muon --muon-use-nesterov --muon-tp-mode distributed --muon-no-split-qkv"
    ours = "--optimizer muon --muon-nesterov --no-muon-split-qkv"
    command = command_line(f"{TINY} {theirs}".split(), Launch())
    assert command.config == parse_args(f"{TINY} {ours}".split()) and len(command.notes) == 2
    theirs = "--position-embedding-type yarn --yarn-beta-fast 9 --no-weight-decay-cond-type apply_wd_to_qk_layernorm"
    ours = "--position-embedding-type rope --rope-type yarn --beta-fast 9 --apply-wd-to-qk-layernorm"
    command = command_line(f"{TINY} {theirs} --zero-stage 3 --cpu-optimizer".split(), Launch())
    ours += " --data-parallel-sharding-strategy optim_grads_params --optimizer-cpu-offload"
    assert command.config == parse_args(f"{TINY} {ours}".split()) and len(command.notes) == 5
    line = failure(f"{TINY} --optimizer adaptive_muon", capsys)[0]
    told = "asks for Muon with a second moment, which is not implemented; use adam or sgd or muon or soap"
    assert line == f"--optimizer adaptive_muon: {told}"
    line = failure(f"{TINY} --checkpoint-activations 3", capsys)[0]
    assert line.startswith("--checkpoint-activations 3: takes no value; or use --recompute-granularity")


def test_rotary_embeddings_of_a_file_survive_no_position_embedding(tmp_path: Path) -> None:
    path = write(tmp_path, "position-embedding-type: rope\n")
    assert parse_args(["--config", path, "--no-position-embedding"]).model.position_embedding_type == "rope"
    path = write(tmp_path, "no-position-embedding: true\nposition-embedding-type: learned_absolute\n")
    assert parse_args(["--config", path]).model.position_embedding_type == "none"


def test_flags_override_switches_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "use-rotary-position-embeddings: true\n")
    assert parse_args(["--config", path]).model.position_embedding_type == "rope"
    argv = ["--config", path, "--position-embedding-type", "alibi"]
    assert parse_args(argv).model.position_embedding_type == "alibi"


@pytest.mark.usefixtures("forget_extensions_at_once")
def test_an_extension_translates_flags_of_another_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {
        "--their-width": SameAs("--hidden-size {}"),
        "--their-mode": Accepted("this program has one mode"),
        "--their-rope": Exchange("--position-embedding-type", "any", "rope"),
        "--their-magic": NotBuilt("magic"),
    }
    table = ForeignFlags(entries, {"--their-spell-": NotBuilt("a spell")}, {}, {}, {}, {})
    FOREIGN_PROGRAMS.register("Theirs", table)
    command = command_line(f"{TINY} --their-width 64 --their-mode --their-rope".split(), Launch())
    assert (command.config.model.hidden_size, command.config.model.position_embedding_type) == (64, "rope")
    assert "--their-width 64 is read as --hidden-size 64" in command.notes
    assert "--their-mode has no effect: this program has one mode" in command.notes
    lines = failure(f"{TINY} --their-magic --their-spell-x 1 --gibberish", capsys)
    assert lines[:2] == [
        "--their-magic: asks for magic, which is not implemented; remove it",
        "--their-spell-x 1: asks for a spell, which is not implemented; remove it",
    ]
    assert "Theirs has this flag; remove it" in lines[2]
    for module in ("megatron.training.config.reading", "megatron.extensions.interop.megatron_flags.tables"):
        monkeypatch.setattr(f"{module}.home_of", {"--their-spell-x": "spells"}.get)
    assert "is a flag of the extension spells, which is not installed" in failure("--their-spell-x 1", capsys)[0]

"""Tests of the command line: the frozen set of flags, the translation of Megatron-LM's flags, configuration files, and
errors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron import extensions
from megatron.core.config.mixers import ATTENTION_MODULES, MIXERS, MixerNames
from megatron.core.config.model_fields import RecomputedParts
from megatron.core.config.moe import RouterValues
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.core.registry import Registry
from megatron.training.config.arguments import CommandLine, command_line, parse_args, read_flags, save_config
from megatron.training.config.commands import COMMANDS, options
from megatron.training.config.flags import all_flags, flat_values, home_of, sections, spelling_table
from megatron.training.config.help import field_docs
from megatron.training.config.problem import any_text
from megatron.training.config.reading import FOREIGN_PROGRAMS, FlagReader, tokens_of
from megatron.training.config.validation import resolve, validate
from megatron.training.reliability.launch import Launch
from tests.apart import python_apart
from tools.common import tool_parser

GOLDEN = Path(__file__).with_name("golden_flags.txt")
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 --mock-data --train-iters 10"


def surface() -> str:
    """Return one line per flag spelling. The line names the field that the flag sets and the kind of its value."""
    lines = []
    for spelling, (flag, on) in spelling_table().items():
        kind = ("on" if on else "off") if flag.kind is bool else flag.kind.__name__ + ("..." if flag.spec.many else "")
        lines.append(f"{spelling} {flag.section}.{flag.field} {kind}")
    return "\n".join(sorted(lines)) + "\n"


def failure(argv: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the problems printed for an invalid command line."""
    with pytest.raises(SystemExit) as exit:
        command_line(argv.split(), Launch())
    assert exit.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return [line.strip() for line in err.splitlines()[1:]]


def index() -> str:
    """Return one line for each built-in extension that has flags. The line contains the name of the extension and the
    spellings of its flags."""
    prefix, spellings = f"{extensions.__name__}.", dict[str, list[str]]()
    for spelling, (flag, _) in spelling_table().items():
        module = sections()[flag.section].__module__
        if module.startswith(prefix):
            spellings.setdefault(module.removeprefix(prefix).split(".")[1], []).append(spelling)
    for name in COMMANDS:
        if extension := _extension_of(COMMANDS.where(name)):
            spellings.setdefault(extension, []).extend(COMMANDS.facts(name).options)
    for flag in all_flags():
        if isinstance(choices := flag.spec.choices, Registry | MixerNames | RecomputedParts | RouterValues):
            for name in choices:
                extension = _extension_of(choices.where(name))
                own = spellings.setdefault(extension, []) if extension else [flag.name]
                if flag.name not in own:
                    own.append(f"{flag.name}={name}")
    return "".join(f"{name}: {' '.join(sorted(spellings[name]))}\n" for name in sorted(spellings))


def _extension_of(place: str) -> str | None:
    """Return the name of the built-in extension that contains `place`, which is the `FILE:LINE` of a registration.
    Return None if `place` is not in an extension."""
    folder = Path(place.rpartition(":")[0]).parent
    return folder.name if folder.parent.parent == extensions.INDEX.parent else None


def test_the_set_of_flags_is_frozen() -> None:
    """User scripts rely on the names of flags. To accept a change of flags, run `python -m tests.pure.test_arguments`
    and record the change in the changelog."""
    installed = {None, *(extension.name for extension in extensions.BUILT_IN)}
    lines = GOLDEN.read_text().splitlines(keepends=True)
    assert surface() == "".join(line for line in lines if home_of(line.split()[0]) in installed)
    there = [line for line in extensions.INDEX.read_text().splitlines(keepends=True) if line.split(":")[0] in installed]
    assert index() == "".join(there)


def test_every_field_has_help_and_a_unique_name() -> None:
    names = [field.name for cls in sections().values() for field in fields(cls) if field.name != "extension_options"]
    assert len(names) == len(set(names)) == len(all_flags())
    for section, cls in sections().items():
        docs = field_docs(cls)
        for flag in (flag for flag in all_flags() if flag.section == section):
            assert docs.get(flag.field), f"{flag.field} has no help"


@pytest.mark.parametrize(
    ("argv", "section", "field", "value"),
    [
        ("--tp 4", "parallel", "tensor_model_parallel_size", 4),
        ("--learning-rate 1.0e-4", "optimizer", "lr", 1e-4),
        ("--train-tokens 300e9", "training", "train_tokens", 300_000_000_000),
        ("--train-samples 1_000_000", "training", "train_samples", 1_000_000),
        ("--loss-scale-window 1000.0", "optimizer", "loss_scale_window", 1000),
        ("--lr-warmup-fraction .01", "optimizer", "lr_warmup_fraction", 0.01),
        ("--no-use-distributed-optimizer", "optimizer", "use_distributed_optimizer", False),
        ("--no-load-optim", "checkpoint", "load_optim", False),
        ("--disable-bias-linear --add-bias-linear", "model", "add_bias_linear", True),
        ("--deterministic-mode", "training", "deterministic", True),
        ("--window-size 4096", "model", "window_size", 4096),
        ("--window-size 4095,0", "model", "window_size", 4096),
        ("--data-path 0.3 a 0.7 b --bf16", "data", "data_path", ("0.3", "a", "0.7", "b")),
        ("--iterations-to-skip 16 8 300000", "checks", "iterations_to_skip", (16, 8, 300000)),
    ],
)
def test_flag_values_are_parsed(argv: str, section: str, field: str, value: Any) -> None:
    found = getattr(getattr(parse_args(argv.split()), section), field)
    assert found == value
    assert type(found) is type(value)


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = " nor ".join(["neither this program", *FOREIGN_PROGRAMS]) if FOREIGN_PROGRAMS else "no extension"
    lines = failure(
        "--num-layer 30 --hidden-size x --pipeline-schedule 1f1 "
        "--swiglu yes --gibberish --tp 3 --world-size 8 --dry-run --seed 1 2 "
        "--cp-comm-type ring --lr 3",
        capsys,
    )
    for line in (
        "--num-layer 30: unknown flag; did you mean --num-layers?",
        "--hidden-size x: must be a whole number; for example 2, 1_000_000 or 1e6",
        f"--pipeline-schedule 1f1: must be one of {', '.join(PIPELINE_SCHEDULES)}; nearest: 1f1b",
        "--swiglu yes: takes no value except true or false; write the flag alone",
        f"--gibberish: unknown flag; {nobody} has this flag; remove it",
        "--seed 1 2: takes one value; given: 2",
        "--cp-comm-type ring: must be one of p2p, all_gather, a2a, a2a+p2p; pick one of them",
    ):
        assert line in lines
    # Validation problems are listed too, except problems that only result from a misspelled flag.
    assert any(line.startswith("world size 8: must be a multiple of TP 3") for line in lines)
    assert any(line.startswith("--num-attention-heads: is required") for line in lines)
    assert not any(line.startswith(("--num-layers:", "--hidden-size:", "--lr:")) for line in lines)


@pytest.mark.parametrize("text", ["", " ", "\t", "a\x1bb", "a\nb", "\x7f"])
def test_no_flag_accepts_an_invisible_value(text: str) -> None:
    """A script passes an empty value if a shell variable is not set, and white space if it contains `$'\\t'`. Neither
    value may be ignored or be read as a path or a name."""
    takers = [flag for flag in all_flags() if flag.kind is not bool and not (flag.spec.empty_is_none and not text)]
    named = [flag.name for flag in takers] + [name for name, option in options().items() if option.usage]
    reader = FlagReader()
    reader.read_all(list(tokens_of([word for name in named for word in (name, text)])))
    rule = ("is only white space" if text else "is empty") if not text.strip() else "has the control character U+00"
    assert [problem.flag for problem in reader.problems if rule in str(problem)] == named
    assert reader.values == {} and reader.options == {}


def test_an_empty_value_of_a_dashboard_is_none() -> None:
    reader = FlagReader()
    reader.read_all([(flag.name, [""]) for flag in all_flags() if flag.spec.empty_is_none])
    assert not reader.problems and set(reader.values.values()) <= {None}


def test_quoted_blanks_after_a_flag_are_ignored(tmp_path: Path) -> None:
    assert not read_flags(["--swiglu", " ", "--lr", "1e-3", " ", "--data-path", "a", "b", "\t"]).problems
    (tmp_path / "run.yaml").write_text('tokenizer-model: " "\n')
    (problem,) = read_flags(["--config", str(tmp_path / "run.yaml")]).problems
    assert "tokenizer-model ' ': is only white space; give a value, or remove the flag" in str(problem)


@pytest.mark.parametrize(
    "words", [["--load", ""], ["--load", " "], ["--name", "\t"], ["--several", "a", ""], ["", "x"]]
)
def test_no_tool_accepts_an_invisible_value(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = tool_parser("about")
    parser.add_argument("first", nargs="*", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--name", type=str)
    parser.add_argument("--several", nargs="+")
    parser.add_argument("--prompt", type=any_text)
    assert parser.parse_args(["a b", "--load", "b", "--prompt", "\n"]).prompt == "\n"
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    named = f"argument {words[0] or 'first'}: '{words[-1] if words[0] else ''}' is".replace("\t", "\\t")
    error = capsys.readouterr().err
    assert named in error and "; give a value, or remove the flag" in error
    assert "is empty" in error or "is only white space" in error


def test_the_last_of_two_values_counts_with_a_notice() -> None:
    command = command_line(f"{TINY} --lr 1 --learning-rate 2".split(), Launch())
    assert command.config.optimizer.lr == 2
    said = "--lr and --learning-rate are both given, with different values: the last one, --learning-rate 2.0, counts"
    assert command.notes[-1] == said
    twice = command_line(f"{TINY} --lr 1 --lr 2".split(), Launch())
    assert twice.notes[-1] == "--lr is given twice, with different values: the last one, --lr 2.0, counts"


def test_a_command_line_gives_a_configuration_and_a_world_size() -> None:
    assert command_line(TINY.split(), Launch()) == CommandLine(parse_args(TINY.split()))
    started = command_line(f"{TINY} --world-size 64".split(), Launch(world_size=64))
    assert (started.command, started.world_size) == (None, 64)


def test_only_one_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        command_line(["--nope"], Launch(rank=1, world_size=2, local_rank=1, launcher="torchrun"))
    assert exit.value.code == 2
    assert capsys.readouterr() == ("", "")


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_flags_override_a_config_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "num-layers: 4\nhidden_size: 64\nlr: 1e-4\nswiglu: true\ndisable-bias-linear: true\nload_optim: false\n"
        "data-path: [0.5, a, 0.5, b]\nsplit: 90,5,5\niterations-to-skip: [2, 2, 100]\nno-load-rng: false\nfp16:\n"
        "delay-grad-reduce: false\n",
    )
    command = command_line(["--config", path, "--hidden-size", "32"], Launch())
    config = command.config
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (4, 32, 1e-4)
    assert config.model.swiglu and not config.model.add_bias_linear and not config.checkpoint.load_optim
    assert config.checkpoint.load_rng and not config.parallel.fp16
    assert config.data.data_path == ("0.5", "a", "0.5", "b")
    assert config.data.split == "90,5,5"
    assert config.checks.iterations_to_skip == (2, 2, 100)
    assert command.notes == ()


@pytest.mark.parametrize(
    ("text", "flags", "replaced", "kept"),
    [
        ("train-tokens: 9", "--train-iters 5", "train_tokens", "train_iters"),
        ("train-iters: 9\nlr-warmup-iters: 2", "--train-tokens 1e6", "train_iters", "lr_warmup_iters"),
        ("lr-warmup-samples: 9", "--lr-warmup-iters 5", "lr_warmup_samples", "lr_warmup_iters"),
        ("lr-warmup-fraction: 0.1", "--lr-warmup-tokens 5", "lr_warmup_fraction", "lr_warmup_tokens"),
        ("lr-decay-iters: 9", "--lr-decay-samples 5", "lr_decay_iters", "lr_decay_samples"),
        ("lr-wsd-decay-iters: 9", "--lr-wsd-decay-samples 5", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        (
            "num-layers-per-virtual-pipeline-stage: 1",
            "--num-virtual-stages-per-pipeline-rank 2",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
        ),
    ],
)
def test_a_later_source_replaces_a_setting_in_another_unit(
    text: str, flags: str, replaced: str, kept: str, tmp_path: Path
) -> None:
    first, second = write(tmp_path, text), tmp_path / "second.yaml"
    name, value = flags.split()
    second.write_text(f"{name[2:]}: {value}\n")
    for later in (flags.split(), ["--config", str(second)]):
        values = flat_values(parse_args(["--config", first, *later]))
        assert not values[replaced] and values[kept]


def test_one_source_may_not_set_a_value_in_two_units(tmp_path: Path) -> None:
    values = flat_values(parse_args(["--config", write(tmp_path, "train-iters: 1\ntrain-samples: 2")]))
    # parsing accepts both values, but validation refuses the combination
    assert (values["train_iters"], values["train_samples"]) == (1, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hiden-size: 3", "hiden-size 3: unknown flag; did you mean --hidden-size?"),
        ("hidden-size: x", "hidden-size x: must be a whole number"),
        ("train-tokens: 1e30", "train-tokens 1e30: must not be larger than 2^53, about 9e15"),
        ("seed: true", "seed True: must be a whole number"),
        ("swiglu: 1", "swiglu 1: must be true or false"),
        ("model: {hidden-size: 3}", "model: must be a value, or a list of values; write flat names"),
        ("lr: 1\nlearning-rate: 1", "learning-rate 1: the file contains it twice, also as --lr"),
        ("lr: 1\nlr: 2", "lr 2: the file contains it twice"),
        ("- 3", "must be a mapping"),
        ("a: [", "give a readable YAML file"),
        ("world-size: 2", "world-size: is not configuration"),
        ("when: 2024-13-45", "when 2024-13-45: unknown flag"),
    ],
)
def test_problems_in_a_file_are_reported(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"run\.yaml") as error:
        parse_args(["--config", path])
    assert problem in str(error.value)


@pytest.mark.parametrize("content", [None, b"a: [", b"\xff\xfe"], ids=["missing", "no YAML", "no text"])
def test_values_of_an_unreadable_file_are_not_required(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    (problem,) = failure(f"--config {tmp_path / 'run.yaml'} --lr 1", capsys)
    assert problem.startswith(f"--config {tmp_path / 'run.yaml'}: cannot be read: ")
    assert len(failure(f"--config {tmp_path / 'run.yaml'} --lr x", capsys)) == 2


def test_saved_configuration_reads_back(tmp_path: Path) -> None:
    argv = (
        f"{TINY} --tp 2 --disable-bias-linear --no-load-rng --no-use-distributed-optimizer --window-size 8 "
        "--adam-eps 1e-12 --micro-batch-size 2 --fp16 --save checkpoints --split 90,5,5"
    )
    config = resolve(parse_args(argv.split()), 8)
    save_config(config, tmp_path / "deep" / "run.yaml")
    again = parse_args(["--config", str(tmp_path / "deep" / "run.yaml")])
    assert resolve(again, 8) == config
    # The file contains the batch size but not the number of ranks, so that it can be used with a different layout.
    assert again.training.global_batch_size == 8
    assert validate(again, 4) == validate(resolve(again, 4), 4) == []
    text = (tmp_path / "deep" / "run.yaml").read_text()
    assert "\n# derived: data-parallel-size: 4\n" in text
    assert yaml.safe_load(text)["no-load-rng"] is True


def test_a_flag_resets_dependent_values_of_a_saved_configuration(tmp_path: Path) -> None:
    argv = f"{TINY} --swiglu --vocab-size 100 --lr-warmup-tokens 640 --train-tokens 1600"
    config = resolve(parse_args(argv.split()), 4, vocab_size=120)
    save_config(config, tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    for derived in ("kv-channels", "ffn-hidden-size", "vocab-size: 120", "lr-warmup-samples"):
        assert f"\n# derived: {derived}" in text
    again = ["--config", str(tmp_path / "run.yaml")]
    assert resolve(parse_args(again), 4, vocab_size=120) == config
    wider = resolve(parse_args([*again, "--hidden-size", "128"]), 2)
    fresh = resolve(parse_args([*argv.split(), "--hidden-size", "128", "--global-batch-size", "4"]), 2)
    assert wider == fresh
    assert (wider.model.kv_channels, wider.model.ffn_hidden_size) == (32, 320)


def test_help_is_fast_and_complete() -> None:
    code = (
        "import sys\nfrom megatron.extensions import load\n"
        "from megatron.training.config.arguments import command_line\nload()\n"
        "try: command_line(['--help', 'all'])\n"
        "except SystemExit as exit: sys.exit(exit.code or bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = python_apart("-c", code, code=0)
    for flag in all_flags():
        for spelling in flag.shown:
            assert f"{spelling}" in done.stdout
    assert "Width h of the residual stream." in done.stdout
    assert "--use-distributed-optimizer, --no-use-distributed-optimizer" in done.stdout


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        command_line(argv)
    return capsys.readouterr().out


def test_help_can_be_searched_and_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    about = said(capsys, "--help", "window", "SIZE")
    assert "--window-size" in about and "--num-layers" not in about
    assert "no flag is about nonsense" in said(capsys, "--help", "nonsense")
    short = said(capsys, "--help")
    assert "--num-layers INT                Number of transformer layers. (required)" in short
    names = [line.split()[0].rstrip(",") for line in short.splitlines() if line.startswith("  --")]
    assert len(set(names) & spelling_table().keys()) == sum(flag.spec.first_run for flag in all_flags()) < 50
    assert "--help all prints all" in short and "\n  parallelism and precision; model;" in short
    group = said(capsys, "--help", "checkpoints")
    assert group.startswith("checkpoints:\n  --save PATH") and "--lr" not in group and "--save-interval" in group
    sharding = " ".join(said(capsys, "--help", "data-parallel-sharding-strategy").split())
    assert "optim: optimizer state (ZeRO-1)." in sharding
    assert ("ZeRO-2" in sharding) == ("optim_grads" in sharding)
    assert said(capsys, "--version").startswith("pretrain_gpt 0.")


def test_switches_may_say_true_or_false() -> None:
    assert parse_args(["--mock-data=true", "--swiglu", "false"]).data.mock_data
    assert not parse_args(["--swiglu", "--swiglu=False"]).model.swiglu
    assert parse_args(["--no-async-save=true"]).checkpoint.async_save is False
    with pytest.raises(ValueError, match="--mock-data 1: takes no value except true or false; write the flag alone"):
        parse_args(["--mock-data=1"])


if __name__ == "__main__":
    extensions.load()
    GOLDEN.write_text(surface())
    extensions.INDEX.write_text(index())


def test_an_unregistered_part_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(MIXERS, "_entries", {name: MIXERS._entries[name] for name in ATTENTION_MODULES})
    rule = "--experimental-attention-variant x: must name a part, but none is registered; give the --extension that"
    assert any(rule in line for line in failure("--experimental-attention-variant x", capsys))

"""Translate a command or launch script of Megatron-LM or Megatron-DeepSpeed to this program's flags.

    python tools/translate_flags.py train_gpt3_175b_distributed.sh [ARGUMENT ...]
    python tools/translate_flags.py -- --num-layers 24 --checkpoint-activations --deepspeed
    python tools/translate_flags.py --list

The tool prints the translated flags. Below the flags, it prints each change with its reason, and how the results differ
from Megatron-LM's results. A script is parsed, not run: variables that it assigns are replaced with their values or
defaults. Other variables stay unchanged in the output, and the tool lists them. Arithmetic is evaluated. A numeric flag
is not translated if its value depends on a variable without a value. A branch of the script is included if its
condition is true or unknown. The tool prints the flags from branches with an unknown condition to stderr. If the script
has #SBATCH lines, the command submits scripts/train_gpt_slurm.sh with the options in these lines. The exit code is 1 if
a flag cannot be translated, and 2 if the file is not a launch script. --list prints the translation of every flag that
this program lacks, and all differences in results.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"
from megatron.extensions.interop import megatron_flags
from megatron.extensions.interop.megatron_flags.megatron_differences import DIFFERENCES, differences_met
from megatron.extensions.interop.megatron_flags.tables import subject
from megatron.training.config.arguments import config_of, read_flags
from megatron.training.config.problem import any_text
from megatron.training.config.reading import FlagReader, Reading, tokens_of
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve

from .common import add_extension_flag, parted, run_tool, tool_parser
from .common.batch_options import batch_options, slurm_variables
from .common.hybrid_ratios import computed_pattern
from .common.launch_script import LaunchScript
from .common.shell_variables import FROM_ENVIRONMENT, NAME, ExpansionError, ShellVariables
from .common.shell_words import UNKNOWN, quoted

LAUNCHER = re.compile(
    r"--(nproc|nnodes|node[-_]rank|master[-_]|rdzv|max[-_]restarts|tee|log[-_]dir|hostfile|num_gpus|num_nodes)"
)

TABLES = Path(megatron_flags.__file__).with_name("megatron_flags.toml")
"""File of tables that describe Megatron-LM flags for which this program has no configuration field. The command-line
parser of pretrain_gpt.py also reads these tables."""

TASKS = re.compile(r"(--ntasks(-per-node)?|-n)\b")
"""sbatch options for the number of processes."""

SETTINGS = re.compile(r"^\s*(module|ml|source|export)\s", re.M)
"""Commands that prepare the environment of a job."""

IN_JOB = re.compile(r"\$\{?(SLURM_\w+)")
COMMAND = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
"""Pattern of a command substitution."""

NO_SCRIPT = "no launch script: no command in it starts a program with flags"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, parted(argv)[0])
    parser.add_argument("script", nargs="?", type=Path, help="launch script; alternatively, give flags after --")
    parser.add_argument("arguments", type=any_text, nargs="*", help="arguments of the script: its $1, $2, ...")
    parser.add_argument(
        "--list",
        action="store_true",
        help="print all flags that are translated, ignored or refused, and the differences in results",
    )
    own, flags = parted(argv)
    args = parser.parse_args(own)
    args.flags = flags
    if bool(args.script) + bool(args.flags) + args.list != 1:
        parser.error("give a script, or flags after --, or --list")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.list:
        print(*lines_of_all_flags(tomllib.loads(TABLES.read_text(encoding="utf-8"))), sep="\n")
        return 0
    script = read_script(args.script, args.arguments) if args.script else None
    words = script.flags() if script else args.flags
    tokens = [(name, values) for name, values in tokens_of(words) if name.startswith("--")]
    if not tokens:
        raise ValueError(f"{args.script or ' '.join(words)}: {NO_SCRIPT if args.script else 'holds no flags'}")
    pattern = computed_pattern(tokens)
    tokens += [pattern] if pattern else []
    argv_of_script = [word for name, values in tokens if not LAUNCHER.match(name) for word in (name, *values)]
    reader = read_flags(argv_of_script, args.script)
    groups = defaultdict[str, list[Reading]](list)
    for reading in reader.readings:
        kind, reading = sorted_out(reading)
        groups[kind].append(reading)
    changed, refused = groups["Changed"], groups["Not translated"]
    text = script.text if script else ""
    batch = list(batch_options(text))
    print(" \\\n    ".join([*(["sbatch", *kept_options(batch)] if batch else []), f"{program(batch)} \\"]))
    print(" \\\n".join(f"    {shown(reading.ours)}" for reading in [*groups["Kept"], *changed]))
    for title in ("Changed", "Without effect here", "Not translated"):
        if groups[title]:
            print(f"\n{title}:")
        for reading in groups[title]:
            because = f": {reading.why}" if reading.why else ""
            if title == "Not translated" and any(UNKNOWN.search(word) for word in reading.given):
                because += line_of(text, reading.given[0])
            becomes = f" -> {shown(reading.ours)}" if reading.ours and not reading.problem else ""
            print(f"  {shown(reading.given)}{becomes}{because}")
    if pattern:
        print(f"\nComputed from the shares of layers, as Megatron-LM does:\n  {shown([pattern[0], *pattern[1]])}")
    for line in [*lines_on_batch(batch, text), *lines_on_values([*groups["Kept"], *changed], script)]:
        print(line)
    if differences := list(differences_met(resolved(reader), reader.spelled)):
        print("\nDifferent from Megatron-LM:", *differences, sep="\n  ")
    return 1 if refused else 0


def lines_of_all_flags(tables: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each Megatron-LM flag or value that is translated, has no effect, or is not supported. Then
    yield one line for each difference in results."""
    yield "Translated to other flags ({} stands for the values):"
    yield from (f"  {flag} -> {ours}" for flag, ours in sorted((tables["usual"] | tables["replaced"]).items()))
    for flag, (option, before, after) in tables["exchanged"].items():
        yield f"  {flag} -> {option} {after} in place of {'any value' if before == 'any' else before}"
    for flag, values in sorted(tables["same_values"].items()):
        yield from (f"  {flag} {value} -> {ours}" for value, ours in values.items())
    yield "\nValues that an example registers; load the example with --extension:"
    yield from (f"  {value}: examples/{file}" for value, file in sorted(tables["examples"].items()))
    yield "\nWithout effect:"
    for group in sorted(tables["no_effect"], key=lambda group: group["reason"]):
        only = f" ({' or '.join(group['values'])} only)" if group.get("values") else ""
        yield f"  {' '.join(group['flags'])}{only}: {group['reason']}"
    yield "\nNot built, refused (settings have no effect without the feature):"
    for group in sorted(tables["not_built"], key=lambda group: group["feature"]):
        flags = [*group.get("flags", ()), *(f"{prefix}..." for prefix in group.get("prefixes", ()))]
        feature = group["feature"]
        if switch := group.get("switch"):
            feature = f"settings of {subject(feature)}, which {' '.join(switch)} turns on"
        remedy = f"; {group['remedy']}" if "remedy" in group else ""
        if beside := group.get("beside"):
            remedy += f"; no effect with {' or '.join(beside)}: {group['reason']}"
        yield f"  {' '.join(flags)}: {feature}{remedy}"
    for flag, values in tables["values_not_built"].items():
        yield from (f"  {flag} {value}: {feature}" for value, feature in values.items())
    yield from (f"  {flag} with several values: {what}" for flag, what in tables["several_not_built"].items())
    yield "\nResults that differ from Megatron-LM's under equal flags:"
    yield from (f"  {difference}" for difference in DIFFERENCES)


def resolved(reader: FlagReader) -> RunConfig:
    """Return the complete configuration that the flags determine. If the flags do not give the number of ranks, assume
    one data-parallel rank for each micro-batch of the global batch."""
    config = config_of(reader.values)
    replicas = max(1, (config.training.global_batch_size or 1) // max(1, config.training.micro_batch_size))
    return resolve(config, reader.world_size or max(1, config.parallel.model_parallel_size) * replicas)


def read_script(path: Path, arguments: Sequence[str] = ()) -> LaunchScript:
    """Read a launch script as if it were called with `arguments`. Print the flags from branches whose condition is
    unknown."""
    try:
        text = path.read_text(encoding="utf-8")
        values: dict[str, str | list[str]] = dict(slurm_variables(list(batch_options(text))))
        values |= {str(number): text for number, text in enumerate(arguments, 1)}
        script = LaunchScript(text, ShellVariables(values))
    except ExpansionError as error:
        raise ValueError(f"{path}: {error}; if a variable refers to itself, give the flags after --") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: {NO_SCRIPT}") from None
    words = script.flags()
    if unsure := [word for word in dict.fromkeys(script.unsure) if word in words]:
        print(f"flags from a branch whose condition is unknown: {' '.join(unsure)}", file=sys.stderr)
    return script


def kept_options(batch: Sequence[Sequence[str]]) -> list[str]:
    return [shown(words) for words in batch if not TASKS.match(words[0])]


def program(batch: Sequence[Sequence[str]]) -> str:
    return "scripts/train_gpt_slurm.sh pretrain_gpt.py" if batch else "pretrain_gpt.py"


def lines_on_batch(batch: Sequence[Sequence[str]], text: str) -> Iterator[str]:
    """Yield lines about the differences between the script's job options and scripts/train_gpt_slurm.sh."""
    if dropped := [shown(words) for words in batch if TASKS.match(words[0])]:
        yield "\nOptions of sbatch that are left out:"
        why = "not needed, because scripts/train_gpt_slurm.sh starts one process per GPU"
        yield from (f"  {option}: {why}" for option in dropped)
    if batch and SETTINGS.search(text):
        yield "\nSettings of the environment:"
        yield "  module, source and export: put those that you need into a file, and run SETUP_FILE=FILE sbatch ..."


def lines_on_values(readings: Sequence[Reading], script: LaunchScript | None) -> Iterator[str]:
    """Yield lines that list the unknown tests and unset variables that affect values in the translated command."""
    if script and script.choices:
        yield "\nValues that depend on an unknown test:"
        for name, values in script.choices.items():
            yield f"  {name}: {' or '.join(dict.fromkeys(value or 'nothing' for value in values))}; read as the last"
    if script and script.variables.read_as_unset:
        yield "\nTreated as unset in tests, because the script does not set them:"
        yield f"  {' '.join(script.variables.read_as_unset)}"
    flags_of = defaultdict[str, list[str]](list)
    for reading in readings:
        for match in NAME.finditer(" ".join(reading.ours)):
            name = match[1] or match[2]
            if not FROM_ENVIRONMENT.fullmatch(name):
                flags_of[f"${name}"].append(reading.ours[0])
    if flags_of:
        yield "\nVariables that the script does not set; set them before you run the command:"
        yield from (f"  {name} ({', '.join(dict.fromkeys(flags))})" for name, flags in flags_of.items())
    in_job = [name for reading in readings for word in reading.ours for name in IN_JOB.findall(word)]
    if in_job:
        yield "\nVariables that exist only in a Slurm job; replace them if you run the command elsewhere:"
        yield f"  {' '.join(dict.fromkeys(in_job))}"


def why_not_computed(words: Sequence[str]) -> str:
    """Return the reason why the arithmetic in some words cannot be evaluated, or "" if all of it was evaluated."""
    sums = [word[word.index("$((") :] for word in words if "$((" in word]
    if not sums:
        return ""
    names = [name for each in sums for name in re.findall(r"(?<!\w)(?:[A-Za-z_]\w*|(?<=\$)\d)", COMMAND.sub("", each))]
    if not names:
        return "only a shell computes this value; give a number"
    return f"the script gives no value to {' or '.join(dict.fromkeys(names))}; give a number"


def line_of(text: str, flag: str) -> str:
    """Return the lines of the script that contain the flag, such as " (line 3 and 7)". Return "" if no line contains
    it."""
    lines = enumerate(text.splitlines(), 1)
    numbers = [str(number) for number, line in lines if re.search(rf"{re.escape(flag)}(?![\w-])", line)]
    return f" (line {' and '.join(numbers)})" if numbers else ""


def shown(words: Sequence[str]) -> str:
    return " ".join(map(quoted, words))


def sorted_out(reading: Reading) -> tuple[str, Reading]:
    """Return the heading under which to list a flag, such as "Not translated", together with the translation of the
    flag. A value that only a shell can compute is not reported as a problem."""
    if why := why_not_computed(reading.given):
        return "Not translated", replace(reading, problem=True, why=why)
    if reading.problem and reading.ours and any(UNKNOWN.search(word) for word in reading.ours):
        reading = replace(reading, problem=False)
    if reading.problem:
        return "Not translated", reading
    if not reading.ours:
        return "Without effect here", reading
    return "Kept" if reading.ours == reading.given else "Changed", reading


if __name__ == "__main__":
    run_tool(main)

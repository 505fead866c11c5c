"""Translate a command or launch script of Megatron-LM or Megatron-DeepSpeed to this program's flags.

    python tools/translate_flags.py train_gpt3_175b_distributed.sh
    python tools/translate_flags.py -- --num-layers 24 --checkpoint-activations --deepspeed

Prints the flags of this program, and below them what changed and why, and where results differ from Megatron-LM's. A
script is read, not run: variables that it assigns are replaced by their values or defaults, in the order of the lines
and in all branches; others stay as they are. Exit code 1 if a flag has no translation.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"
from megatron.extensions.megatron_flags.megatron_differences import differences_met
from megatron.training.config.arguments import config_of, read_flags
from megatron.training.config.reading import FlagReader, Reading, tokens_of
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve

from .common import run_tool

LAUNCHER = re.compile(
    r"--(nproc|nnodes|node[-_]rank|master[-_]|rdzv|max[-_]restarts|tee|log[-_]dir|hostfile|num_gpus|num_nodes)"
)
ASSIGNMENT = re.compile(
    r"""^[ \t]*(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(\([^()]*\)|"(?:[^"\\]|\\.)*"|'[^']*'|\S*)""", re.M | re.S
)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?:(:?[-=+])([^}]*))?\}|(\w+))")
COMPUTED = re.compile(r"\$\(\([^\n]*?\)\)|\$\([^()\n]*\)|`[^`\n]*`|\$\{#\w+\}")
"""What only a shell can compute: it stays as one word."""

HIDDEN = str.maketrans(" ()", "\0\1\2"), str.maketrans("\0\1\2", " ()")
"""Blanks and parentheses within what stays one word, hidden and shown."""

COMMENT = re.compile(r"(^|\s)#.*")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", type=Path, help="launch script; instead, give flags behind --")
    parser.add_argument("flags", nargs="*", help="flags of Megatron-LM or Megatron-DeepSpeed, behind --")
    argv = sys.argv[1:] if argv is None else list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.flags = argv[cut + 1 :]
    if bool(args.script) == bool(args.flags):
        parser.error("give a script, or flags behind --")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    words = list(words_of_script(_text_of(args.script))) if args.script else args.flags
    tokens = [(name, values) for name, values in tokens_of(words) if name.startswith("--")]
    if not tokens:
        raise ValueError(f"{args.script}: holds no flags")
    reader = read_flags([word for name, values in tokens if not LAUNCHER.match(name) for word in (name, *values)])
    kept, changed, dropped, refused = sorted_out(reader.readings)
    print("pretrain_gpt.py \\")
    print(" \\\n".join(f"    {shlex.join(reading.ours)}" for reading in [*kept, *changed]))
    for title, readings in (("Changed", changed), ("Without effect here", dropped), ("Not translated", refused)):
        if readings:
            print(f"\n{title}:")
        for reading in readings:
            because = f": {reading.why}" if reading.why else ""
            becomes = f" -> {shlex.join(reading.ours)}" if reading.ours and not reading.problem else ""
            print(f"  {shlex.join(reading.given)}{becomes}{because}")
    if differences := list(differences_met(resolved(reader), reader.spelled)):
        print("\nDifferent from Megatron-LM:", *differences, sep="\n  ")
    return 1 if refused else 0


def resolved(reader: FlagReader) -> RunConfig:
    """The configuration as far as the flags say it, on as many ranks as its batches have micro-batches."""
    config = config_of(reader.values)
    replicas = max(1, (config.training.global_batch_size or 1) // max(1, config.training.micro_batch_size))
    return resolve(config, reader.world_size or max(1, config.parallel.model_parallel_size) * replicas)


def _text_of(script: Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{script}: is not a text file") from None


def sorted_out(readings: Sequence[Reading]) -> tuple[list[Reading], list[Reading], list[Reading], list[Reading]]:
    """Those that are flags here as they stand, are read as others, have no effect, and are problems."""
    kinds: tuple[list[Reading], ...] = ([], [], [], [])
    for reading in readings:
        if reading.problem and reading.ours and any("$" in word for word in reading.ours):
            reading = replace(reading, problem=False)  # a value that only the shell knows
        kinds[3 if reading.problem else 2 if not reading.ours else 1 if reading.ours != reading.given else 0].append(
            reading
        )
    return kinds[0], kinds[1], kinds[2], kinds[3]


def words_of_script(text: str) -> Iterator[str]:
    """Words of a shell script with its own variables replaced, from the first flag of each line on.

    Assignments count in the order in which they stand, those of all branches; of commands, those that train are read.
    """
    text = "\n".join(COMMENT.sub("", line) for line in text.splitlines())
    text = COMPUTED.sub(lambda found: found[0].translate(HIDDEN[0]), re.sub(r"\\\n", " ", text))
    values: dict[str, str] = {}
    for found in ASSIGNMENT.finditer(text):
        name, value = found[1], found[3][1:-1] if found[3][:1] in ("(", '"', "'") else found[3]
        value = _replaced(value, values, also=name)
        values[name] = f"{values.get(name, '')} {value}" if found[2] else value
    commands = [line for line in ASSIGNMENT.sub("", text).splitlines() if "--" in line or "$" in line]
    training = [line for line in commands if "pretrain" in line] or commands
    for line in training:
        inside_flags = False
        for word in _split(_replaced(line, values)):
            inside_flags = word.startswith("--") or (inside_flags and word not in ("&&", "|", ";", ">", "2>&1", "&"))
            if inside_flags and word not in ("$@", "$*"):
                yield word.translate(HIDDEN[1])


def _replaced(text: str, values: dict[str, str], also: str | None = None) -> str:
    """`text` with variables replaced by what the script has assigned to them so far, or by their default; others stay.
    `also` is empty if nothing has been assigned to it."""

    def value(found: re.Match[str]) -> str:
        name, operator, word = found[1] or found[4], found[2] or "", found[3] or ""
        known = values.get(name, "" if name == also else None)
        if operator.endswith("+"):
            return word if known else ""
        if operator and not known:
            return word
        return found[0] if known is None else known

    return VARIABLE.sub(value, text)


def _split(line: str) -> list[str]:
    """Words as a shell would split them, those of quoted commands too; quotes that do not match stay as they are."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    found = []
    for word in words:
        found += _split(word) if " " in word and "--" in word else [word]
    return found


if __name__ == "__main__":
    run_tool(main)

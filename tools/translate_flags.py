"""Translate a command or launch script of Megatron-LM or Megatron-DeepSpeed to this program's flags.

    python tools/translate_flags.py train_gpt3_175b_distributed.sh
    python tools/translate_flags.py -- --num-layers 24 --checkpoint-activations --deepspeed

Prints the flags of this program, and below them what changed and why. A script is read, not run: variables that it
assigns are replaced by their values or defaults, others stay as they are. Exit code 1 if a flag has no translation.
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
from megatron.training.config.reading import FlagReader, Reading, tokens_of

from .common import run_tool

LAUNCHER = re.compile(
    r"--(nproc|nnodes|node[-_]rank|master[-_]|rdzv|max[-_]restarts|tee|log[-_]dir|hostfile|num_gpus|num_nodes)"
)
ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)\+?=(\(.*?^[^#\n]*\)|\"(?:[^\"\\]|\\.)*\"|'[^']*'|\S*)", re.M | re.S
)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[@\])?(?::?[-=]([^}]*))?\}|(\w+))")
DEPTH = 20
"""Assignments that refer to each other are followed so far."""


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
    words = list(words_of_script(args.script.read_text(encoding="utf-8"))) if args.script else args.flags
    tokens = [(name, values) for name, values in tokens_of(words) if name.startswith("--")]
    if not tokens:
        raise ValueError(f"{args.script}: holds no flags")
    reader = FlagReader()
    reader.read_all([(name, values) for name, values in tokens if not LAUNCHER.match(name)])
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
    return 1 if refused else 0


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
    """Words of a shell script with its own variables replaced, from the first flag of each line on."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    values: dict[str, str] = {}
    for found in ASSIGNMENT.finditer(text):
        name, value = found[1], found[2][1:-1] if found[2][:1] in ("(", '"', "'") else found[2]
        values[name] = _replaced(value, {}, only=name)  # X=${X:-default}
    used = "\n".join(line for line in ASSIGNMENT.sub("", text).splitlines() if "--" in line or "$" in line)
    inside_flags = False
    for word in _split(_replaced(used, values)):
        inside_flags = word.startswith("--") or (inside_flags and word not in ("&&", "|", ";", ">", "2>&1"))
        if inside_flags:
            yield word


def _replaced(text: str, values: dict[str, str], only: str | None = None) -> str:
    """`text` with variables, or `only` one, replaced by what the script assigns to them, or by their default; others
    stay."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if only is not None and name != only:
            return found[0]
        return values.get(name, found[2] if found[2] is not None else found[0])

    for _ in range(DEPTH):
        replaced = VARIABLE.sub(value, text)
        if replaced == text:
            break
        text = replaced
    return text


def _split(text: str) -> list[str]:
    """Words as a shell would split them; quotes that do not match are taken as they stand."""
    words = []
    for line in text.splitlines():
        try:
            words += shlex.split(line, comments=True)
        except ValueError:
            words += line.split()
    return words


if __name__ == "__main__":
    run_tool(main)

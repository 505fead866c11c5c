"""Compare the flags of a Megatron-LM checkout with the flags that this program recognizes.

    python tools/compare_megatron_flags.py ~/Megatron-LM
    python tools/compare_megatron_flags.py ~/Megatron-LM --branch dev --write "Megatron-LM dev 1a2b3c4d (2026-09-30)"
    python tools/compare_megatron_flags.py

The tool prints the flags that are new, removed or changed since the version in the table
megatron_flags/flags_of_head.txt. For each new flag, the tool prints how this program treats the flag: the same,
translated, no effect, refused, or unknown. It then prints the number of flags with each treatment, and the flag choices
that this program does not recognize. The tool runs the code of the checkout in a separate process to build its argument
parser. --write updates the table for the given branch, and stores the given description of the version. The exit code
is 1 if a flag or a choice is unknown. Without a checkout, the tool only updates how this program treats each flag in
the table. Run the tool without a checkout after a flag has been added to this program.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"
from megatron.extensions.interop.megatron_flags.head_flags import (
    TABLE,
    UNKNOWN,
    Row,
    TheirFlag,
    changes,
    read_table,
    table_text,
    treatment,
    unknown_values,
)

from .common import run_tool, tool_parser

PARSER = Path(__file__).with_name("common") / "megatron_parser.py"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "checkout", type=Path, nargs="?", help="folder of a checkout that has megatron/training/arguments.py"
    )
    parser.add_argument(
        "--branch", choices=("main", "dev"), default="main", help="Megatron-LM branch to compare with (default: main)"
    )
    parser.add_argument("--write", metavar="VERSION", help="write the table, with this description of the version")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rows = read_table()
    if args.checkout is None:
        write_table(rows, {})
        return 0
    now = flags_of(args.checkout)
    before = [row.flag for row in rows if args.branch in row.branches.split()]
    for title, lines in changes(before, now).items():
        if lines:
            print(f"{title}:", *lines, sep="\n  ")
    counts = Counter(map(treatment, now))
    print(f"{len(now)} spellings:", ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    values = [f"{flag.name} {value}" for flag in now for value in unknown_values(flag)]
    if values:
        print("Unknown choices:", *values, sep="\n  ")
    if args.write:
        of_others = [replace(row, branches=row.branches.replace(args.branch, "").strip()) for row in rows]
        write_table([*of_others, *(Row(flag, args.branch, "") for flag in now)], {args.branch: args.write})
    return 1 if counts[UNKNOWN] or values else 0


def write_table(rows: Sequence[Row], versions: Mapping[str, str]) -> None:
    """Write the table of flags, with the current treatment of each flag. `versions` contains a new version description
    for each updated branch, keyed by branch."""
    parsers = {name: [row.flag for row in rows if name in row.branches.split()] for name in ("main", "dev")}
    stated = dict(line[2:].split(": ", 1) for line in TABLE.read_text(encoding="utf-8").splitlines()[:2])
    sources = [f"{name}: {version}" for name, version in {**stated, **versions}.items()]
    TABLE.write_text(table_text(parsers, sources), encoding="utf-8")


def flags_of(checkout: Path) -> list[TheirFlag]:
    """Return the flags of a Megatron-LM checkout. Raises ValueError if the checkout's argument parser cannot be
    built."""
    if not (checkout / "megatron" / "training" / "arguments.py").is_file():
        raise ValueError(f"{checkout}: has no megatron/training/arguments.py; give the folder of a checkout")
    built = subprocess.run([sys.executable, str(PARSER), str(checkout)], capture_output=True, text=True)
    if built.returncode:
        last = (built.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{checkout}: its parser cannot be built: {last}")
    listed = json.loads(built.stdout.strip().splitlines()[-1])
    return [TheirFlag(**each | {"choices": tuple(each["choices"])}) for each in listed]


if __name__ == "__main__":
    run_tool(main)

"""Compares the speed of two checkouts of this program, in turns: training steps, kinds of parallelism, start-up.

    git worktree add /tmp/before v0.1.0
    python tools/bench/revisions.py --before /tmp/before                     # every cell
    python tools/bench/revisions.py --before /tmp/before --only "gpt float32 eager" "ours TP"

The cells are those of speed.py and startup.py, this program's side alone. Each cell starts the steps
of both checkouts in processes of their own, which take turns. What counts is the median over the pairs of after /
before, in tokens per second; above 1 the newer one is faster. Start-up commands
are whole processes, compared in seconds; below 1 the newer one is faster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import speed, startup
from tools.bench.side_by_side import Contestant, Round, Spread, bench_parser, interleaved, machine, timed, write_json

ROOT = Path(__file__).resolve().parents[2]


def ours(steps: int) -> dict[str, Contestant]:
    """This program's training steps in speed.py, by name."""
    found = {}
    for name, cell in speed.cells(os.cpu_count() or 1, steps=steps).items():
        own = [each for each in cell.contestants if each.build is speed.ours and each.name != speed.ALONE]
        found |= {name if each.name == speed.OURS else each.name: each for each in own}
    return found


def commands() -> dict[str, list[str]]:
    """Those that start this program."""
    every = startup.COMMANDS.items()
    return {name: words for name, words in every if "pretrain_gpt.py" in words or name == "import megatron"}


def step_of(checkout: str, flags: Sequence[str], tokens: int, steps: int) -> Round:
    """Tokens per second of the program in `checkout`, which replaces whatever this process has imported of another."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron", "tools")]:
        del sys.modules[name]
    # A folder without __init__.py, as tools/ of an older revision, would yield to a package later in the path.
    sys.path[:] = [checkout, *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
    import megatron
    import tools.bench.side_by_side
    from tools.bench.side_by_side import own_step

    for module in (megatron, tools.bench.side_by_side):
        assert module.__file__ is not None and module.__file__.startswith(checkout), module.__file__
    return timed(own_step(list(flags)), steps, tokens)


def starts(checkout: str, what: str, command: Sequence[str]) -> Round:
    """Seconds of the command as a whole process."""
    until = startup.FIRST_LINE if what == startup.FIRST_STEP else None
    return lambda: startup.seconds_of(command, until, Path(checkout))[0]


@dataclass(frozen=True)
class Row:
    what: str
    before: Spread
    after: Spread
    ratio: Spread
    """after / before, pair by pair."""


def compare(what: str, before: Path, rounds: int, steps: int) -> Row | str:
    """The row of a cell, or what went wrong."""
    if what in commands():
        build, arguments, like = starts, (what, commands()[what]), Contestant(what, starts)
    else:
        like = ours(steps)[what]
        build, arguments = step_of, like.args
    sides = {"before": before, "after": ROOT}
    builds = [
        replace(like, name=name, build=build, args=(str(checkout), *arguments)) for name, checkout in sides.items()
    ]
    first, second = interleaved(builds, rounds).values()
    if isinstance(first, str) or isinstance(second, str):
        return first if isinstance(first, str) else str(second)
    return Row(what, *map(Spread.of, (first, second, [b / a for a, b in zip(first, second, strict=True)])))


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 7, steps=(2, "of a round"))
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older revision")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cells, not all")
    parser.add_argument("--list", action="store_true", help="print the names of the cells and exit")
    args = parser.parse_args(argv)
    every = [*ours(args.steps), *commands()]
    if args.list:
        print("\n".join(every))
        return 0
    if unknown := set(args.only or ()) - set(every):
        parser.error(f"--only: no cell is called {', '.join(sorted(unknown))}; --list prints the names")
    if not (args.before / "pretrain_gpt.py").exists():
        parser.error(f"--before {args.before}: holds no pretrain_gpt.py; give a checkout of this program")
    facts = machine()
    rows: list[Row] = []
    for what in args.only or every:
        found = compare(what, args.before.resolve(), args.rounds, args.steps)
        if isinstance(found, str):
            print(f"{what:<30} failed: {found}", flush=True)
            continue
        rows.append(found)
        unit, digits = ("tokens/s", 0) if what not in commands() else ("s", 3)
        values = f"{found.before.median:10,.{digits}f} {found.after.median:10,.{digits}f} {unit}"
        print(f"{what:<30} {values:<32} after / before {found.ratio:.3f}", flush=True)
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the speed of two checkouts of this program, in turns: training steps, kinds of parallelism, start-up.

    git worktree add /tmp/before v0.1.0
    python tools/bench/revisions.py --before /tmp/before                     # every cell
    python tools/bench/revisions.py --before /tmp/before --only "gpt float32 eager" "ours TP"

The cells are those of train_step.py, parallel.py and startup.py, this program's side alone. Each cell starts the steps
of both checkouts in processes of their own, which take turns. What counts is the median over the pairs of after /
before, in tokens per second; above 1 the newer one is faster. Start-up commands
are whole processes, compared in seconds; below 1 the newer one is faster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import parallel, startup, train_step
from tools.bench.side_by_side import (
    Contestant,
    Round,
    Spread,
    bench_parser,
    interleaved,
    machine,
    positive,
    say_machine,
    timed,
    write_json,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cell:
    """Training steps with such flags, in so many processes."""

    name: str
    flags: tuple[str, ...]
    tokens: int
    ranks: int = 1
    threads: int = 1


def cells() -> Iterator[Cell]:
    """Every cell of the two benchmarks of training steps."""
    for style_name, style in train_step.STYLES.items():
        for dtype in ("float32", "bfloat16"):
            for mode in ("eager", "compiled"):
                flags = train_step.flags(style, dtype, mode == "compiled")
                name = f"{style_name} {dtype} {mode}"
                yield Cell(name, tuple(flags), style.tokens, threads=os.cpu_count() or 1)
    for name, flags in parallel.our_layouts(2).items():
        yield Cell(name, tuple(f"{parallel.MODEL} {flags}".split()), parallel.TOKENS, ranks=2)


def step_of(checkout: str, flags: Sequence[str], steps: int, tokens: int) -> Round:
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


@dataclass(frozen=True)
class Row:
    what: str
    before: Spread
    after: Spread
    ratio: Spread
    """after / before, pair by pair."""


def row_of(what: str, before: Sequence[float], after: Sequence[float]) -> Row:
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return Row(what, Spread.of(before), Spread.of(after), Spread.of(ratios))


def compare_steps(cell: Cell, before: Path, rounds: int, steps: int) -> Row | str:
    """The row of a cell, or what went wrong."""
    builds = [
        Contestant(name, step_of, (str(checkout), cell.flags, steps, cell.tokens), cell.threads, cell.ranks)
        for name, checkout in (("before", before), ("after", ROOT))
    ]
    found = interleaved(builds, rounds)
    for values in found.values():
        if isinstance(values, str):
            return values
    first, second = found["before"], found["after"]
    assert not isinstance(first, str) and not isinstance(second, str)
    return row_of(cell.name, first, second)


def compare_commands(what: str, seconds: Callable[[Path], float], before: Path, rounds: int) -> Row:
    """The row of a command that both checkouts run as a whole process."""
    found: dict[Path, list[float]] = {before: [], ROOT: []}
    for number in range(-1, rounds):
        for checkout in (before, ROOT) if number % 2 else (ROOT, before):
            taken = seconds(checkout)
            if number >= 0:
                found[checkout].append(taken)
    return row_of(what, found[before], found[ROOT])


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 7)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older revision")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cells, not all")
    parser.add_argument("--steps", type=positive, default=2, help="of a round")
    parser.add_argument("--list", action="store_true", help="print the names of the cells and exit")
    args = parser.parse_args(argv)
    commands = {
        name: command
        for name, command in startup.COMMANDS.items()
        if "pretrain_gpt.py" in command or name == "import megatron"
    }
    names = [*(cell.name for cell in cells()), *commands]
    if args.list:
        print("\n".join(names))
        return 0
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only: no cell is called {', '.join(sorted(unknown))}; --list prints the names")
    if not (args.before / "pretrain_gpt.py").exists():
        parser.error(f"--before {args.before}: holds no pretrain_gpt.py; give a checkout of this program")
    before = args.before.resolve()
    facts = machine()
    say_machine(facts)
    rows: list[Row] = []

    def say(found: Row | str, what: str, unit: str, digits: int) -> None:
        if isinstance(found, str):
            print(f"{what:<30} failed: {found}", flush=True)
            return
        rows.append(found)
        values = f"{found.before.median:10,.{digits}f} {found.after.median:10,.{digits}f} {unit}"
        print(f"{what:<30} {values:<32} after / before {found.ratio:.3f}", flush=True)

    for cell in cells():
        if args.only is None or cell.name in args.only:
            say(compare_steps(cell, before, args.rounds, args.steps), cell.name, "tokens/s", 0)
    for what, command in commands.items():
        if args.only is None or what in args.only:
            until = r"iteration +1/" if what == startup.FIRST_STEP else None

            def seconds(checkout: Path, command: Sequence[str] = command, until: str | None = until) -> float:
                return startup.seconds_of(command, until, checkout)[0]

            say(compare_commands(what, seconds, before, args.rounds), what, "s", 3)
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

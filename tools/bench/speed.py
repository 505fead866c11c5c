"""Compare the speed of training, parallel layouts and start-up with the limits of the machine or with an older
revision.

    python tools/bench/speed.py --list                                               # the cells
    python tools/bench/speed.py --only "llama float32 eager" --rounds 7
    python tools/bench/speed.py --only TP "ours ZeRO-2" "ours ZeRO-3" --ranks 4      # a cell, and two rows of another
    python tools/bench/speed.py                                                      # all
    python tools/bench/speed.py --only "ours TP" start-up --before /tmp/older        # a `git worktree add` of it

A cell is a group of programs (contestants) that are compared. The contestants run in separate processes, and their
rounds are interleaved. research/speed.py adds other programs to the cells.

In single-process cells, a step includes the optimizer step. The speed is compared with an upper limit: the speed of the
forward and backward GEMMs of the linear layers and the output layer alone, in the same precision.

The TP, PP and DP cells train 8 micro-batches of one sequence per step in float32 on single-threaded gloo processes.
The TP, PP and DP contestants are compared with one process that has as many threads as all of their processes together.
Two rows show upper bounds on the speed of this machine. In the first row, processes share the batch but never
communicate. In the second row, tensor-parallel layers skip their collectives, so that the results are wrong but all
computation is done.

The packed-CP cell measures how documents of different lengths are divided under context parallelism. Most documents are
short, and some are about half as long as a sample. With such lengths, the work of the default chunks differs most
between ranks. Attention takes most of the step. The result is based on the processor time of the busiest rank, because
the other ranks wait for this rank. Unlike elapsed time, processor time hardly depends on other programs on the machine.
In each round, all contestants train on the same samples.

The start-up cell measures how many seconds commands take in a new Python interpreter, and compares them with an
interpreter that only imports torch.

--before compares this checkout with another one, round by round, and prints the median of the ratios after / before.
A higher ratio is better for tokens per second, and a lower ratio is better for seconds."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import (
    DIGITS,
    Contestant,
    Round,
    Spread,
    bench_parser,
    compared,
    forget,
    interleaved,
    machine,
    own_step,
    positive,
    say_rows,
    timed,
    write_json,
)
from tools.bench.styles import STYLES, Style

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = {"float32": [], "bfloat16": ["--bf16"]}
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
LR = 1e-4
OURS = "ours"
CEILING = "ceiling"
ALONE = "one process"
ROOT = Path(__file__).resolve().parents[2]
LAYOUT_STYLE, MICRO_BATCHES = Style(8, 384, 4, 4, 1024, 256, 8192, 1, llama=True), 8
LAYOUTS = {
    "ours TP": "--tp {n}",
    "ours TP+SP": "--tp {n} --sequence-parallel",
    "ours TP+SP overlapped": "--tp {n} --sequence-parallel --tp-comm-overlap",
    "ours PP 1f1b": "--pp {n} --pipeline-schedule 1f1b",
    "ours PP interleaved": "--pp {n} --pipeline-schedule interleaved",
    "ours PP zb-h1": "--pp {n} --pipeline-schedule zb-h1",
    "ours PP zb-v": "--pp {n} --pipeline-schedule zb-v",
    "ours DP": "--dp {n} --no-use-distributed-optimizer --overlap-grad-reduce",
    "ours ZeRO-1": "--dp {n} --overlap-grad-reduce --overlap-param-gather",
    "ours ZeRO-2": "--dp {n} --data-parallel-sharding-strategy optim_grads",
    "ours ZeRO-3": "--dp {n} --data-parallel-sharding-strategy optim_grads_params",
    "ours CP": "--cp {n}",
}
"""Flags that select a parallel layout on {n} ranks, keyed by the name of the contestant."""


def flags(style: Style, dtype: str = "float32", compiled: bool = False, micro_batches: int = 1) -> list[str]:
    """Return the command-line flags of this program that train a model of the given style."""
    text = (
        f"--num-layers {style.layers} --hidden-size {style.hidden} --num-attention-heads {style.heads} "
        f"--ffn-hidden-size {style.ffn} --seq-length {style.seq} --max-position-embeddings {style.seq} "
        f"--vocab-size {style.vocab} --micro-batch-size {style.micro_batch} "
        f"--global-batch-size {style.micro_batch * micro_batches} "
        f"--attention-dropout 0 --hidden-dropout 0 --mock-data --train-iters 1000000 --eval-iters 0 --lr {LR} "
        f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS} --weight-decay {WEIGHT_DECAY} --cpu"
    ).split()
    if style.llama:
        text += (
            f"--group-query-attention --num-query-groups {style.groups} --position-embedding-type rope --swiglu "
            "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
        ).split()
    return text + FORMATS[dtype] + (["--compile"] if compiled else [])


def ours(argv: Sequence[str], tokens: int, steps: int) -> Round:
    return timed(own_step(argv), steps, tokens)


# One process


def ceiling(style: Style, dtype: str, steps: int) -> Round:
    """Return a round that runs only the GEMMs of a training step. The GEMMs write to preallocated memory."""
    import torch

    from tools.bench.device_time import linear_products

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind, cpu = getattr(torch, dtype), torch.device("cpu")
    sizes = [(style.tokens, size_out, size_in) for size_in, size_out in style.products]
    calls = [linear_products(size, kind, None, cpu) for size in sizes]
    return timed(lambda: [call() for call in calls], steps, style.tokens)


# Kinds of parallelism


def silent(argv: Sequence[str], tokens: int, steps: int) -> Round:
    """Return a round in which each process trains on its part of the batch without communicating. The measured speed is
    an upper bound on the speed of data parallelism."""
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    return ours(argv, tokens, steps)


def silent_tensor_parallel(argv: Sequence[str], tokens: int, steps: int) -> Round:
    from megatron.core.tensor_parallel import layers

    layers.COLUMN = layers.ROW = layers.LOCAL
    return ours(argv, tokens, steps)


# Start-up


def starts(command: Sequence[str], until: str, folder: Path = ROOT) -> Round:
    """Return a round that measures the wall-clock seconds until a command ends or prints a line that contains
    `until`."""

    def one_round() -> float:
        environ = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        start = time.perf_counter()
        taken = 0.0
        last = deque[str](maxlen=20)
        merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=folder, env=environ | {"OMP_NUM_THREADS": "1"}, **merged) as process:
            for line in process.stdout:
                last.append(line)
                if until and not taken and re.search(until, line):
                    taken = time.perf_counter() - start
        if process.returncode or (until and not taken):
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {''.join(last)}")
        return taken or time.perf_counter() - start

    return one_round


TINY = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --eval-iters 0 --lr 1e-3 --mock-data --cpu "
    "--log-interval 1"
).split()
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
COMMANDS: dict[str, tuple[list[str], str]] = {
    "import torch": (["-c", "import torch"], ""),
    "import megatron": (["-c", "import megatron"], ""),
    "pretrain_gpt.py --help": (["pretrain_gpt.py", "--help"], ""),
    "pretrain_gpt.py --dry-run": ([*TINY, "--dry-run", "--world-size", "2"], ""),
    "first step, 2 processes": ([*TORCHRUN, *TINY], "iteration +1/"),
}
"""Arguments of the Python interpreter and a text, for each command whose start-up is measured. A measurement ends when
the output of the command contains the text. If the text is empty, the measurement ends when the process exits."""


# The table


@dataclass(frozen=True)
class Cell:
    """Contestants that are compared with each other. The rounds of the contestants are interleaved."""

    contestants: list[Contestant]
    baseline: str
    """Name of the contestant with which all others are compared."""

    unit: str = "tokens/s"
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Dict from a contestant to further contestants with which it is compared, besides the baseline."""

    @property
    def ours(self) -> list[Contestant]:
        """Contestants that train with this program, without the baseline."""
        return [c for c in self.contestants if c.build in (ours, packed_step, starts) and c.name != self.baseline]

    def rivals(self, name: str) -> Iterator[str]:
        """Yield the names of the contestants with which the contestant `name` is compared, beginning with the
        baseline."""
        yield from (self.baseline, *self.others.get(name, ()))

    def chosen(self, names: Sequence[str]) -> Cell:
        return replace(self, contestants=[c for c in self.contestants if c.name in (*names, self.baseline)])


def cells(threads: int = 1, ranks: int = 2, steps: int = 1) -> dict[str, Cell]:
    found = {}
    for name, dtype, mode in product(STYLES, FORMATS, ("eager", "compiled")):
        style, compiled = STYLES[name], mode == "compiled"
        members = [Contestant(OURS, ours, (flags(style, dtype, compiled), style.tokens, steps), threads)]
        members.append(Contestant(CEILING, ceiling, (style, dtype, steps), threads))
        found[f"{name} {dtype} {mode}"] = Cell(members, CEILING)
    found |= layouts(ranks, steps) | loss_chunks(threads, steps) | watched(threads, steps) | packed(ranks, steps)
    commands = [Contestant(name, starts, ([sys.executable, *words], to)) for name, (words, to) in COMMANDS.items()]
    return found | {"start-up": Cell(commands, commands[0].name, "s")}


def loss_chunks(threads: int, steps: int) -> dict[str, Cell]:
    """Return cells for a model with a large vocabulary. The contestants compute the output layer and loss for all
    tokens at once, or in chunks."""
    style = Style(4, 256, 4, 4, 768, 512, 65536, 4, llama=True)
    found = {}
    for dtype in FORMATS:
        members = [
            Contestant(f"{size} tokens at once", ours, (argv, style.tokens, steps), threads)
            for size in (style.tokens, 1024, 512, 256)
            for argv in [[*flags(style, dtype), "--loss-chunk-tokens", str(size % style.tokens)]]
        ]
        found[f"loss chunks {dtype}"] = Cell(members, members[0].name)
    return found


WATCHES = {
    "plain": "",
    "averages": "--ema-decay 0.999",
    "averages bf16": "--ema-decay 0.999 --ema-dtype bf16",
    "averages every 10": "--ema-decay 0.999 --ema-interval 10",
    "noise scale": "--log-noise-scale",
}
"""Flags that enable averaged weights or additional measurements during training, keyed by the name of the
contestant."""


def watched(threads: int, steps: int) -> dict[str, Cell]:
    """Return a cell that compares plain training with training that averages weights or measures gradient noise."""
    argv, tokens = flags(LAYOUT_STYLE, micro_batches=MICRO_BATCHES), MICRO_BATCHES * LAYOUT_STYLE.tokens
    members = [
        Contestant(name, ours, ([*argv, *more.split()], tokens, steps), threads) for name, more in WATCHES.items()
    ]
    return {"beside training": Cell(members, "plain")}


PACKED = "--tokenizer-type NullTokenizer --reset-attention-mask --split 1,0,0 --train-iters 1000 --cp {n}"
DIVISIONS = {
    "chunks of samples": "",
    "balanced": "--balance-packed-samples",
    "hybrid": "--hybrid-context-parallel",
}
"""Methods that divide the documents of a sample among context-parallel ranks: a dict from the name of each method to
its flags."""


def mixed_lengths(seq_length: int) -> NDArray[np.int64]:
    """Return document lengths: one document in eight is about half as long as a sample, and the others are 20 times
    shorter."""
    import numpy as np

    random = np.random.default_rng(0)
    usual = np.where(random.random(2000) < 1 / 8, seq_length / 2, seq_length / 40)
    return (usual * random.lognormal(0, 0.3, 2000)).astype(np.int64)


def packed_step(argv: Sequence[str], seq_length: int, tokens: int, steps: int, folder: str) -> Round:
    """Return a round that trains on packed documents of mixed lengths, and returns the tokens of all ranks divided by
    this rank's processor time. The first process writes the documents to `folder`."""
    import numpy as np

    from megatron.extensions.data.datasets.indexed_writer import IndexedDatasetBuilder

    if not Path(folder).exists():
        random, own = np.random.default_rng(1), tempfile.mkdtemp(prefix="packed")
        with IndexedDatasetBuilder(f"{own}/text", np.dtype("<u2")) as builder:
            for length in mixed_lengths(seq_length).tolist():
                builder.add_document(np.append(random.integers(0, 255, length - 1), 255))
        with suppress(OSError):  # another process has already written the folder
            os.rename(own, folder)
    return timed(own_step([*argv, "--data-path", f"{folder}/text"]), steps, tokens, time.process_time)


def packed(n: int, steps: int) -> dict[str, Cell]:
    """Return a cell that compares divisions of packed documents among context-parallel ranks."""
    style, micro_batches = Style(2, 128, 4, 4, 128, 16384, 256, 1, llama=True), 2
    argv = [word for word in flags(style, micro_batches=micro_batches) if word != "--mock-data"]
    folder = f"{tempfile.gettempdir()}/packed-{os.getpid()}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    members = []
    for name, more in DIVISIONS.items():
        words = [*argv, *f"{PACKED} {more}".format(n=n).split()]
        args = words, style.seq, micro_batches * style.seq, steps, folder
        members.append(Contestant(name, packed_step, args, ranks=n))
    return {"packed CP": Cell(members, "chunks of samples", "tokens/CPU s")}


def layouts(n: int, steps: int) -> dict[str, Cell]:
    """Return one cell for each kind of parallelism (TP, PP and DP). A single cell for all kinds would not fit into the
    memory of a small machine."""
    common, tokens = flags(LAYOUT_STYLE, micro_batches=MICRO_BATCHES), MICRO_BATCHES * LAYOUT_STYLE.seq
    members = [
        Contestant(name, ours, ([*common, *more.format(n=n).split()], tokens, steps), ranks=n)
        for name, more in LAYOUTS.items()
    ]
    part = flags(LAYOUT_STYLE, micro_batches=MICRO_BATCHES // n)
    members.append(Contestant("silent DP", silent, (part, tokens, steps), ranks=n))
    members.append(Contestant("silent TP", silent_tensor_parallel, ([*common, "--tp", str(n)], tokens, steps), ranks=n))
    alone = Contestant(ALONE, ours, (common, tokens, steps), threads=min(n, os.cpu_count() or 1))
    kinds: dict[str, Cell] = {kind: Cell([alone], ALONE) for kind in ("TP", "PP", "DP")}
    for member in members:
        kinds[kind_of(member.name)].contestants.append(member)
    return kinds


def kind_of(name: str) -> str:
    """Return the cell of a contestant that uses a parallel layout: "PP", "TP" or "DP"."""
    return next((kind for kind in ("PP", "TP") if kind in name), "DP")


def before_and_after(contestant: Contestant, before: Path, rounds: int) -> dict[str, Spread] | str:
    """Run a contestant with the checkout `before` of this program and with this checkout. Return the spread over all
    rounds of three values: the result of `before`, the result of this checkout, and the second result divided by the
    first. If the contestant fails, return its error message."""
    build = starts if contestant.build is starts else step_of
    sides = {"before": before.resolve(), "after": ROOT}
    found = interleaved(
        [replace(contestant, name=n, build=build, args=(*contestant.args, root)) for n, root in sides.items()], rounds
    )
    first, second = found["before"], found["after"]
    if isinstance(first, str) or isinstance(second, str):
        return first if isinstance(first, str) else str(second)
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    return {"before": Spread.of(first), "after": Spread.of(second), "ratio": Spread.of(ratios)}


def step_of(argv: Sequence[str], tokens: int, steps: int, checkout: Path) -> Round:
    """Return the same round as `ours`, but run the version of this program in `checkout`. Modules of this program that
    were already imported are replaced with those of the checkout."""
    own = sys.modules[timed.__module__]
    forget("megatron", "tools")
    # The checkout must be the first entry of the path. In older revisions, tools/ has no __init__.py, so any other
    # package `tools` in the path would take precedence.
    sys.path.insert(0, str(checkout))
    import megatron
    import tools.bench.side_by_side as theirs

    for module in (megatron, theirs):
        assert module.__file__ is not None and module.__file__.startswith(str(checkout)), module.__file__
    step = theirs.own_step(list(argv))
    sys.modules[timed.__module__] = own  # the parent process requests rounds from this module
    return timed(step, steps, tokens)


def main(argv: Sequence[str] | None = None) -> int:
    return run_cells(__doc__, cells, argv)


def run_cells(
    about: str | None,
    cells: Callable[[int, int, int], dict[str, Cell]],
    argv: Sequence[str] | None,
    packages: Sequence[str] = (),
) -> int:
    """Parse the command line of a benchmark, run the benchmark, and print its tables.

    Args:
        about: description for `--help`.
        cells: Function (threads, ranks, steps) -> dictionary of cells, keyed by name.
        argv: Command-line arguments; None for `sys.argv[1:]`.
        packages: Packages whose versions are recorded.
    """
    parser = bench_parser(about, 5, ranks=(2, "processes for TP, PP and DP"), steps=(1, "steps per round of training"))
    parser.add_argument(
        "--threads", type=positive, default=os.cpu_count(), help="threads per process (default: all cores)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="run only the cells or contestants with these names"
    )
    parser.add_argument("--list", action="store_true", help="print the names of cells and contestants and exit")
    parser.add_argument("--before", type=Path, help="checkout of another revision to compare with")
    args = parser.parse_args(argv)
    every = cells(args.threads, args.ranks, args.steps)
    if args.list:
        for name, cell in every.items():
            print(f"{name}: {', '.join(contestant.name for contestant in cell.contestants)}")
        return 0
    known = {*every, *(contestant.name for cell in every.values() for contestant in cell.contestants)}
    if unknown := set(args.only) - known:
        parser.error(f"--only {' '.join(sorted(unknown))}: not one of {', '.join(sorted(known))}")
    if args.before is not None and not (args.before / "pretrain_gpt.py").exists():
        parser.error(f"--before {args.before}: holds no pretrain_gpt.py; give a checkout of this program")
    facts = machine(*packages) | {"threads": args.threads, "ranks": args.ranks}
    rows: list[Any] = []
    for name, cell in every.items():
        whole = not args.only or name in args.only
        chosen = cell if whole else cell.chosen(args.only)
        if not whole and len(chosen.contestants) == 1:
            continue
        if args.before is None:
            found = compared(interleaved(chosen.contestants, args.rounds), chosen.rivals)
            say_rows(found, f"{name:<24}", cell.unit)
            rows += [{"cell": name, "unit": cell.unit, **asdict(row)} for row in found]
            continue
        for contestant in chosen.ours:
            result = before_and_after(contestant, args.before, args.rounds)
            shown = f"failed: {result}"
            if not isinstance(result, str):
                values = (f"{result[side].median:{DIGITS[cell.unit]}}" for side in ("before", "after"))
                shown = f"{' '.join(values)} {cell.unit}  after / before {result['ratio']:.3f}"
                rows.append({"cell": name, "contestant": contestant.name, "unit": cell.unit, **result})
            print(f"{name:<24}{contestant.name:<26} {shown}", flush=True)
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How much of the gathers of parameters (ZeRO-3) and of the reductions of gradients (ZeRO-2 and ZeRO-3) is behind
computation, seen in a trace of gloo ranks.

    python tools/bench/sharding_overlap.py                       # two ranks, then four
    python tools/bench/sharding_overlap.py --ranks 2 --traces traces

Steps are profiled on every rank. A collective lasts, in the trace, from its start to its end on gloo's own thread. It
is behind computation as long as the rank does not wait for one. Beside it the same steps run with nothing gathered
ahead and each reduction waited for at once: what the overlap is worth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.distributed import unit_sharding
from megatron.core.distributed.param_and_grad_buffer import WAIT_GATHERED, WAIT_REDUCED, UnitBucket
from megatron.core.distributed.unit_sharding import UnitSharding
from megatron.testing.local_world import run_world
from tools.bench.expert_overlap import Pattern, Shares, profiled_steps
from tools.bench.side_by_side import machine, positive, say_machine, write_json

MODEL = (
    "--num-attention-heads 8 --vocab-size 1000 --mock-data --lr 1e-4 --micro-batch-size 1 --train-iters 100 "
    "--eval-iters 0 --num-workers 0 --cpu --disable-bias-linear --untie-embeddings-and-output-weights --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --bf16"
)
COLLECTIVES = {
    "gathers": Pattern("gloo:.*all_?gather", WAIT_GATHERED),
    "reductions": Pattern("gloo:all_to_all", WAIT_REDUCED),  # on CPU a reduce-scatter is one, and a sum
}
STRATEGIES = {"optim_grads": ("reductions",), "optim_grads_params": ("gathers", "reductions")}


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Gathers and reductions are waited for where they are started."""
    start = UnitSharding._start

    def start_and_wait(self: UnitSharding, bucket: UnitBucket) -> None:
        start(self, bucket)
        self.wait_grad_sync()

    with mock.patch.object(unit_sharding, "AHEAD", 0), mock.patch.object(UnitSharding, "_start", start_and_wait):
        yield


def measure(rank: int, world_size: int, flags: str, folder: str, plain: bool) -> dict[str, list[Shares]]:
    """Of the profiled steps of a rank, by kind of collective."""
    with ExitStack() as stack:
        if plain:
            stack.enter_context(one_after_the_other())
        return profiled_steps(rank, world_size, flags, folder, COLLECTIVES)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4])
    parser.add_argument("--num-layers", type=positive, default=4)
    parser.add_argument("--num-microbatches", type=positive, default=2)
    parser.add_argument("--hidden-size", type=positive, default=512)
    parser.add_argument("--seq-length", type=positive, default=512)
    parser.add_argument("--traces", type=Path, help="keep the ranks' traces in this folder, for Perfetto")
    parser.add_argument("--json", type=Path, help="write the results, with a record of the machine")
    args = parser.parse_args(argv)
    facts, rows = machine(), []
    say_machine(facts)
    for ranks in args.ranks:
        for strategy, kinds in STRATEGIES.items():
            flags = (
                f"{MODEL} --num-layers {args.num_layers} --hidden-size {args.hidden_size} --seq-length "
                f"{args.seq_length} --global-batch-size {ranks * args.num_microbatches} "
                f"--data-parallel-sharding-strategy {strategy}"
            )
            for plain in (True, False):
                with tempfile.TemporaryDirectory() as temporary:
                    folder = temporary
                    if args.traces is not None:
                        folder = str(args.traces / f"{strategy}-{ranks}-{'plain' if plain else 'overlapped'}")
                        Path(folder).mkdir(parents=True, exist_ok=True)
                    found = run_world(ranks, partial(measure, flags=flags, folder=folder, plain=plain))
                how = "waited for at once" if plain else "overlapped"
                for kind in kinds:
                    steps = [shares for rank in found for shares in rank[kind]]
                    share, busy, step = (
                        statistics.median(getattr(s, name) for s in steps) for name in ("share", "exchanging", "span")
                    )
                    print(
                        f"{ranks} ranks, {strategy}, {how}: {share:.0%} of the {kind} behind computation "
                        f"({busy / 1e3:.1f} ms of {kind} in a step of {step / 1e3:.0f} ms)"
                    )
                rows.append(
                    {
                        "ranks": ranks,
                        "strategy": strategy,
                        "plain": plain,
                        "steps": [{kind: [asdict(s) for s in rank[kind]] for kind in kinds} for rank in found],
                    }
                )
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

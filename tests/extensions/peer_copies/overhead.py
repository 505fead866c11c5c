"""Measure the step time that copies to peers add on hosts that are connected by a link of a given rate. Requires root.

    python -m tests.extensions.peer_copies.overhead --steps 120

Two hosts of `tests.cluster.hosts` are connected by a link with the rate `--rate`, and train one model that is sharded
over both hosts. Because the model is sharded, each rank sends all its states to the other host. Blocks of `BLOCK` steps
with copies alternate with blocks of steps without copies, so that both are measured under the same load on the machine.
The first step of each block is not counted, because copies of the previous step may still be in flight. A step first
sleeps for `--seconds` to simulate passes on a GPU, during which the host's processor and network are idle. The step
then computes briefly and communicates. A rank begins to send a copy before the copy is complete.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pretrain_gpt
from megatron.extensions import load
from megatron.extensions.operate.peer_copies.client import Link
from megatron.extensions.operate.peer_copies.hooks import PeerCopies
from megatron.training import training
from megatron.training.run import TrainingRun
from tests.cluster.forked import run_on_hosts
from tests.cluster.hosts import hosts, missing

MODEL = (
    "--cpu --bf16 --num-layers 4 --num-attention-heads 4 --seq-length 64 --vocab-size 1024 --mock-data --lr 1e-3 "
    "--lr-warmup-iters 1 --micro-batch-size 1 --global-batch-size 2 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--data-parallel-sharding-strategy optim --peer-copies 1 --save-interval 1000000"
).split()
BLOCK = 5
HOSTS = 2


def copied(iteration: int) -> bool:
    """Return True if the run copies its states to peers after this iteration."""
    return (iteration // BLOCK) % 2 == 0


def measured_main(seconds: float, sent: Path) -> Callable[[list[str]], int]:
    """Return a replacement for `pretrain_gpt.main` that sleeps for `seconds` in each step and copies the training state
    to peers only in every second block of steps. For each part of the state that is sent, the number of bytes and the
    time in seconds are appended to the file `sent`."""

    def main(argv: list[str]) -> int:
        made, copy, put = training.train_step, PeerCopies._copy, Link.put

        def step(run: TrainingRun) -> None:
            time.sleep(seconds)
            made(run)

        def in_blocks(copies: PeerCopies) -> None:
            assert copies._run is not None
            if copied(copies._run.progress.iteration):
                copy(copies)

        def noted(link: Link, generation: str, name: str, header: bytes, data: memoryview, *rest: object) -> None:
            began = time.perf_counter()
            put(link, generation, name, header, data, *rest)  # type: ignore[arg-type]
            with sent.open("a") as file:
                file.write(f"{json.dumps([len(header) + len(data), time.perf_counter() - began])}\n")

        training.train_step, PeerCopies._copy, Link.put = step, in_blocks, noted  # type: ignore[method-assign, assignment]
        return pretrain_gpt.main(argv)

    return main


def told(records: Sequence[dict[str, float]], sent: Sequence[Sequence[float]]) -> str:
    """Return a text with the median times of steps with and without copies, the amount of data that a host sends, and
    the slowdown that copies cause."""
    after = {True: list[float](), False: list[float]()}
    for record in records:
        before = int(record["iteration"]) - 1
        if before >= 2 * BLOCK and copied(before) == copied(before - 1):
            after[copied(before)].append(record["step_time"])
    middle = {kind: statistics.median(times) for kind, times in after.items()}
    spread = {kind: statistics.quantiles(times, n=4) for kind, times in after.items()}
    made = HOSTS * sum(copied(int(record["iteration"])) for record in records)
    nbytes, seconds = (sum(each[number] for each in sent) / made for number in (0, 1))
    lines = [
        f"{'with' if kind else 'without'} copies: {1000 * middle[kind]:.1f} ms a step, half of {len(times)} steps "
        f"within {1000 * spread[kind][0]:.1f} to {1000 * spread[kind][2]:.1f}"
        for kind, times in after.items()
    ]
    lines.append(f"a host sends {nbytes / 1e6:.1f} MB after a step, in {seconds:.2f} s")
    lines.append(f"copies add {middle[True] / middle[False] - 1:+.1%}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurement and print the median step times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--rate", default="1gbit")
    asked = parser.parse_args(argv)
    if why := missing():
        parser.error(why)
    load()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name, hosts(HOSTS, asked.rate) as box:
        folder = Path(name)
        flags = [*MODEL, "--hidden-size", str(asked.hidden_size), "--train-iters", str(asked.steps)]
        flags += ["--save", str(folder / "save"), "--load", str(folder / "save")]
        run_on_hosts(box, 1, flags, folder, main=measured_main(asked.seconds, folder / "sent"))
        lines = [json.loads(line) for line in (folder / "save/metrics.jsonl").read_text().splitlines()]
        sent = [json.loads(line) for line in (folder / "sent").read_text().splitlines()]
        print(told([line for line in lines if "step_time" in line], sent))


if __name__ == "__main__":
    main()

"""Random faults in runs with copies in memory: each costs a step at most, and the end is bitwise the undisturbed one.

    python -m tests.extensions.peer_copies.campaign --rounds 10 --seed 1

Each round draws a world of 2 to 4 ranks on 1 to 4 hosts, a layout, and one to three faults: an error, SIGKILL or
SIGSTOP in a step, a death while copies are sent or once they are stored, and a death while a run resumes. A line tells
each recovery.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.extensions import load
from tests.extensions.peer_copies.runs import Planned, Run

KINDS = ("error", "kill", "stop", "copy", "agreed", "start", "end")
STEPS = 6
LAYOUTS = {
    2: ("", "--tp 2", "--pp 2"),
    3: ("",),
    4: ("--tp 2", "--pp 2", "--data-parallel-sharding-strategy optim_grads_params"),
}
FORMATS = ("--fp32", "--bf16", "--fp16 --initial-loss-scale 65536 --loss-scale-window 2")
STRATEGIES = ("no_shard", "optim")


def drawn_faults(moments: random.Random, ranks: int) -> list[Planned]:
    """One fault of each start, at steps that do not fall."""
    steps = sorted(moments.randrange(1, STEPS - 1) for _ in range(moments.randrange(1, 4)))
    return [Planned(moments.choice(KINDS), moments.randrange(ranks), step, number) for number, step in enumerate(steps)]


def drawn_flags(moments: random.Random, ranks: int) -> list[str]:
    """Flags of a round."""
    layout = moments.choice(LAYOUTS[ranks])
    if "strategy" not in layout:
        layout += f" --data-parallel-sharding-strategy {moments.choice(STRATEGIES)}"
    batch = f"--global-batch-size {2 * ranks} --train-iters {STEPS} --startup-timeout-minutes 2"
    return f"{layout} {moments.choice(FORMATS)} {batch}".split()


def one_round(folder: Path, seed: int) -> list[dict[str, Any]]:
    """The recoveries of a round. Asserts that each lost a step at most, and that the end is that without faults."""
    moments = random.Random(seed)
    ranks, per_host = moments.randrange(2, 5), moments.randrange(1, 3)
    faults, flags = drawn_faults(moments, ranks), drawn_flags(moments, ranks)
    shown = " ".join(f"{fault.kind}:{fault.rank}:{fault.step}" for fault in faults)
    print(f"seed {seed}: {ranks} ranks, {per_host} a host, {' '.join(flags)}, faults {shown}", flush=True)
    whole, run = Run(folder / "whole", ranks, flags, per_host), Run(folder / "run", ranks, flags, per_host)
    whole.start()
    try:
        run.start(*faults, flags=["--restarts-in-job", "4"])
    finally:
        run.end()
    run.assert_equal(whole)
    found = run.events("recovery")
    for event in found:
        seconds = f"detected {event['detected_after']} s, recovered {event['recovered_after']} s"
        print(f"    {event['what']}: {seconds}, lost {event['steps_lost']}, {event['source']}", flush=True)
        assert event["steps_lost"] <= 1, event
        assert event["rung"] == "restart in the job"
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the rounds, and prints how long recoveries took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    load()
    events = list[dict[str, Any]]()
    for seed in range(asked.seed, asked.seed + asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            events += one_round(Path(folder), seed)
    seconds = sorted(float(event["recovered_after"]) for event in events)
    lost = sum(event["steps_lost"] for event in events)
    print(
        f"{asked.rounds} rounds, {len(events)} recoveries, steps lost {lost}; seconds from fault to next step: "
        f"median {statistics.median(seconds):.1f}, longest {seconds[-1]:.1f}"
    )


if __name__ == "__main__":
    main()

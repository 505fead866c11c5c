"""Inject random faults into runs that copy their state to the memory of peers. Each fault may cost at most one step,
and the result must be bitwise equal to that of an undisturbed run.

    python -m tests.extensions.peer_copies.campaign --rounds 10 --seed 1

Each round draws a world of 2 to 4 ranks on 1 to 4 hosts, a layout, and one to three faults. A fault is an error,
SIGKILL or SIGSTOP in a step, or a kill while copies are sent, after they are stored, in a save, or while a run resumes.
In some rounds, two ranks are killed within two seconds, either together or while the run recovers from the first kill.
In other rounds, a host is lost for good. In half of these rounds, the spare that replaces the host is also lost while
it resumes. Each recovery is printed as a line.
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
from megatron.extensions.operate.peer_copies.faults import SAME_RANKS
from megatron.extensions.operate.peer_copies.faults import SPARES as SPARE_RANKS
from tests.extensions.peer_copies.runs import Planned, Run, lost_little

KINDS = ("error", "kill", "stop", "copy", "agreed", "start", "end", "save", "two", "host")
SPARES = 2
"""Number of spare ranks in a round in which a host is lost."""

STEPS = 6
LAYOUTS = {
    2: ("", "--tp 2", "--pp 2"),
    3: ("",),
    4: ("--tp 2", "--pp 2", "--data-parallel-sharding-strategy optim_grads_params"),
}
FORMATS = ("--fp32", "--bf16", "--fp16 --initial-loss-scale 65536 --loss-scale-window 2")
STRATEGIES = ("no_shard", "optim")


def drawn_faults(moments: random.Random, ranks: int) -> list[Planned]:
    """Draw faults at non-decreasing steps. Some faults strike in pairs, in the same start or in two consecutive starts.
    At most one host is lost."""
    steps = sorted(moments.randrange(1, STEPS - 1) for _ in range(moments.randrange(1, 4)))
    faults, number, kinds = list[Planned](), 0, KINDS
    for step in steps:
        kind, rank = moments.choice(kinds), moments.randrange(ranks)
        if kind == "two":
            other = (rank + moments.randrange(1, ranks)) % ranks
            at_once = moments.random() < 0.5
            second = Planned("kill", other, step, number) if at_once else Planned("start", other, 0, number + 1)
            faults += [Planned("kill", rank, step, number), second]
            number += not at_once
        elif kind == "host":
            kinds = tuple(each for each in kinds if each != "host")
            faults.append(Planned(f"host {moments.randrange(1, ranks)}", 0, step, number))
            if moments.random() < 0.5:
                faults.append(Planned(f"start workers {ranks}", ranks, 0, number + 1))
                number += 1
        else:
            faults.append(Planned(kind, rank, step, number))
        number += 1
    return faults


def drawn_flags(moments: random.Random, ranks: int) -> list[str]:
    """Return randomly chosen flags for one round."""
    layout = moments.choice(LAYOUTS[ranks])
    if "strategy" not in layout:
        layout += f" --data-parallel-sharding-strategy {moments.choice(STRATEGIES)}"
    batch = f"--global-batch-size {2 * ranks} --train-iters {STEPS} --save-interval 2 --startup-timeout-minutes 2"
    return f"{layout} {moments.choice(FORMATS)} {batch}".split()


def one_round(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Run a round and return its recoveries. Assert that each recovery lost at most one step and that the round's
    result equals the result of a run without faults."""
    moments = random.Random(seed)
    ranks, per_host = moments.randrange(2, 5), moments.randrange(1, 3)
    faults, flags = drawn_faults(moments, ranks), drawn_flags(moments, ranks)
    spares = SPARES if any(fault.kind.startswith("host") for fault in faults) else 0
    per_host = 1 if spares else per_host
    shown = " ".join(f"{fault.kind}:{fault.rank}:{fault.step}" for fault in faults)
    print(f"seed {seed}: {ranks} ranks, {per_host} a host, {' '.join(flags)}, faults {shown}", flush=True)
    whole, run = Run(folder / "whole", ranks, flags, per_host), Run(folder / "run", ranks + spares, flags, per_host)
    whole.start()
    try:
        said = run.start(*faults, flags=["--restarts-in-job", "5", "--spare-ranks", str(spares)])
    finally:
        run.end()
    run.assert_equal(whole)
    found = run.events("recovery")
    for event in found:
        seconds = f"detected {event['detected_after']} s, recovered {event['recovered_after']} s"
        print(f"    {event['what']}: {seconds}, lost {event['steps_lost']}, {event['rung']}", flush=True)
        assert lost_little(event, said), event
        assert event["rung"] in (SAME_RANKS, SPARE_RANKS), event
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the rounds of random faults, and print how long recoveries took."""
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
    late = seconds[-(-19 * len(seconds) // 20) - 1]
    print(
        f"{asked.rounds} rounds, {len(events)} recoveries, steps lost {lost}; seconds from fault to next step: "
        f"median {statistics.median(seconds):.1f}, 95th percentile {late:.1f}, longest {seconds[-1]:.1f}"
    )


if __name__ == "__main__":
    main()

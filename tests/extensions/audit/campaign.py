"""Audit many training steps. In steps without a fault, no audit may raise an alarm. In the other steps, a random bit is
flipped on a random rank.

    python -m tests.extensions.audit.campaign --steps 1000              correct steps of each layout
    python -m tests.extensions.audit.campaign --flips 40 --seed 1       flips in runs of each layout
    python -m tests.extensions.audit.campaign --cost 10                 CPU time of steps with and without audits

A flip counts as detected if the audit of the same step names the rank. A flip cannot be detected if it changes no
recorded value, for example because later rounding drops the flipped bit.
"""

from __future__ import annotations

import argparse
import random
import time

import megatron.extensions
from megatron.extensions.operate.audit import outcome
from tests.extensions.audit.runs import Flip, audited

LAYOUTS = {
    "DP 2, fp32": ("--global-batch-size 2", 2),
    "DP 2, fp32, not deterministic": ("--global-batch-size 2", 2),
    "DP 3, fp32": ("--global-batch-size 3", 3),
    "TP 2 SP, DP 2, bf16": ("--global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16", 4),
    "PP 2, DP 2, overlap": ("--pipeline-model-parallel-size 2 --overlap-grad-reduce --overlap-param-gather", 4),
    "EP 2, DP 4": ("--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2", 4),
}
KINDS = ("bucket", "reduced", "message", "product")


def flips_of(draw: random.Random, count: int, ranks: int, bf16: bool, messages: bool) -> list[Flip]:
    """Return a list of random faults. Each fault occurs in a different audited step. The faults flip only high bits (20
    to 31 of an fp32 value), because the effect of a lower bit may be smaller than rounding."""
    kinds = KINDS if messages else tuple(kind for kind in KINDS if kind != "message")
    found = []
    for number in range(count):
        kind = draw.choice(kinds)
        found.append(Flip(kind, draw.randrange(ranks), (2 * number + 2,), draw.randrange(21 if bf16 else 20, 32)))
    return found


def print_cost(steps: int) -> None:
    """Train a wider model on two replicas with and without audits. Print the CPU time of a step with an audit, divided
    by the CPU time of a step without an audit."""
    wide = f"--hidden-size 256 --num-layers 4 --seq-length 128 --train-iters {steps + 2}"
    without, every = (audited(f"{wide} --audit-interval {interval}", 2).seconds for interval in (1000, 1))
    print(
        f"CPU time of an audited step over that of another: {every / without:.2f} ({steps} steps of each)", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layouts", nargs="*", default=None)
    parser.add_argument("--cost", type=int, default=0)
    args = parser.parse_args()
    megatron.extensions.load()
    if args.cost:
        print_cost(args.cost)
    outcome.TWICE = 10**9
    for name in args.layouts or LAYOUTS:
        flags, ranks = LAYOUTS[name]
        exact = "not deterministic" not in name
        began = time.monotonic()
        if args.steps:
            found = audited(
                f"{flags} --audit-interval 1 --train-iters {args.steps} --log-interval 1000", ranks, exact=exact
            )
            took = time.monotonic() - began
            print(
                f"{name}: {found.audits} audits, {len(found.findings)} alarms, {took:.0f} s {found.ended}", flush=True
            )
        if args.flips:
            messages = "TP" in name or "PP" in name
            flips = flips_of(random.Random(args.seed), args.flips, ranks, "bf16" in name, messages)
            text = f"{flags} --train-iters {2 * args.flips + 1} --log-interval 1000"
            found = audited(text, ranks, flips, exact)
            told = dict(found.findings)
            good = [each for each in flips if each.steps[0] in told and told[each.steps[0]].ranks == (each.rank,)]
            missed = [each for each in flips if each.steps[0] not in told]
            wrong = [(each, told[each.steps[0]]) for each in flips if each not in good and each not in missed]
            print(f"{name}: {len(flips)} flips, {len(good)} named, {len(missed)} not seen, {len(wrong)} misnamed")
            print(*(f"  not seen: {each}" for each in missed), *(f"  misnamed: {each}" for each in wrong), sep="\n")


if __name__ == "__main__":
    main()

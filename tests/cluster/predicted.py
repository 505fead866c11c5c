"""Predicted against measured step times of the layouts of a small model, on two hosts of two ranks, by the rate of
their cables.

    python -m tests.cluster.predicted                      # 100 Mbit, 1 Gbit and unlimited: about twelve minutes
    python -m tests.cluster.predicted --rates 1gbit --layouts tp2-pp2 dp4 --json predicted.json

Each host has a core, and each rank a half of it, whatever its neighbour does. tools/calibrate.py measures the ranks
under just these conditions, for each rate; from its device file all step times are predicted before any is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import pretrain_gpt
import tools.calibrate
from megatron.extensions.planner.device_file import read_device
from megatron.extensions.planner.fake_stage import PlannerCache
from megatron.extensions.planner.time.step_time import StepTime, predict_step
from megatron.training.config.arguments import command_line
from megatron.training.config.prepare import prepare
from megatron.training.reliability.launch import Launch
from tests.cluster.cpu_shares import cpu_shares, join
from tests.cluster.hosts import Box, hosts, missing
from tests.forked import run_forked

RATES = {"100mbit": "100mbit", "1gbit": "1gbit", "unlimited": None}
HOSTS, RANKS = 2, 2
SHARE = 0.48
"""Of a core, for each of two ranks; what is left is for the kernel and for this process."""

MODEL = (
    "--cpu --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 512 --mock-data "
    "--lr 1e-3 --micro-batch-size 1 --global-batch-size 8 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--hidden-dropout 0 --attention-dropout 0"
).split()

WHOLE = "--no-use-distributed-optimizer"
LAYOUTS = {
    "dp4-whole": WHOLE,
    "dp4": "",
    "dp4-overlap": "--overlap-grad-reduce --overlap-param-gather",
    "dp4-zero2": "--data-parallel-sharding-strategy optim_grads",
    "dp4-zero3": "--data-parallel-sharding-strategy optim_grads_params",
    "tp2-dp2": "--tp 2",
    "tp2-dp2-whole": f"--tp 2 {WHOLE}",
    "tp2-dp2-sp": "--tp 2 --sequence-parallel",
    "tp2-pp2": "--tp 2 --pp 2",
    "tp2-pp2-sp": "--tp 2 --pp 2 --sequence-parallel",
    "tp4": "--tp 4",
    "tp4-sp": "--tp 4 --sequence-parallel",
    "pp2-dp2": "--pp 2",
    "pp2-dp2-interleaved": "--pp 2 --num-virtual-stages-per-pipeline-rank 2",
    "pp2-inside-dp2": "--pp 2 --use-tp-pp-dp-mapping",
    "pp4": "--pp 4",
    "pp4-gpipe": "--pp 4 --pipeline-schedule gpipe",
    "pp4-zb-h1": "--pp 4 --pipeline-schedule zb-h1",
    "cp2-dp2": "--cp 2",
    "cp2-pp2": "--cp 2 --pp 2",
    "tp2-cp2": "--tp 2 --cp 2",
}
"""Name -> flags. Ranks of a host are neighbours: TP and then CP stay inside, PP is outside. Replicas share the states
of the optimizer, but for `whole`."""


@dataclass(frozen=True)
class Row:
    """One layout at one rate."""

    rate: str
    layout: str
    predicted: float
    measured: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def run_ranks(
    box: Box, shares: Sequence[Path], screen: Path, main: Callable[[list[str]], int], argv: Sequence[str]
) -> None:
    """Runs `main(argv)` on two ranks of each host to its end."""

    def prepare(rank: int) -> None:
        host, local = divmod(rank, RANKS)
        box.enter(host)
        if shares:
            join(shares[rank])
        os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": box.names[0]}

    run_forked(HOSTS * RANKS, argv, screen, main=main, prepare=prepare)


def flags_of(layout: str, iterations: int) -> list[str]:
    return [*MODEL, "--train-iters", str(iterations), *LAYOUTS[layout].split()]


def predict(layouts: Sequence[str], device: Path, cache: PlannerCache) -> dict[str, StepTime]:
    speeds, found = read_device(str(device)), {}
    for layout in layouts:
        launch = Launch(0, HOSTS * RANKS)
        with contextlib.redirect_stderr(io.StringIO()):
            config = prepare(command_line(flags_of(layout, 10), launch), launch)
        found[layout] = predict_step(config, HOSTS * RANKS, speeds, RANKS, cache)
    return found


def measure(box: Box, shares: Sequence[Path], layout: str, folder: Path, expected: float) -> float:
    """Median step time of a run, without its first step."""
    steps = min(6, max(2, int(3 / expected)))
    metrics = folder / f"{layout}.jsonl"
    metrics.unlink(missing_ok=True)
    flags = [*flags_of(layout, steps + 1), "--metrics-file", str(metrics)]
    run_ranks(box, shares, folder / "screen", pretrain_gpt.main, flags)
    times = [json.loads(line)["step_time"] for line in metrics.read_text().splitlines()]
    assert len(times) == steps + 1, times
    return median(times[1:])


def rows_of(args: argparse.Namespace, rate: str, folder: Path, cache: PlannerCache) -> Iterator[Row]:
    """Calibrates, predicts all, then measures."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = [{cores[host % len(cores)]} for host in range(HOSTS)]
    with hosts(HOSTS, RATES[rate], cpus=pinned) as box, cpu_shares(HOSTS * RANKS, args.share) as shares:
        if not shares:
            print("no control groups for processor time here: ranks of a host share its core as they like")
        device, kernels = folder / f"{rate}.yaml", folder / "kernels.yaml"
        flags = ["--cpu", "--seconds", f"{args.seconds:g}", "--output", str(device)]
        flags += ["--kernels", str(kernels)] if kernels.exists() else []
        run_ranks(box, shares, folder / "screen", tools.calibrate.main, flags)
        if not kernels.exists():
            kernels.write_text(device.read_text())
        print(f"\n## {rate}\n\n{device.read_text()}", flush=True)
        times = predict(args.layouts, device, cache)
        print("| layout | predicted (ms) | measured (ms) | error | bound by |\n|---|---|---|---|---|", flush=True)
        for layout in args.layouts:
            measured = measure(box, shares, layout, folder, times[layout].seconds)
            row = Row(rate, layout, times[layout].seconds, measured, times[layout].parts)
            figures = f"{1e3 * row.predicted:,.0f} | {1e3 * row.measured:,.0f} | {100 * row.error:+.0f} %"
            print(f"| {layout} | {figures} | {times[layout].bound_by.replace('_', ' ')} |", flush=True)
            yield row


def verdict(rows: Sequence[Row]) -> list[str]:
    """What the rows of one rate show."""
    measured, predicted = ({row.layout: getattr(row, name) for row in rows} for name in ("measured", "predicted"))
    best, order = min(measured, key=measured.__getitem__), sorted(predicted, key=predicted.__getitem__)
    errors = [abs(row.error) for row in rows]
    lines = [
        f"median error {100 * median(errors):.0f} %, largest {100 * max(errors):.0f} %",
        f"best measured layout: {best}, number {order.index(best) + 1} of the predicted ({', '.join(order[:3])}, ...)",
    ]
    pairs = {
        "TP inside a host and PP across, beside TP across": ("tp2-pp2", "tp4"),
        "TP inside a host and DP across, beside TP across": ("tp2-dp2", "tp4"),
        "PP across hosts, beside DP across": ("pp2-dp2", "pp2-inside-dp2"),
    }
    for what, (one, other) in pairs.items():
        if one in measured and other in measured:
            ratios = (measured[other] / measured[one], predicted[other] / predicted[one])
            lines.append(f"{what}: {ratios[0]:.2f} times as fast ({ratios[1]:.2f} predicted)")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--seconds", type=float, default=30.0, help="of calibration, for each rate (default: 30)")
    parser.add_argument(
        "--share", type=float, default=SHARE, help="of a core, for each rank: small on a machine with other work"
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    began, rows, cache = time.monotonic(), list[Row](), PlannerCache()
    with tempfile.TemporaryDirectory(prefix="predicted-") as folder:
        for rate in args.rates:
            found = list(rows_of(args, rate, Path(folder), cache))
            print("\n" + "\n".join(f"- {rate}: {line}" for line in verdict(found)), flush=True)
            rows += found
    errors = [abs(row.error) for row in rows]
    minutes = (time.monotonic() - began) / 60
    print(f"\nall {len(rows)} rows: median error {100 * median(errors):.0f} %; {minutes:.1f} minutes")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) | {"error": row.error} for row in rows], indent=1))


if __name__ == "__main__":
    main()

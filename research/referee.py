"""Run one training step of another program, save the step, and check its gradients with `tools/referee.py`.

    python research/referee.py megatron-core --site FOLDER   two gloo ranks: TP, sequence parallelism, experts, MTP
    python research/referee.py trainer                       transformers' Trainer with accumulated micro-batches
    python research/referee.py megatron-core --site FOLDER --fault norms    the same with a fault, see FAULTS

megatron-core's package has the same name as this program's. Therefore, install megatron-core into a separate folder
with `pip install --no-deps --target FOLDER megatron-core==0.16.1`. Only the two processes that run the step of
megatron-core import from this folder. The exit code is the exit code of tools/referee.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.extensions import load
from tools import referee

FAULTS = {
    "megatron-core": {"norms": "gradients of norms are not summed over the sequence-parallel ranks"},
    "trainer": {"means": "the mean of the micro-batches' means instead of the mean over all tokens"},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=list(FAULTS))
    parser.add_argument("--site", type=Path, help="folder where megatron-core is installed")
    faults = ", ".join(name for own in FAULTS.values() for name in own)
    parser.add_argument("--fault", help=f"plant a fault: {faults}")
    args = parser.parse_args(argv)
    if args.fault is not None and args.fault not in FAULTS[args.program]:
        parser.error(f"--fault {args.fault}: {args.program} has {', '.join(FAULTS[args.program])}")
    load()
    with tempfile.TemporaryDirectory() as folder:
        return JUDGED[args.program](Path(folder), args)


def judged_megatron_core(folder: Path, args: argparse.Namespace) -> int:
    """Check the gradients that two megatron-core ranks have summed, and return the exit code of tools/referee.py."""
    if args.site is None or not (args.site / "megatron/core").is_dir():
        raise SystemExit(f"--site {args.site} has no megatron/core; pip install --no-deps --target it")
    script = Path(__file__).with_name("megatron_core_step.py")
    # If GLOO_SOCKET_IFNAME is unset, gloo resolves the host name for each process group, and megatron-core creates
    # many.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(args.site.resolve())
    step = [sys.executable, "-W", "ignore", str(script)]
    run_ranks([[*step, str(rank), str(folder), args.fault or "none"] for rank in range(2)], environment)
    gradients, loss = folder / "wgrads/iter_0000001", (folder / "loss.txt").read_text()
    return judge(folder / "checkpoint", folder / "batch.npz", gradients, loss)


def run_ranks(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
    """Run the processes of a training step, one for each command. If a process fails, or if `LIMIT` seconds have
    passed, end all processes and raise SystemExit."""
    ranks = [subprocess.Popen(command, env=environment) for command in commands]
    end = time.monotonic() + LIMIT
    try:
        while None in (codes := [rank.poll() for rank in ranks]):
            if any(codes):
                break
            if time.monotonic() > end:
                raise SystemExit(f"the step has not ended after {LIMIT} s; run it again on a machine that is not busy")
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if failed := [f"rank {number} with exit code {code}" for number, code in enumerate(codes) if code]:
        raise SystemExit(f"the step failed on {' and '.join(failed)}; its error is above")


def judged_trainer(folder: Path, args: argparse.Namespace) -> int:
    """Check the gradients that transformers' Trainer passes to its optimizer, and return the exit code of
    tools/referee.py."""
    from research.trainer_step import save_step

    loss = save_step(folder, of_means=args.fault == "means")
    return judge(folder / "model", folder / "batch.npz", folder / "gradients.safetensors", str(loss))


def judge(model: Path, batch: Path, gradients: Path, loss: str) -> int:
    flags = ["--model", model, "--batch", batch, "--gradients", gradients, "--loss", loss, "--computed-in", "fp32"]
    return referee.main([str(flag) for flag in flags])


LIMIT = 300
"""Time limit of a step in seconds; on a machine that is not busy, a step takes a few seconds."""

JUDGED = {"megatron-core": judged_megatron_core, "trainer": judged_trainer}

if __name__ == "__main__":
    sys.exit(main())

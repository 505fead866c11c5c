"""Measure saves and loads of a checkpoint, the time that a run waits for data at 1 Gbit/s, and a run whose object store
is temporarily down.

python -m tests.extensions.object_storage.measure checkpoint [--ranks 2] [--hidden-size 256]
unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms &&
    python -m tests.extensions.object_storage.measure data'
python -m tests.extensions.object_storage.measure outage [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.extensions import load
from tests.corpus import write_documents
from tests.extensions.object_storage.server import (
    BUCKET,
    Faults,
    credentials,
    environment,
    faulty_proxy,
    file_system,
    s3_server,
)
from tests.forked import run_forked
from tests.tiny import TINY

URL = f"s3://{BUCKET}/run"
WAIT_ON_DISK = """
from megatron.extensions.operate.object_storage.read_ahead import ReadAhead
from megatron.training.hooks import CALLBACKS


@CALLBACKS.register("data-wait")
class DataWait(ReadAhead):
    def __init__(self, config):
        super().__init__(config)
        self.limit = 0
"""
"""Source of an extension that logs the time spent waiting for local data, which is otherwise logged only for data from
a URL."""


class Measured(NamedTuple):
    """Measurements of a run."""

    said: str
    seconds: float
    megabytes: float
    """Megabytes sent through the proxy."""

    peak: float
    """Peak memory in MiB of the rank that used the most memory."""

    def seconds_of(self, pattern: str) -> float:
        """Return the last time in the run's output that matches a pattern, in seconds."""
        return float(re.findall(pattern, self.said)[-1])


def measured(
    port: int, folder: Path, ranks: int, flags: Sequence[str], faults: Faults | None = None, alone: bool = False
) -> Measured:
    """Measure a run. If `alone` is True, the run is measured in a new process. Otherwise, the reported peak memory is
    at least the peak memory of all earlier runs."""
    if alone:
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            return pool.submit(measured, port, folder, ranks, flags).result()
    faults = faults or Faults(0)
    began = time.monotonic()
    with faulty_proxy(port, faults) as proxy, environment(credentials(proxy)):
        said = run_forked(ranks, flags, folder / "screen")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return Measured(said, time.monotonic() - began, faults.moved / 1e6, peak)


SAVED = r"saved checkpoint .* in ([\d.]+) s"
LOADED = r"\| checkpoint ([\d.]+) \|"


def measure_checkpoint(port: int, folder: Path, args: argparse.Namespace) -> None:
    """Measure how the ranks of one host save and load a checkpoint: on the local disk, on S3, and on S3 with the host's
    cache."""
    size = ["--hidden-size", str(args.hidden_size), "--num-layers", "4", "--vocab-size", "8000"]
    flags = [*TINY.split(), *size, "--train-iters", "1"]
    local, cache = str(folder / "local"), ["--storage-cache", str(folder / "cache")]
    neither = measured(port, folder, args.ranks, flags, alone=True).peak
    rows = [("save", "local disk", ["--save", local]), ("save", "S3", ["--save", URL])]
    rows += [("load", "local disk", ["--load", local]), ("load", "S3", ["--load", URL])]
    rows += [("load", name, ["--load", URL, *cache]) for name in ("S3, cache", "S3, cache again")]
    for kind, name, given in rows:
        more = [*given, "--train-iters", "2"] if kind == "load" else given
        found = measured(port, folder, args.ranks, [*flags, *more], alone=True)
        if name == "local disk" and kind == "save":
            nbytes = sum(path.stat().st_size for path in Path(local).rglob("*.distcp"))
            print(f"checkpoint of {nbytes / 1e6:.1f} MB, {args.ranks} ranks of data parallelism; peak memory of a rank")
            print(f"that neither saves nor loads: {neither:.0f} MiB")
        seconds = found.seconds_of(SAVED if kind == "save" else LOADED)
        moved = f"{found.megabytes:7.1f} MB moved, {found.megabytes / args.ranks:6.1f} a rank"
        print(f"{kind} {name:16} {seconds:6.2f} s {moved}, peak {found.peak - neither:+5.0f} MiB", flush=True)


def measure_data(port: int, folder: Path, args: argparse.Namespace) -> None:
    """Measure how long a run waits for data if it must fetch the data from the object store."""
    random = np.random.default_rng(0)
    texts = (random.integers(0, 49, 4000).astype("<u2") for _ in range(args.documents))
    prefix = write_documents(folder / "data", texts)
    for kind in (".bin", ".idx"):
        file_system().put_file(prefix + kind, f"{BUCKET}/data{kind}")
    flags = [*TINY.replace("--mock-data", "").split(), "--seq-length", "256", "--num-workers", "2"]
    flags += ["--global-batch-size", "8", "--train-iters", "20", "--log-interval", "4", "--split", "100,0,0"]
    (folder / "wait.py").write_text(WAIT_ON_DISK)
    for name, path, more in (
        ("local disk", prefix, ["--extension", str(folder / "wait.py")]),
        ("S3, nothing ahead", f"s3://{BUCKET}/data", ["--num-workers", "0", "--storage-read-ahead-megabytes", "0"]),
        ("S3, read ahead", f"s3://{BUCKET}/data", []),
    ):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        own = ["--data-path", path, "--save", str(folder / name), "--storage-cache", str(folder / "cache")]
        found = measured(port, folder, 1, [*flags, *own, *more])
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        waits = [record["data_wait_ms"] for record in records if "data_wait_ms" in record]
        times = [round(1000 * record.get("step_time", record.get("step_seconds", 0))) for record in records]
        print(f"{name}: wait {waits} ms, steps {times} ms, {found.megabytes:.1f} MB", flush=True)
        print("".join(f"  {line.strip()}\n" for line in found.said.splitlines() if "MB read for" in line), end="")


def measure_outage(port: int, folder: Path, args: argparse.Namespace) -> None:
    """Measure a run whose object store fails in the middle of a save."""
    faults = Faults(1)

    def fail() -> None:
        files = file_system()
        while not files.exists(f"{BUCKET}/run/iter_0000002"):
            time.sleep(0.01)
        faults.down_until = time.monotonic() + args.seconds
        print(f"the store fails for {args.seconds:g} s, as iteration 2 is written", flush=True)

    threading.Thread(target=fail, daemon=True).start()
    flags = [*TINY.split(), "--hidden-size", "256", "--train-iters", "6", "--save-interval", "2", "--save", URL]
    found = measured(port, folder, 1, flags, faults)
    print("".join(f"  {line}\n" for line in found.said.splitlines() if "saved" in line or "RUN" in line), end="")
    events = file_system().cat_file(f"{BUCKET}/run/run_events.jsonl").decode().splitlines()
    saves = [event for event in map(json.loads, events) if event["event"] == "storage"]
    print(f"{found.seconds:.0f} s, {faults.cuts} connections cut; {saves[-1]}")


MEASURES: dict[str, Callable[[int, Path, argparse.Namespace], None]] = {
    "checkpoint": measure_checkpoint,
    "data": measure_data,
    "outage": measure_outage,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--documents", type=int, default=25_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    load()
    with s3_server() as port, environment(credentials(port)), tempfile.TemporaryDirectory() as folder:
        MEASURES[args.what](port, Path(folder), args)


if __name__ == "__main__":
    main()

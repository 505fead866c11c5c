"""Measures saving and loading checkpoints beside torch.distributed.checkpoint (DCP) alone.

    OMP_NUM_THREADS=1 python tools/bench/checkpoint.py --folder /path/on/the/disk

Ranks hold equal parts of a transformer's parameters in fp32 and Adam's two moments. One after the other, round by
round, the same bytes are saved by this program in the foreground and in the background, by `dcp.save` and
`dcp.async_save`, and loaded back by this program, which verifies checksums first, and by `dcp.load`. Every figure is
the median of the rounds with the least and the most; a first round is not counted. The stall is how long training
waits. Caches of the file system are warm when loading.

A folder in memory (/dev/shm) shows what the programs themselves cost, a folder on a disk what is left of that there.
Memory needed: 3 times the state, 12 bytes a parameter, including files that are in memory. The buffer that background
saves copy to is taken when a run begins and kept; the stall of the first one is reported separately."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.dist_checkpointing.async_saver import CheckpointSaver
from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.dist_checkpointing.path_kind import checkpoint_folder
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.parallel_state import Axis, initialize_model_parallel
from megatron.testing.local_world import run_world
from tools.bench.side_by_side import Spread, bench_parser, machine, seconds_of, write_json

BYTES = 12
"""Of a parameter and its moments in fp32."""

Seconds = dict[str, float]


def shapes(parameters: float) -> Iterator[tuple[str, tuple[int, int]]]:
    """Matrices of a transformer with about this many parameters, of width 1024: (name, shape)."""
    h, vocabulary = 1024, 32768
    yield "embedding", (vocabulary, h)
    for layer in range(math.ceil((parameters / h - vocabulary) / (12 * h))):
        for name, width in {"qkv": 3, "proj": 1, "fc1": 4, "fc2": 4}.items():
            yield f"layers.{layer}.{name}", (width * h, h)


class State:
    """One rank's rows of every tensor, as this program and as DCP take them."""

    def __init__(self, parameters: float, rank: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.local: dict[str, torch.Tensor] = {}
        self.boxes: dict[str, ShardedBoxes] = {}
        mesh = init_device_mesh("cpu", (ranks,))
        self.dtensors: dict[str, DTensor] = {}
        for name, (rows, columns) in shapes(parameters):
            mine = rows // ranks
            for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
                key, data = f"{kind}.{name}", torch.empty(mine, columns)
                data.uniform_(generator=generator)
                self.local[key] = data
                self.boxes[key] = ShardedBoxes((mine * ranks, columns), [((rank * mine, 0), data)])
                self.dtensors[key] = DTensor.from_local(data, mesh, [Shard(0)], run_check=False)

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self.local.values())


class Bench:
    """The ways to save and load, on one rank. Each returns its seconds by name; the slowest rank's count."""

    def __init__(self, root: Path, state: State, world: Axis) -> None:
        self.root, self.state, self.world = root, state, world

    def own_save(self) -> Seconds:
        with closing(CheckpointSaver(self.root / "own", self.world, background=False)) as saver:
            return {"save": self._saved(saver)[1]}

    def own_background_saves(self) -> Seconds:
        """Takes memory first, as a run does beside its first steps, and gives it back."""
        with closing(CheckpointSaver(self.root / "own", self.world, background=True)) as saver:
            saver.prepare(self.state.boxes)
            saver.wait()
            first, _ = self._saved(saver)
            stall, total = self._saved(saver)
        return {
            "stall of a run's first background save": first,
            "stall of a background save": stall,
            "background save": total,
        }

    def _saved(self, saver: CheckpointSaver) -> tuple[float, float]:
        """(seconds until training goes on, until all is on disk)"""
        self._clear("own")
        begin = time.perf_counter()
        saver.save(1, self.state.boxes, {"iteration": 1})
        stall = time.perf_counter() - begin
        saver.wait()
        total = time.perf_counter() - begin
        assert all(report.complete for report in saver.reports())
        return stall, total

    def dcp_save(self) -> Seconds:
        self._clear("dcp")
        tensors = dict(self.state.dtensors)
        return {"dcp.save": seconds_of(lambda: dcp.save(tensors, checkpoint_id=self.root / "dcp"))}

    def dcp_async_save(self) -> Seconds:
        self._clear("dcp")
        begin = time.perf_counter()
        future = dcp.async_save(dict(self.state.dtensors), checkpoint_id=self.root / "dcp")
        stall = time.perf_counter() - begin
        future.result()  # type: ignore[union-attr]
        return {"stall of dcp.async_save": stall, "dcp.async_save": time.perf_counter() - begin}

    def own_load(self) -> Seconds:
        begin = time.perf_counter()
        checkpoint = choose_checkpoint(checkpoint_folder(self.root / "own", 1), self.world)
        assert checkpoint is not None
        verified = time.perf_counter() - begin
        checkpoint.load(self.state.boxes, self.world)
        total = time.perf_counter() - begin
        return {"load": total, "of it reading into tensors, without checksums": total - verified}

    def dcp_load(self) -> Seconds:
        tensors = dict(self.state.dtensors)
        return {"dcp.load": seconds_of(lambda: dcp.load(tensors, checkpoint_id=self.root / "dcp"))}

    def rounds(self, count: int, limit: float) -> dict[str, list[float]]:
        """Up to `count` rounds after a first one that is not counted, and none that would begin after `limit` s."""
        groups: list[list[Callable[[], Seconds]]] = [
            [self.own_save, self.own_load, self.own_background_saves],
            [self.dcp_save, self.dcp_load, self.dcp_async_save],
        ]
        found = defaultdict[str, list[float]](list)
        began = time.monotonic()
        for number in range(count + 1):
            if self._slowest([float(number > 1 and time.monotonic() - began > limit)])[0]:
                break
            turn = number % len(groups)  # who comes first changes
            for group in groups[turn:] + groups[:turn]:
                for way in group:
                    seconds = way()
                    for name, slowest in zip(seconds, self._slowest(seconds.values()), strict=True):
                        found[name] += [slowest] if number else []
                for name in ("own", "dcp"):  # so that the ways do not add up
                    self._clear(name)
        return dict(found)

    def _clear(self, name: str) -> None:
        if self.world.first:
            shutil.rmtree(self.root / name, ignore_errors=True)
        dist.barrier()

    def _slowest(self, seconds: Iterable[float]) -> list[float]:
        values = torch.tensor(list(seconds), dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()


def measure(rank: int, ranks: int, root: Path, parameters: float, rounds: int, limit: float) -> tuple[int, Any]:
    """(bytes of this rank, seconds of every round)"""
    state = State(parameters, rank, ranks)
    return state.nbytes, Bench(root, state, initialize_model_parallel().world).rounds(rounds, limit)


def file_system(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((mount for mount in mounts if folder.resolve().is_relative_to(mount[0])), key=lambda m: len(m[0]))[1]


def refuse_to_swap(parameters: float) -> None:
    """Raises SystemExit if the state and its copies do not fit into the memory that is free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    needed = 3 * BYTES * parameters + 2**31
    if needed > free:
        raise SystemExit(
            f"--parameters {parameters:g} needs up to {needed / 2**30:.1f} GiB for the state, copies and files, and "
            f"{free / 2**30:.1f} GiB are free: give at most {(free - 2**31) / 3 / BYTES:.0e}"
        )


def main() -> int:
    parser = bench_parser(__doc__, 5, ranks=(2, "processes that hold equal parts"))
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--seconds", type=float, default=200, help="no round begins after this many seconds")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder of temporary files)")
    args = parser.parse_args()
    refuse_to_swap(args.parameters)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=args.folder) as name:
        facts = machine() | {"file_system": file_system(Path(name)), "parameters": args.parameters, "ranks": args.ranks}
        work = (Path(name), args.parameters, args.rounds, args.seconds)
        results = run_world(args.ranks, measure, *work, timeout=args.seconds + 600)
    size, seconds = sum(nbytes for nbytes, _ in results), results[0][1]
    found = {way: Spread.of(values) for way, values in seconds.items()}
    print(f"{facts['file_system']}, {args.ranks} ranks, {args.parameters:g} parameters, {size / 1e9:.2f} GB")
    for way, spread in found.items():
        print(f"{way:<52} {spread:6.2f} s" + ("" if "stall" in way else f"  {size / 1e9 / spread.median:6.2f} GB/s"))
    rows = [{"way": way, "seconds": spread, "rounds": seconds[way]} for way, spread in found.items()]
    write_json(args.json, facts | {"bytes": size}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Kills and cut connections at random points of uploads and downloads: nothing incomplete is loaded, nothing is lost.

    python -m tests.extensions.object_storage.campaign [--rounds 100] [--seed 1]

Each round has a writer process publish checkpoint-like folders through a proxy that cuts connections; half of the
writers are killed at a random moment. Then a reader verifies every published folder, through the same faults, against
the content that its number determines, and that each folder reported as saved is there.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import PurePath

from megatron.core.dist_checkpointing.file_storage import _built, located
from megatron.core.dist_checkpointing.integrity import SummedFile, damages, read_manifest, write_manifest
from megatron.core.dist_checkpointing.path_kind import saved_folders
from megatron.extensions import load
from megatron.extensions.operate.object_storage.fsspec_storage import FsspecStorage
from megatron.extensions.operate.object_storage.limits import LIMITS
from tests.extensions.object_storage.server import BUCKET, Faults, credentials, environment, faulty_proxy, s3_server

FILES = 3


def content(number: int, file: int) -> bytes:
    """Of a file of a folder; the largest takes two parts."""
    generator = random.Random(1000 * number + file)
    return generator.randbytes((6 << 20 if file == 0 else 1 << 18) + number)


def write(root: PurePath, first: int) -> None:
    """Publishes three folders, and prints the number of each that is saved."""
    storage = FsspecStorage("s3")
    for number in range(first, first + 3):
        final, sums = root / f"iter_{number:07d}", {}
        storage.begin(final)
        for name in range(FILES):
            with SummedFile(final / f"__{name}_0.distcp") as file:
                file.write(content(number, name))
            sums[f"__{name}_0.distcp"] = file.sums
        write_manifest(final, sums)
        storage.publish(final)
        print(number, flush=True)


def check(root: PurePath, saved: Sequence[int]) -> int:
    """Verifies the published folders. Returns their number; raises AssertionError."""
    folders = saved_folders(root)
    assert set(saved) <= set(folders), f"saved {sorted(saved)}, and there are {sorted(folders)}"
    for folder in folders.values():
        sums = read_manifest(folder)
        found = damages(folder, sums, list(sums))
        assert len(sums) == FILES and not found, f"{folder}: {found}"
    return len(folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", nargs=2, help="as the writer: the URL and the first number")
    args = parser.parse_args()
    load()
    LIMITS.part_bytes = 5 << 20
    if args.write is not None:
        write(located(args.write[0]), int(args.write[1]))
        return
    with s3_server() as port:
        for seed in range(args.seed, args.seed + args.rounds):
            print(one_round(port, seed), flush=True)


def one_round(port: int, seed: int) -> str:
    """One writer and one reader. Returns a line about them."""
    generator, faults = random.Random(seed), Faults(seed, cut=0.15)
    root, killed = located(f"s3://{BUCKET}/run{seed}"), seed % 2 == 0
    saved = list[int]()
    _built.cache_clear()  # a storage stays connected to the proxy of its round
    with faulty_proxy(port, faults) as proxy, environment(credentials(proxy)):
        for first in (1, 4):
            command = [sys.executable, "-m", __spec__.name, "--write", str(root), str(first)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
                if killed and first == 1:
                    time.sleep(generator.uniform(0.5, 4.0))
                    writer.kill()
                saved += [int(line) for line in writer.communicate()[0].split()]
        found = check(root, saved)
    assert killed or saved == [1, 2, 3, 4, 5, 6], saved
    return f"seed {seed}: {'killed, ' if killed else ''}{faults.cuts} cuts, {len(saved)} saved, {found} found"


if __name__ == "__main__":
    main()

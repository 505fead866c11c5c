"""Kill processes and cut connections during uploads and downloads, and check that nothing incomplete is loaded or lost.

    python -m tests.extensions.object_storage.campaign [--rounds 100] [--seed 1]

In each round, a writer process publishes three checkpoint-like folders through a proxy. The proxy cuts connections and
delays requests for seconds, even after the process that sent a request has died. Half of the writers are killed at a
random moment. A second writer publishes three folders with different content. The second writer begins with the first
folder that was not saved, or repeats the last folder. Then a reader verifies every published folder through the same
faults. The reader also checks that each folder that was reported as saved exists with the content of the last writer
that reported it.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import PurePath

from megatron.core.dist_checkpointing.file_storage import _built, located
from megatron.core.dist_checkpointing.integrity import SummedFile, damages, read_manifest, write_manifest
from megatron.core.dist_checkpointing.path_kind import saved_folders
from megatron.extensions import load
from megatron.extensions.operate.object_storage.attempts import AttemptStorage
from megatron.extensions.operate.object_storage.limits import LIMITS
from tests.extensions.object_storage.server import BUCKET, Faults, credentials, environment, faulty_proxy, s3_server

FILES = 3


def content(number: int, file: int, writer: int) -> bytes:
    """Return the content of a file in a folder. The largest file is uploaded in two parts."""
    generator = random.Random(1000 * number + 10 * writer + file)
    return generator.randbytes((6 << 20 if file == 0 else 1 << 18) + number)


def write(root: PurePath, first: int, writer: int) -> None:
    """Publish three folders. Print a line at the beginning, and print the number of each folder after saving it."""
    storage = AttemptStorage("s3")
    print("begun", flush=True)
    for number in range(first, first + 3):
        final, sums = root / f"iter_{number:07d}", {}
        storage.begin(final)
        scratch = storage.scratch(final)
        for name in range(FILES):
            with SummedFile(scratch / f"__{name}_0.distcp") as file:
                file.write(content(number, name, writer))
            sums[f"__{name}_0.distcp"] = file.sums
        write_manifest(scratch, sums)
        storage.publish(final)
        print(number, flush=True)


def check(root: PurePath, saved: Mapping[int, int]) -> int:
    """Verify the published folders. `saved` maps the number of each folder that was reported as saved to the folder's
    last writer. Return the number of published folders. The function raises AssertionError if a folder is missing or
    wrong."""
    folders = saved_folders(root)
    assert set(saved) <= set(folders), f"saved {sorted(saved)}, but found {sorted(folders)}"
    for number, folder in folders.items():
        sums = read_manifest(folder)
        found = damages(folder, sums, list(sums))
        assert len(sums) == FILES and not found, f"{folder}: {found}"
        crc32 = [zlib.crc32(content(number, 1, writer)) for writer in (0, 1)]
        by = crc32.index(sums["__1_0.distcp"]["crc32"])
        assert by == saved.get(number, by), f"{folder} was written by {by}, but reported as saved by {saved[number]}"
    return len(folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", nargs=3, help="as the writer: the URL, the first number, and its own")
    args = parser.parse_args()
    load()
    LIMITS.part_bytes = 5 << 20
    if args.write is not None:
        write(located(args.write[0]), int(args.write[1]), int(args.write[2]))
        return
    with s3_server() as port:
        for seed in range(args.seed, args.seed + args.rounds):
            print(one_round(port, seed), flush=True)


def one_round(port: int, seed: int) -> str:
    """Run one writer and one reader. Return a line that describes the result."""
    generator, faults = random.Random(seed), Faults(seed, cut=0.15, late=0.03)
    root, killed = located(f"s3://{BUCKET}/run{seed}"), seed % 2 == 0
    saved = dict[int, int]()
    _built.cache_clear()  # discard the cached storage, which is still connected to the proxy of the last round
    with faulty_proxy(port, faults) as proxy, environment(credentials(proxy)):
        for number in (0, 1):
            first = min(len(saved) + 1, 3)
            command = [sys.executable, "-m", __spec__.name, "--write", str(root), str(first), str(number)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
                assert writer.stdout is not None
                writer.stdout.readline()
                if killed and number == 0:
                    time.sleep(generator.uniform(0.0, 3.0))
                    writer.kill()
                saved |= {int(line): number for line in writer.communicate()[0].split()}
        time.sleep(faults.longest_hold if killed else 0)
        found = check(root, saved)
    assert killed or sorted(saved) == [1, 2, 3, 4, 5], saved
    late = f"{faults.cuts} cuts, {faults.held} held back"
    return f"seed {seed}: {'killed, ' if killed else ''}{late}, {len(saved)} saved, {found} found"


if __name__ == "__main__":
    main()

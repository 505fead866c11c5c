"""Hugging Face exports of a run's checkpoints, written by a process of their own while training continues.

    python -m megatron.extensions.hugging_face.export CHECKPOINT OUTPUT [--extension FILE.py] [--hf-family NAME|FILE]

converts a checkpoint that is complete on disk, so that training gives it nothing but disk and processor time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.extensions.conversion.convert import Conversion
from megatron.extensions.conversion.formats import Options
from megatron.extensions.hugging_face.family_files import add_families, family_to_write
from megatron.extensions.hugging_face.flags import HuggingFaceConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import load_extensions, loaded_extensions
from megatron.training.reliability.visible_text import visible

NOTE = "note on exports: "

PACKAGE = Path(__file__).resolve().parents[3]


class HFExporter:
    """Exports checkpoints one after the other, in order. On one rank.

    `held` are the checkpoints that must not be deleted.
    """

    doing = "exporting to Hugging Face"

    def __init__(self, config: RunConfig, held: list[Path]) -> None:
        options, save = config.options(HuggingFaceConfig), config.checkpoint.save
        assert save is not None and options.export_hf_interval is not None
        self.interval, self.held, self.families = options.export_hf_interval, held, options.hf_family or ()
        self.root = Path(options.export_hf_dir or Path(save) / "hf")
        self._waiting: deque[tuple[Path, Path]] = deque()
        self._running: subprocess.Popen[str] | None = None
        self._said = set[str]()

    def add(self, iteration: int, checkpoint: Path) -> None:
        """Queues a complete checkpoint if its turn has come."""
        if iteration % self.interval == 0:
            self.held.append(checkpoint)
            self._waiting.append((checkpoint, self.root / checkpoint.name))

    def poll(self, wait: bool = False) -> list[str]:
        """Starts the next export when the one before has ended. Returns a line for each that has ended, and its notes
        where they are new; with `wait`, after all of them."""
        lines: list[str] = []
        while self._waiting or self._running is not None:
            if self._running is None:
                self._running = _start(*self._waiting[0], self.families)
            if not wait and self._running.poll() is None:
                break
            said = self._running.communicate()[0].strip().splitlines()
            checkpoint, output = self._waiting.popleft()
            failed, self._running = self._running.returncode, None
            self.held.remove(checkpoint)
            last = said[-1] if said else f"exit code {failed}"
            lines.append(f"{output} was not exported: {last}" if failed else f"exported {checkpoint} to {output}")
            notes = [line for line in said if line.startswith(NOTE) and line not in self._said]
            lines += [] if failed else notes
            self._said.update(notes)
        return lines

    def abandon(self) -> list[str]:
        """Ends the export in progress and forgets those that wait, for a process that must leave. Returns a line for
        each."""
        lines = [f"{output} was not exported: the run stops" for _, output in self._waiting]
        if self._running is not None:
            self._running.terminate()
            self._running.communicate()
            self._running = None
        self._waiting.clear()
        return lines


def _start(checkpoint: Path, output: Path, families: Sequence[str]) -> subprocess.Popen[str]:
    """Starts the process of one export. It sees no GPU, and gives way to training."""
    paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    named = {"--extension": loaded_extensions(), "--hf-family": families}
    options = [f"{flag}={value}" for flag, values in named.items() for value in values]
    command = [sys.executable, "-m", __name__, str(checkpoint), str(output), *options]
    return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Exports one checkpoint, in place of an earlier export of it, with the extensions and families of its run. Returns
    the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("checkpoint", "output"):
        parser.add_argument(name, type=Path)
    for flag in ("--extension", "--hf-family"):
        parser.add_argument(flag, action="append", default=[])
    args = parser.parse_args(argv)
    os.nice(10)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that temporary files are removed
    try:
        load_extensions(args.extension)
        add_families(args.hf_family)
        options = Options(family=family_to_write(args.hf_family))
        conversion = Conversion(args.checkpoint, args.output, "hf", options, force=True)
        for note in conversion.notes:
            print(f"{NOTE}{visible(' '.join(note.split()))}")
        conversion.run(workers=1)
    except (ValueError, OSError, CheckpointError) as error:
        print(visible(" ".join(str(error).split())))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

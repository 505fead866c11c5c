"""Export of a run's checkpoints to Hugging Face folders. A separate process performs the export while training
continues.

    python -m megatron.extensions.interop.hugging_face.export CHECKPOINT OUTPUT \\
        [--extension FILE.py] [--hf-family NAME|FILE]

converts a checkpoint that is complete on disk. An export therefore takes only disk bandwidth and CPU time from
training.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path, PurePath

from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.extensions import load
from megatron.extensions.interop.conversion.convert import Conversion
from megatron.extensions.interop.conversion.formats import Options
from megatron.extensions.interop.conversion.stored_output import written_locally
from megatron.extensions.interop.hugging_face.family_files import add_families, family_to_write
from megatron.extensions.interop.hugging_face.flags import HuggingFaceConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import load_extensions, loaded_extensions
from megatron.training.hooks import Callback
from megatron.training.metrics.progress_bar import ProgressBar
from megatron.training.reliability.visible_text import visible

NOTE = "note on exports: "

PACKAGE = Path(__file__).resolve().parents[4]


COUNTS = struct.Struct("qq")
"""Binary format in which an export process reports the number of bytes written so far and the total number of bytes."""


class ExportProcess:
    """Process that runs one export. The process has no access to GPUs and runs at a lower priority than training."""

    def __init__(self, checkpoint: PurePath, output: PurePath, families: Sequence[str]) -> None:
        self.checkpoint, self.began = checkpoint, time.monotonic()
        # The output is written to a file, because training does not read it continuously, and a pipe could become full.
        self._counts = tempfile.TemporaryFile()  # noqa: SIM115
        fd = self._counts.fileno()
        paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        named = {"--extension": loaded_extensions(), "--hf-family": families, "--counts": (fd,)}
        options = [f"{flag}={value}" for flag, values in named.items() for value in values]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(checkpoint), str(output), *options],
            env=os.environ | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[fd],
        )

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> tuple[int, list[str]]:
        """Wait for the export and show its progress. Return the exit code and the output of the export process."""
        bar: ProgressBar | None = None
        while True:
            try:
                said = self._process.communicate(timeout=0.5)[0]
                break
            except subprocess.TimeoutExpired:
                done, total = self.progress()
                if bar is None and total:
                    what = f" exporting {self.checkpoint.name}"
                    bar = ProgressBar(what, total, "B", lambda line: print(line, flush=True))
                    bar.began = self.began
                if bar is not None:
                    bar.update(done)
        if bar is not None:
            bar.close()
        self._counts.close()
        return self._process.returncode, said.strip().splitlines()

    def progress(self) -> tuple[int, int]:
        """Return the number of bytes that the export has written and the number of bytes that it will write in total.
        Both numbers are 0 until the first bytes are written."""
        counts = os.pread(self._counts.fileno(), COUNTS.size, 0)
        return COUNTS.unpack(counts) if len(counts) == COUNTS.size else (0, 0)

    def terminate(self) -> None:
        self._process.terminate()
        self._process.communicate()
        self._counts.close()


class HFExporter:
    """Queue of exports on one rank. The exports run one after another.

    `held` lists the checkpoints that must not be deleted, because they have not been exported yet.
    """

    doing = "exporting to Hugging Face"

    def __init__(self, config: RunConfig, held: list[PurePath]) -> None:
        options, save = config.options(HuggingFaceConfig), config.checkpoint.save_root or Path()
        assert options.export_hf_interval is not None
        self.interval = options.export_hf_interval
        self.held = held
        self.families = options.hf_family or ()
        self.root = located(options.export_hf_dir or save / "hf")
        self._waiting: deque[tuple[PurePath, PurePath]] = deque()
        self._running: ExportProcess | None = None
        self._said = set[str]()

    def add(self, iteration: int, checkpoint: PurePath) -> None:
        """Queue a complete checkpoint for export if its iteration is a multiple of --export-hf-interval."""
        if iteration % self.interval == 0:
            self.held.append(checkpoint)
            self._waiting.append((checkpoint, self.root / checkpoint.name))

    def poll(self, wait: bool = False) -> list[str]:
        """Start the next export if the previous one has ended.

        Return one line for each export that ended. After a successful export, the line is followed by the export's
        notes, except for notes that an earlier export already returned. If `wait` is True, wait until all exports have
        ended.
        """
        lines: list[str] = []
        while self._waiting or self._running is not None:
            if self._running is None:
                self._running = ExportProcess(*self._waiting[0], self.families)
            if not wait and not self._running.ended():
                break
            failed, said = self._running.wait()
            checkpoint, output = self._waiting.popleft()
            self._running = None
            self.held.remove(checkpoint)
            last = said[-1] if said else f"exit code {failed}"
            lines.append(f"{output} was not exported: {last}" if failed else f"exported {checkpoint} to {output}")
            notes = [line for line in said if line.startswith(NOTE) and line not in self._said]
            lines += [] if failed else notes
            self._said.update(notes)
        return lines

    def abandon(self) -> list[str]:
        """Stop the current export and drop the queued exports before the process exits. Return one line for each
        dropped export."""
        lines = [f"{output} was not exported: the run stops" for _, output in self._waiting]
        if self._running is not None:
            self._running.terminate()
            self._running = None
        self._waiting.clear()
        return lines


class HFExports(Callback):
    """Callback that exports checkpoints of the run to Hugging Face folders."""

    def exporter(self, held: list[PurePath]) -> HFExporter:
        return HFExporter(self.config, held)


def main(argv: Sequence[str] | None = None) -> int:
    """Export one checkpoint. The arguments name the extensions and custom families that its run used. An existing
    export is replaced. Return the exit code."""
    load()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("checkpoint")
    parser.add_argument("output", type=located)
    for flag in ("--extension", "--hf-family"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("--counts", type=int, help="file descriptor for the progress")
    args = parser.parse_args(argv)
    os.nice(10)
    # On SIGTERM, raise SystemExit, so that `with` blocks delete partial files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        load_extensions(args.extension)
        add_families(args.hf_family)
        options = Options(family=family_to_write(args.hf_family))
        with written_locally(args.output, force=True) as folder:
            conversion = Conversion(located(args.checkpoint), folder, "hf", options, force=True)
            for note in conversion.notes:
                print(f"{NOTE}{visible(' '.join(note.split()))}")
            total = conversion.target.nbytes

            def show(done: int) -> None:
                if args.counts is not None:
                    os.pwrite(args.counts, COUNTS.pack(done, total), 0)

            conversion.run(workers=1, show=show)
    except (ValueError, OSError, CheckpointError) as error:
        print(visible(" ".join(str(error).split())))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Comparison of training under each of many layouts with training in one process; see `megatron.testing.parity`."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from megatron.testing import gradient_check
from megatron.testing.parity_plan import ParityPlan, Row, print_head
from megatron.testing.parity_rows import FINITE_DIFFERENCES, ONE_PROCESS, chosen, print_errors
from megatron.testing.reshard import Checkpoints, kinds
from megatron.testing.snapshot import Snapshot, differences, moved_by_rounding, relative_difference, train_in_world

TOLERANCE = 1e-9
"""Largest relative difference, in fp64 after two training steps, at which two results count as equal. A different
summation order cannot cause a larger difference."""


HEAD = f"{'layout':<32} {'ranks':>5}  {'verdict':<8} {'largest':>8} {'s':>6}  first difference, rule or error"


class Parity(ParityPlan):
    """Table of parity tests for one model, with one test per row. The test of a row runs when the row is first
    requested."""

    def __init__(
        self, flags: Sequence[str], root: Path, steps: int = 2, max_ranks: int = 8, timeout: float = 300.0
    ) -> None:
        """Prepare the rows in the same way as `ParityPlan`, without running them.

        Args:
            flags: Command line of pretrain_gpt.py.
            root: Folder for checkpoints.
            steps: Training steps to compare.
            max_ranks: Largest number of ranks of a layout.
            timeout: Seconds after which a world counts as hanging.
        """
        super().__init__(flags, steps, max_ranks)
        self.timeout = timeout
        self.checkpoints = Checkpoints(root)
        self._reference: Snapshot | None = None

    @property
    def reference(self) -> Snapshot:
        """Return the results of training in one process. The training runs once, on first use."""
        if self._reference is None:
            self._reference = train_in_world(1, self.model, self.steps, self.timeout)
        return self._reference

    def run(self, name: str) -> Row:
        """Train the model under a layout and compare the results with one process. If the training crashes, no
        exception is raised, but the row gets the verdict "crashed"."""
        row, began = self.plan(name), time.perf_counter()
        if row.verdict == "refused":
            return row
        try:
            if name == ONE_PROCESS:
                row = replace(row, verdict="trained", why=f"initial weights: sha256 {weights_hash(self.reference)}")
            elif name == FINITE_DIFFERENCES:
                found = gradient_check.gradient_differences(self.model, self.timeout)
                row = judged(row, ((f"gradient {key}", value) for key, value in found), gradient_check.TOLERANCE)
            elif name in self.layouts:
                snapshot = train_in_world(row.ranks, self.config(name), self.steps, self.timeout)
                row = compared(row, self.reference, snapshot)
            else:
                row = self._resharded(row)
        except Exception as error:
            row = replace(row, verdict="crashed", why=error_line(str(error) or repr(error)))
        return replace(row, seconds=round(time.perf_counter() - began, 2))

    def _resharded(self, row: Row) -> Row:
        source, target = row.name.split("-to-")
        if source not in self.checkpoints.saved:
            config = self.config(source)
            self.checkpoints.visit(source, config.parallel.smallest_world_size, config, train=True)
        config = self.config(target)
        wrong = self.checkpoints.visit(target, config.parallel.smallest_world_size, config, [source])[source]
        if wrong:
            return replace(row, verdict="differs", why=f"{wrong[0]} ({len(wrong)} tensors are not bit-equal)")
        counts = kinds(self.checkpoints.saved[source].truth)
        return replace(row, why="bit-equal: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))


def compared(row: Row, reference: Snapshot, snapshot: Snapshot) -> Row:
    """Compare a layout's snapshot with the one-process snapshot and return the verdict."""
    for one, other, where in ((reference, snapshot, "at this layout"), (snapshot, reference, "on one process")):
        if only := [key for key in one.tensors if key not in other.tensors]:
            return replace(row, verdict="differs", why=f"{only[0]}: missing {where}, as are {len(only) - 1} others")

    apart = dict[str, int]()

    def exactly() -> Iterator[tuple[str, float]]:
        """Yield pairs (key, difference). The difference is infinite if replicas differ or if initial weights are not
        bit-equal.

        Elements that differ only by rounding noise are excluded. `apart` counts the excluded elements.
        """
        for key, value in differences(reference, snapshot):
            bits = key.startswith("initial ") and not torch.equal(reference[key], snapshot[key])
            if bits or key in snapshot.differing_replicas:
                value = float("inf")
            elif value > TOLERANCE:
                name = key.rpartition(" ")[2]
                moved = moved_by_rounding(reference, snapshot, name, TOLERANCE)
                if moved is not None and moved.shape == reference[key].shape and moved.any():
                    value = relative_difference(reference[key][~moved], snapshot[key][~moved])
                    apart[name] = int(moved.sum())
            yield key, value

    row = judged(row, exactly(), TOLERANCE)
    if apart and not row.failed:
        others = f" and {len(apart) - 1} more parameters" if len(apart) > 1 else ""
        what = f"{sum(apart.values())} elements of {next(iter(apart))}{others}"
        row = replace(row, why=f"apart from {what}, whose gradient is zero but for rounding")
    torn = snapshot.differing_replicas
    first = next((message for key, message in torn.items() if row.why.startswith(f"{key}: ")), None)
    return row if first is None else replace(row, why=first)


def judged(row: Row, found: Iterator[tuple[str, float]], tolerance: float) -> Row:
    """Return `row` with the largest of the relative differences in `found`, which contains (key, difference) for each
    tensor. If a difference exceeds `tolerance`, the verdict is "differs", and the reason names the first such
    tensor."""
    pairs = list(found)
    row = replace(row, difference=max((value for _, value in pairs), default=0.0))
    wrong = [(key, value) for key, value in pairs if not value <= tolerance]
    if not wrong:
        return row
    others = f", and {len(wrong) - 1} more of {len(pairs)} tensors" if len(wrong) > 1 else ""
    return replace(row, verdict="differs", why=f"{wrong[0][0]}: {wrong[0][1]:.1e}{others}")


def weights_hash(snapshot: Snapshot) -> str:
    """Return the SHA-256 of the initial weights of the whole model."""
    digest = hashlib.sha256()
    for key in sorted(key for key in snapshot.tensors if key.startswith("initial weight")):
        digest.update(key.encode() + snapshot[key].numpy().tobytes())
    return digest.hexdigest()


def error_line(text: str) -> str:
    """Return the error of the first failed rank as one line. The line ends with the innermost line of user code in the
    traceback, if there is one."""
    first = re.split(r"\nrank \d+ of \d+:\n", text)[0]
    frames = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', first)
    own = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    own = [frame for frame in own if "/megatron/" not in frame[0]] or own
    messages = re.findall(r"^(?!Traceback|rank \d)\w[\w.]*(?:: .*)?$", first, re.MULTILINE)
    message = messages[-1] if messages else first.strip().splitlines()[-1]
    return message + (f" ({own[-1][0]}:{own[-1][1]} in {own[-1][2]})" if own else "")


def run_rows(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the tests that the command line selects, one for each row of the table. Return the exit code."""
    with tempfile.TemporaryDirectory(prefix="parity-") as root:
        try:
            parity = Parity(flags, Path(root), args.steps, args.max_ranks, args.timeout)
            names = chosen(args.layouts, parity.names)
            if torch.cuda.is_initialized():
                raise ValueError("--extension: an imported module has initialized CUDA, so ranks cannot be forked")
        except ValueError as error:
            print_errors(error)
            return 2
        print_head(flags, parity)
        return report(parity, names, args.json)


def report(parity: Parity, names: Sequence[str], path: Path | None) -> int:
    """Run the tests of all rows, print each row when its test is done, and return the exit code."""
    print(HEAD)
    rows, began = list[Row](), time.perf_counter()
    for name in [ONE_PROCESS, *names]:
        rows.append(parity.run(name))
        print(rows[-1], flush=True)
        if rows[0].failed:
            break  # The other rows are compared with the first row, the reference.
    verdicts = Counter(row.verdict for row in rows[1:])
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "nothing compared"
    print(f"{len(rows) - 1} rows: {counted} ({time.perf_counter() - began:.0f} s)")
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if any(row.failed for row in rows):
        return 1
    return 0 if verdicts["equal"] else 2

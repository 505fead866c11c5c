"""Run the parity matrix, and print one line per combination."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from math import inf

from tests.parity import matrix
from tests.parity.matrix import compared, whole_matrix
from tests.parity.matrix.combination import FACTORS
from tests.parity.matrix.design import write_design


def choices_of(text: str) -> list[tuple[str, str]]:
    """Parse "optimizer=gradients,parameters" into [("optimizer", "gradients"), ("optimizer", "parameters")]."""
    name, _, choices = text.partition("=")
    wrong = [choice for choice in choices.split(",") if choice not in FACTORS.get(name, {})]
    if wrong:
        known = f"of {name}: {', '.join(FACTORS[name])}" if name in FACTORS else f"factors: {', '.join(FACTORS)}"
        raise argparse.ArgumentTypeError(f"{text} names no choice of the matrix; {known}")
    return [(name, choice) for choice in choices.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(matrix.__doc__ or "").split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print the combinations and run none")
    parser.add_argument(
        "--with",
        dest="choices",
        nargs="+",
        type=choices_of,
        help="combinations with any of these: FACTOR=CHOICE,...",
    )
    parser.add_argument("--design", action="store_true", help="write design.txt anew")
    args = parser.parse_args(argv)
    if args.design:
        write_design()
        return 0
    chosen = {pair for pairs in args.choices or () for pair in pairs}
    wanted = [each for each in whole_matrix() if not chosen or any(each[name] == choice for name, choice in chosen)]
    began, failures, largest = time.perf_counter(), [], 0.0
    for number, combination in enumerate(wanted, 1):
        line = f"{number:4d}/{len(wanted)} {combination}"
        if args.list:
            print(line)
            continue
        start = time.perf_counter()
        try:
            wrong, error = compared(combination)
        except Exception as exception:
            wrong, error = f"{type(exception).__name__}: {str(exception)[-2000:]}", inf
        said = wrong or f"equal to {error:.1e}"
        print(f"{line}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
        if wrong is None:
            largest = max(largest, error)
        else:
            failures.append(str(combination))
    if not args.list:
        seconds = time.perf_counter() - began
        count = f"{len(wanted)} combinations, {len(failures)} differ from one process"
        print(f"{count}, the others are equal to {largest:.1e}, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plants every mutant and says what the matrix saw of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.parity import mutants
from tests.parity.matrix import whole_matrix
from tests.parity.mutants import MUTANTS, seen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(mutants.__doc__ or "").split("\n\n")[0])
    parser.add_argument("--matrix", action="store_true", help="look for the first red combination of the whole matrix")
    args = parser.parse_args(argv)
    survivors = []
    for name, (_, combinations) in MUTANTS.items():
        red = None
        for combination in whole_matrix() if args.matrix else combinations:
            said = seen(name, combination)
            if said is not None or not args.matrix:
                red = said
                print(f"{name} | {combination} | {said or 'NOT NOTICED'}", flush=True)
                if args.matrix or said is None:
                    break
        if red is None:
            survivors.append(name)
    print(f"{len(MUTANTS)} mutants, {len(survivors)} survived: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

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
    for name, (_, own) in MUTANTS.items():
        for combination in whole_matrix() if args.matrix else [own]:
            if said := seen(name, combination):
                print(f"{name} | {combination} | {said}", flush=True)
                break
        else:
            print(f"{name} | NOT NOTICED", flush=True)
            survivors.append(name)
    print(f"{len(MUTANTS)} mutants, {len(survivors)} survived: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

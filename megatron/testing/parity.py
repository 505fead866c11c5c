"""Train a model under many layouts, and compare the weights, loss, gradients and moments with training in one process.

    python -m megatron.testing.parity --extension my_activation.py -- --activation-func my_activation --num-layers 8

Flags after `--` describe the model as on the command line of pretrain_gpt.py, including components of extensions. Other
flags get tiny defaults: 4 layers of hidden size 32, synthetic data and two steps. All runs are in fp64 on gloo ranks of
this machine. Rows of the table:

- `one-process`: the reference; shows the SHA-256 of the initial weights.
- `finite-differences`: compares each gradient with finite differences of the loss, in one process.
- a layout, such as `tp2-sp` or `pp2-zb-v`: initial weights must be bit-identical to those of `one-process`. Loss,
  gradient norm, gradients, weights, and optimizer and callback states of each step must agree within 1e-9. The row
  `given` is the layout that the flags after `--` set. Some gradients, such as those of key biases, are zero except for
  rounding. Sign-based optimizers amplify the rounding. Elements of weights and states that differ only for this reason
  are allowed, and the row shows how many there are.
- `A-to-B`: a checkpoint saved under layout A and loaded under layout B must have bit-equal weights and states.

The `on_start` method of callbacks that store state in checkpoints is called at the start, and their `on_step_end`
method is called after each step.

The exit code is 0 if no row differs or crashed, 1 if at least one row differs or crashed, and 2 if the flags are wrong
or validation refuses every row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.extensions import load
from megatron.testing.parity_rows import chosen, possible_names, print_errors
from megatron.training.config.problem import checked_texts
from megatron.training.reliability.visible_text import visible_output


def main(argv: Sequence[str] | None = None) -> int:
    load()
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args = build_parser().parse_args(arguments[:cut])
    flags = [*(word for name in args.extension for word in ("--extension", name)), *arguments[cut + 1 :]]
    if args.layouts and (known := possible_names(flags)) is not None:
        try:
            chosen(args.layouts, known)
        except ValueError as error:
            print_errors(error)
            return 2
    if args.list:
        from megatron.testing.parity_plan import list_rows

        return list_rows(flags, args.layouts, args.steps, args.max_ranks)
    from megatron.testing.layout_matrix import run_rows  # imports torch, which takes seconds

    return run_rows(args, flags)


def build_parser() -> argparse.ArgumentParser:
    parser = checked_texts(
        argparse.ArgumentParser(
            prog="python -m megatron.testing.parity",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage="%(prog)s [--extension FILE.py|package.module]... [options] -- FLAGS",
        )
    )
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        metavar="FILE",
        help="extension to import; repeat the flag for each extension",
    )
    parser.add_argument(
        "--layouts", nargs="+", metavar="NAME", help="rows to run (default: all rows, which --list prints)"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and their flags without running them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file as well")
    parser.add_argument("--steps", type=int, default=2, help="training steps to compare (default: 2)")
    parser.add_argument(
        "--max-ranks", type=int, default=8, help="refuse layouts with more ranks than this (default: 8)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which a layout counts as hanging (default: 300)"
    )
    return parser


if __name__ == "__main__":
    with visible_output():
        sys.exit(main())

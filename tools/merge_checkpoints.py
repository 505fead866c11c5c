"""Merge checkpoints of one model into a mean, a weighted mean, or an emulation of a learning-rate decay.

    python tools/merge_checkpoints.py --input runs/a runs/b --output runs/mean
    python tools/merge_checkpoints.py --input runs/a runs/b --weights 0.25 0.75 --output runs/weighted
    python tools/merge_checkpoints.py --input runs/a --last 5 --stable --output runs/mean
    python tools/merge_checkpoints.py --input runs/a --last 5 --stable --emulate-decay minus_sqrt --output runs/decayed

Inputs are checkpoints of pretrain_gpt.py, Hugging Face folders and checkpoints of Megatron-LM, in any combination. The
output is written in any of these formats, and contains only the weights unless --optimizer-state is given. Tensors are
read, summed in fp32 and written one at a time, without a GPU. The file merge.json in the output lists the inputs and
their weights.

--emulate-decay chooses the weights such that the merged model approximates a run whose learning rate anneals from the
first checkpoint to the last (arXiv 2507.17634, theorem 3.1). The flag accepts the same shapes as --lr-wsd-decay-style.
Let w_i be the mean of the annealed learning rate between checkpoints i - 1 and i, divided by the constant learning rate
before the anneal. Then checkpoint j has the weight w_j - w_{j+1}. The first checkpoint has the weight 1 - w_1, and the
last has the weight w_k.

An existing folder is never replaced. The output folder appears only when it is complete. No code from the inputs is
executed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.extensions.interop.conversion.convert import Conversion, formats, parse_bytes, parse_dtype
from megatron.extensions.interop.conversion.formats import Options
from megatron.extensions.interop.conversion.merge import Selection, Weighting, choose, merged_input
from megatron.extensions.interop.conversion.merge_weights import STYLES, Decay

from .common import add_extension_flag, add_family_flag, family_of_output, refuse, run_tool, too_small, tool_parser
from .convert_checkpoint import convert


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    options = Options(
        weights_only=not args.optimizer_state,
        dtype=args.dtype and parse_dtype(args.dtype),
        max_shard_bytes=parse_bytes(args.max_shard_size),
        family=family_of_output(args),
    )
    decay = Decay(args.emulate_decay, args.decay_floor or 0.0) if args.emulate_decay else None
    weighting = Weighting(args.weights, args.allow_unnormalized, decay)
    try:
        chosen = choose(Selection(args.input, args.last, args.stable, args.iterations or ()))
        given = merged_input(chosen, weighting, args.optimizer_state)
        conversion = Conversion(given, args.output, args.to, options, force=None)
        for note in conversion.notes:
            print(f"note: {note}", file=sys.stderr)
        convert(conversion, args.workers, "merging")
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    merged = conversion.source.merged or {}
    for each in merged["sources"]:
        print(f"{each['weight']:12.8f}  {each['path']}")
    print(f"merged into {args.output} ({conversion.formats[1]}): {conversion.target.nbytes:,} bytes of weights")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add_family_flag(parser, argv, writes=True)
    add = parser.add_argument
    add("--input", type=located, nargs="+", required=True, metavar="PATH", help="checkpoints, or the folder of one run")
    add("--output", type=Path, required=True, help="folder to create")
    add("--last", type=int, metavar="K", help="merge the newest K checkpoints of the run")
    text = "with --last: only checkpoints at the peak learning rate, after the warm-up and before the decay"
    add("--stable", action="store_true", help=text)
    text = "merge these checkpoints of the run; with several inputs: the iteration of each input that records none"
    add("--iterations", type=int, nargs="+", metavar="N", help=text)
    add("--weights", type=float, nargs="+", metavar="W", help="one weight per checkpoint (default: equal weights)")
    add("--allow-unnormalized", action="store_true", help="accept --weights whose sum is not 1")
    text = "choose weights that emulate a learning-rate decay of this shape from the first to the last checkpoint"
    add("--emulate-decay", choices=STYLES, help=text)
    text = "learning rate at the end of the emulated decay, as a share of the run's (default: 0)"
    add("--decay-floor", type=float, metavar="SHARE", help=text)
    add("--optimizer-state", action="store_true", help="merge the optimizer's state too, so that a run can resume")
    add(
        "--to",
        choices=formats(),
        default="dcp",
        help="format of the output, as in convert_checkpoint.py (default: dcp)",
    )
    add(
        "--dtype",
        help="number format of all weights: float32, bfloat16 or float16 (default: the widest of the inputs')",
    )
    add("--max-shard-size", default="5GB", help="largest Hugging Face weight file (default: 5GB)")
    add("--workers", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args(argv)
    refuse([*too_small(args, workers=1, last=2, decay_floor=0), *_conflicts(args)])
    return args


def _conflicts(args: argparse.Namespace) -> list[str]:
    """Return an error message for each combination of flags that contradict each other, and for each flag that requires
    another flag."""
    rules = {
        "--last and --iterations both choose checkpoints; give one": args.last is not None and args.iterations,
        "--weights and --emulate-decay both give weights; give one": args.weights and args.emulate_decay,
        "--stable needs --last": args.stable and args.last is None,
        "--allow-unnormalized needs --weights": args.allow_unnormalized and not args.weights,
        "--decay-floor needs --emulate-decay": args.decay_floor is not None and not args.emulate_decay,
        f"--decay-floor {args.decay_floor}: must be below 1": (args.decay_floor or 0) >= 1,
        "--optimizer-state and --dtype exclude each other; leave one out": args.optimizer_state and args.dtype,
    }
    return [problem for problem, broken in rules.items() if broken]


if __name__ == "__main__":
    run_tool(main)

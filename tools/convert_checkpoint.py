"""Convert checkpoints between Hugging Face folders, Megatron-LM's torch_dist format, and pretrain_gpt.py's format.

    python tools/convert_checkpoint.py --input Llama-3.1-8B --output runs/llama/start
    python tools/convert_checkpoint.py --input runs/llama/checkpoints --output exported --dtype bfloat16
    python tools/convert_checkpoint.py --input Qwen3-0.6B --output runs/qwen/start --check "The capital of France is"

The format of the input is detected. --to selects the output format. The default is this program's format, or the
Hugging Face format if the input has this program's format. Tensors are read, converted and written one at a time,
without a GPU. No code from the input is executed: pickles are loaded with weights_only, and an extension that a
checkpoint names runs only if --extension also names it, or if the run is the user's own (SECURITY.md). The output
folder appears only when it is complete.
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
from megatron.extensions.interop.conversion.stored_output import written_locally
from megatron.training.config.problem import any_text
from megatron.training.metrics.progress_bar import ProgressBar

from .common import (
    add_config_flags,
    add_extension_flag,
    add_family_flag,
    family_of_output,
    refuse,
    run_tool,
    too_small,
    tool_parser,
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    options = Options(
        weights_only=args.weights_only,
        dtype=args.dtype and parse_dtype(args.dtype),
        max_shard_bytes=parse_bytes(args.max_shard_size),
        family=family_of_output(args),
        weights=None if args.weights == "trained" else args.weights,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
    )
    if args.check is not None:
        from megatron.extensions.interop.hugging_face.hf_format import compare_logits, require_transformers

        require_transformers()
    try:
        with written_locally(args.output, args.force) as folder:
            conversion = Conversion(args.input, folder, args.to, options, args.force)
            folders = dict(zip(conversion.formats, (args.input, args.output), strict=True))
            if args.check is not None and folders.keys() != {"hf", "dcp"}:
                raise ValueError(
                    "--check compares a Hugging Face folder with a checkpoint, but this conversion does not have both"
                )
            if folder != args.output and args.check is not None:
                raise ValueError(f"--check needs a local output, but --output {args.output} is a URL; remove --check")
            for note in conversion.notes:
                print(f"note: {note}", file=sys.stderr)
            convert(conversion, args.workers)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    source, target = conversion.formats
    size = f"{conversion.target.nbytes:,} bytes of weights"
    print(f"converted {args.input} ({source}) to {args.output} ({target}): {size}")
    if args.check is not None:
        found = compare_logits(folders["hf"], folders["dcp"], args.check)
        print(found)
        if not found.equal:
            rule = "the models differ by more than rounding in fp32 (1% of the largest logit)"
            print(f"error: --check: {rule}; the output was written", file=sys.stderr)
            return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add_family_flag(parser, argv, writes=True)
    add = parser.add_argument
    add("--input", type=located, required=True, help="folder of the model to convert")
    add("--output", type=located, required=True, help="folder to create")
    add(
        "--to",
        choices=formats(),
        help="output format: hf (Hugging Face), dcp (this program's) or megatron (Megatron-LM's)",
    )
    add(
        "--dtype",
        help="number format of all weights: float32, bfloat16 or float16 (default: as stored). From a checkpoint in "
        "16 bits, other formats are converted from the optimizer's fp32 weights, if it has them",
    )
    text = "weights of this program's checkpoint: trained, or an average such as ema or ema.decay_0_999"
    add("--weights", default="trained", metavar="NAME", help=text)
    add("--max-shard-size", default="5GB", help="largest Hugging Face weight file (default: 5GB)")
    add(
        "--weights-only",
        action="store_true",
        help="omit the optimizer state of a Megatron-LM checkpoint; a run then starts at iteration 0",
    )
    add("--workers", type=int, default=1, help="processes (default: 1)")
    add("--check", type=any_text, metavar="TEXT", help="compare logits for this text with those of transformers")
    add("--force", action="store_true", help="replace the output folder if it contains a model")
    add_config_flags(parser, "vocabulary, from Hugging Face", "make_vocab_size_divisible_by")
    args = parser.parse_args(argv)
    refuse(too_small(args, workers=1, make_vocab_size_divisible_by=1))
    return args


def convert(conversion: Conversion, workers: int, what: str = "converting") -> None:
    """Convert a model and show progress."""
    bar = ProgressBar(what, conversion.target.nbytes, "B")
    try:
        conversion.run(workers, bar.update)
    finally:
        bar.close()


if __name__ == "__main__":
    run_tool(main)

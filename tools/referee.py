"""Check another program's loss and gradients for a model and a batch, tensor by tensor, against fp64.

    python tools/referee.py --model Llama-3.2-1B --batch batch.npz --gradients gradients.safetensors --loss 2.3456
    python tools/referee.py --model runs/llama/checkpoints --batch b.npz --gradients g.safetensors --computed-in bf16
    python tools/referee.py --model Mixtral --batch b.npz --gradients g.safetensors -- --moe-aux-loss-coeff 1e-2
    python tools/referee.py --step runs/llama/checkpoints/steps/iter_0000100      # of --dump-step 100 here

The model is a Hugging Face folder, a checkpoint of pretrain_gpt.py or a torch_dist checkpoint of Megatron-LM. It runs
forward and backward here in fp64 in one process, and again in the number format of the other program: a gradient may be
four times as far from fp64 as this program's own. For each gradient beyond that distance, in the order of the backward
pass, the table describes the difference: a factor such as 1/2 from an axis that was averaged twice, a missing sum over
an axis, a single shard or expert, swapped or transposed blocks.

The batch is an .npz with `tokens` and `labels` [samples, s], where label i follows token i, and optionally `loss_mask`;
or with `input_ids` and optionally `labels` in the form of transformers, with -100 for labels that do not count. The
loss is the mean over all labels that count. Gradients are a .safetensors file or a folder of torch's DCP, by the names
of transformers or of this program, a folder in a format of checkpoints with gradients in the place of weights, or the
`iter_XXXXXXX` of Megatron-LM's --save-wgrads-interval. Flags of pretrain_gpt.py after `--` supply values that the
configuration of the model does not give. Exit code 0: equal; 1: a difference; 2: wrong input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file in a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.extensions.interop.conversion.convert import Input
from megatron.extensions.interop.conversion.formats import Options
from megatron.extensions.observe.diagnosis.gradient_dump import LOSS
from megatron.testing.referee.dumps import open_dump
from megatron.testing.referee.judgement import Judgement, judgement_of
from megatron.testing.referee.reference import Batch, Model
from megatron.training.config.run_config import RunConfig

from .common import add_extension_flag, parted, run_tool, tool_parser

FORMATS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = parted(argv)
    args = parse(own)
    source, batch = Input.at(args.model).open(Options()), Batch.read(args.batch)
    refuse_dropout(args, source.config)
    dump = open_dump(args.gradients, source)
    own = "torch." + source.config.parallel.params_dtype if args.step else str(dump.dtype)
    computed_in = args.computed_in or FORMATS[own.removeprefix("torch.")]
    found = judgement_of(Model(source, computed_in, tuple(flags)), batch, dump, args.loss)
    print_table(found, args.all)
    print(*found.summary(), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps(record_of(found), indent=1))
    return 0 if found.equal else 1


def print_table(found: Judgement, every: bool) -> None:
    """Print the gradients that differ, or all of them, in the order of the backward pass."""
    shown = {name: verdict for name, verdict in found.rows.items() if every or not verdict.equal}
    if not shown:
        return
    width = max(map(len, shown))
    print(f"{'gradient':<{width}}  difference   allowed  looks like")
    for name, verdict in shown.items():
        print(f"{name:<{width}}  {verdict.difference:>10.2e}  {verdict.allowed:>8.1e}  {verdict.cause or 'equal'}")


def record_of(found: Judgement) -> dict[str, object]:
    """Return the judgement as JSON."""
    return {
        "equal": found.equal,
        "loss": found.loss,
        "found_loss": found.found_loss,
        "first": found.first,
        "gradients": {name: vars(verdict) for name, verdict in found.rows.items()},
        "missing": found.missing,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    args = build_parser(argv).parse_args(argv)
    given = [args.model, args.batch, args.gradients]
    if args.step is not None and any(each is not None for each in (*given, args.loss)):
        raise ValueError("--step provides the model, the batch, the gradients and the loss; leave out their flags")
    if args.step is None and None in given:
        raise ValueError("--model, --batch and --gradients are required, or --step instead")
    if args.step is not None:
        args.model = args.batch = args.gradients = args.step
        try:
            args.loss = float(json.loads((args.step / LOSS).read_text())["loss"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--step {args.step} holds no step of --dump-step: {LOSS}: {error}") from None
    return args


def refuse_dropout(args: argparse.Namespace, config: RunConfig) -> None:
    """Refuse a step of this program with dropout, because it cannot be repeated without its random numbers."""
    model = config.model
    if args.step is not None and (model.hidden_dropout or model.attention_dropout):
        remedy = "dump one with --hidden-dropout 0 --attention-dropout 0"
        raise ValueError(f"--step {args.step} was computed with dropout, which is left out here; {remedy}")


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add = parser.add_argument
    add("--model", type=Path, help="folder of the model")
    add("--batch", type=Path, help=".npz of the samples")
    add("--gradients", type=Path, help=".safetensors file, or folder, of the other program's gradients")
    add("--step", type=Path, help="folder of --dump-step, instead of all of these")
    add("--loss", type=float, help="the other program's mean loss, in nats")
    add(
        "--computed-in",
        choices=list(FORMATS.values()),
        help="number format of the other program's computation (default: that of the gradients)",
    )
    add("--all", action="store_true", help="print equal gradients too")
    add("--json", type=Path, help="file for the judgement")
    return parser


if __name__ == "__main__":
    run_tool(main)

"""Check another program's loss and gradients for a model and a batch, tensor by tensor, against fp64.

    python tools/referee.py --model Llama-3.2-1B --batch batch.npz --gradients gradients.safetensors --loss 2.3456
    python tools/referee.py --model runs/llama/checkpoints --batch b.npz --gradients g.safetensors --computed-in bf16
    python tools/referee.py --model Mixtral --batch b.npz --gradients g.safetensors -- --moe-aux-loss-coeff 1e-2
    python tools/referee.py --step runs/llama/checkpoints/steps/iter_0000100      # saved with --dump-step
    python tools/referee.py --model runs/llama/checkpoints/iter_0000099 --iteration 100 --gradients g.safetensors
    python tools/referee.py --model Llama-3.2-1B --samples 0-7 --gradients g.safetensors -- --data-path corpus \\
        --seq-length 4096 --train-iters 1000 --global-batch-size 8

The model is a Hugging Face folder, a checkpoint of pretrain_gpt.py or a torch_dist checkpoint of Megatron-LM. This
program runs a forward and a backward pass of the model in one process, first in fp64 and then in the number format of
the other program. A gradient of the other program may differ from the fp64 gradient by four times as much as this
program's gradient in the other program's number format. The table lists the gradients that differ by more than this, in
the order of the backward pass, and describes each difference. Examples are a factor such as 1/2 from an axis that was
averaged twice, a missing sum over an axis, a difference in a single shard or expert, and swapped or transposed blocks.

The batch is an .npz file in one of two forms. In the first, it contains `tokens` and `labels` [samples, s], where label
i follows token i, and optionally `loss_mask`. In the second, it contains the `input_ids` and optionally the `labels` of
transformers, where labels of -100 are ignored. Samples with several documents also have `document_ids` or `cu_seqlens`,
and optionally `position_ids`. Instead of a batch file, samples of the training data can be used: --samples selects them
by their numbers in the run, and --iteration selects all samples of a step. The loss is the mean over all labels that
are not masked.

The gradients can have one of three forms. The first is a .safetensors file or a torch.distributed.checkpoint folder,
with parameter names of transformers or of this program. The second is a folder in a checkpoint format that contains
gradients in place of weights. The third is the folder `iter_XXXXXXX` that Megatron-LM writes with
--save-wgrads-interval. Flags of pretrain_gpt.py after `--` supply values that the model's configuration lacks, such as
the data. The exit code is 0 if no given gradient differs, 1 if a gradient differs, and 2 for wrong input. Missing
gradients are counted, but do not change the exit code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.extensions.interop.conversion.convert import Input
from megatron.extensions.interop.conversion.formats import Options
from megatron.extensions.observe.diagnosis.gradient_dump import LOSS
from megatron.testing.referee.batch import Batch
from megatron.testing.referee.configuration import with_flags
from megatron.testing.referee.data_set import Chosen, batch_of_run, sample_numbers
from megatron.testing.referee.dumps import Dump, open_dump
from megatron.testing.referee.judgement import Judgement, judgement_of
from megatron.testing.referee.reference import Model
from megatron.training.config.run_config import RunConfig

from .common import add_extension_flag, parted, refuse_unwritable, run_tool, tool_parser

FORMATS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = parted(argv)
    args = parse(own)
    source = Input.at(args.model, flag="--step" if args.step else "--model").open(Options(dtype=torch.float64))
    refuse_dropout(args, source.config)
    config = with_flags(source, flags, args.chosen is not None)
    dump = open_dump(args.gradients, source, "--step" if args.step else "--gradients")
    batch = Batch.read(args.batch) if args.chosen is None else batch_of_run(source, config, args.chosen)
    computed_in = args.computed_in or number_format(args, source.config, dump)
    found = judgement_of(Model(source, computed_in, config), batch, dump, args.loss)
    print_table(found, args.all)
    print(*found.summary(), sep="\n")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record_of(found), indent=1))
    return 0 if found.equal else 1


def print_table(found: Judgement, every: bool) -> None:
    """Print a table of the gradients that differ, or of all gradients if `every` is true, in the order of the backward
    pass."""
    shown = {name: verdict for name, verdict in found.rows.items() if every or not verdict.equal}
    if not shown:
        return
    width = max(map(len, shown))
    print(f"{'gradient':<{width}}  difference   allowed  looks like")
    for name, verdict in shown.items():
        print(f"{name:<{width}}  {verdict.difference:>10.2e}  {verdict.allowed:>8.1e}  {verdict.cause or 'equal'}")


def record_of(found: Judgement) -> dict[str, object]:
    """Return the judgement as a dictionary for JSON."""
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
    batches = {"--batch": args.batch, "--samples": args.samples, "--iteration": args.iteration}
    given = {"--model": args.model, **batches, "--gradients": args.gradients, "--loss": args.loss}
    if args.step is not None:
        if names := [name for name, value in given.items() if value is not None]:
            rule = "contains the model, the batch, the gradients and the loss"
            raise ValueError(f"--step {args.step} {rule}; leave out {', '.join(names)}")
        args.model = args.batch = args.gradients = args.step
        args.loss = loss_of(args.step)
    chosen = [name for name, value in batches.items() if value is not None]
    missing = [name for name in ("--model", "--gradients") if given[name] is None]
    missing += [] if chosen else ["--batch (or --samples or --iteration)"]
    if args.step is None and missing:
        raise ValueError(f"{', '.join(missing)} must be given, or --step instead of all")
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} each select samples; use one of them")
    if args.json is not None:
        refuse_unwritable("--json", args.json)
    numbers = sample_numbers(args.samples) if args.samples is not None else ()
    args.chosen = Chosen(numbers, args.iteration) if chosen and args.batch is None else None
    return args


def loss_of(step: Path) -> float:
    """Read the loss of the step that --dump-step has saved in a folder. Raises ValueError if the folder contains no
    loss."""
    try:
        return float(json.loads((step / LOSS).read_text())["loss"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = "does not exist" if not step.exists() else f"holds no step of --dump-step: {LOSS}: {error}"
        raise ValueError(f"--step {step} {found}; give the folder that a run with --dump-step names") from None


def number_format(args: argparse.Namespace, config: RunConfig, dump: Dump) -> str:
    """Return the number format in which the judged gradients were computed. If the gradients are from a step of this
    program, return the number format of the run; otherwise, return the dtype of the gradients. Raises ValueError if
    `FORMATS` does not contain the format."""
    dtype = config.parallel.params_dtype if args.step else str(dump.dtype).removeprefix("torch.")
    if dtype not in FORMATS:
        raise ValueError(
            f"--gradients {args.gradients} are {dtype}; say in which format they were computed: --computed-in"
        )
    return FORMATS[dtype]


def refuse_dropout(args: argparse.Namespace, config: RunConfig) -> None:
    """Raise ValueError if the step of this program used dropout, because the step cannot be repeated without its random
    numbers."""
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
    add("--samples", metavar="0-7,12", help="numbers of training samples in the run, instead of --batch")
    add("--iteration", type=int, metavar="N", help="training step whose samples are used, counted from 1")
    add("--gradients", type=Path, help=".safetensors file, or folder, of the other program's gradients")
    add("--step", type=Path, help="folder of --dump-step, instead of --model, --batch, --gradients and --loss")
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

"""Find out whether a loss spike was caused by a document, by the whole batch, or by the learning rate.

    python tools/bisect_spike.py runs/a
    python tools/bisect_spike.py runs/a --iteration 1414 --from 1400 -- --tp 2      # under this layout, on CPU ranks

The tool trains four branches from the checkpoint before the spike: unchanged; with the document of the highest loss
replaced; with the whole batch replaced; and with the learning rate held at the checkpoint's value (or at a tenth of it,
if it has not risen since then). One process can repeat the training of any layout, because sample order, dropout and
learning rates do not depend on the layout. The spike is the cause of the run's last rollback or, without a rollback,
the largest loss increase in metrics.jsonl. Flags of pretrain_gpt.py after `--` change the configuration. The exit code
is 0 if the cause was found, 1 if no single cause was found or there is no spike, and 2 if the folder or the flags are
wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.operate.rollback.bisection import RunFiles, bisect, lines_of
from megatron.extensions.operate.rollback.branches import branch, config_of
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.visible_text import visible

from .common import add_extension_flag, parted, refuse, run_tool, too_small, tool_parser

SHOWN = 200
"""Maximum number of characters of a text to show."""


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = parted(argv)
    args = build_parser(own).parse_args(own)
    refuse(too_small(args, after=0))
    files = RunFiles.read(args.run, args.iteration, args.checkpoint)
    config = config_of(args.run, files.loaded, flags)
    for found in bisect(files, partial(branch, config, args.world_size), args.after):
        if isinstance(found, str):
            print(found, flush=True)
            continue
        for line in lines_of(found, partial(decoded, config)):
            print(line)
        return int(found.cause in ("none", "gone"))
    raise AssertionError("a bisection ends with a finding")


def decoded(config: RunConfig, tokens: Sequence[int]) -> str:
    """Return the beginning of the text of `tokens`. If the run has no tokenizer, return the beginning of the list of
    token ids."""
    if not config.tokenizer.tokenizer_type:
        return f"tokens {' '.join(map(str, tokens))}"[:SHOWN]
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size)
    return visible(repr(tokenizer.detokenize(list(tokens))[:SHOWN]))


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="--save folder of the run")
    add("--iteration", type=int, help="iteration of the spike, as in the log")
    text = "iteration of the checkpoint to begin with; default: the newest before the spike"
    add("--from", type=int, dest="checkpoint", metavar="ITERATION", help=text)
    add("--after", type=int, default=3, help="steps after the spike in each branch (default: 3)")
    add("--world-size", type=int, help="number of ranks; default: the fewest that the flags after -- need")
    return parser


if __name__ == "__main__":
    run_tool(main)

"""Replay the step at which a run ended because of a NaN or infinite value, and report where this value first occurred.

    python tools/replay_step.py SAVE/nan/iter_0000012
    python tools/replay_step.py SAVE/nan/iter_0000012 -- --tp 2 --pp 2      # under this layout, on CPU ranks

One process is enough for any layout of the run, and the data files are not needed. Flags of pretrain_gpt.py after `--`
change the configuration, for example --no-bf16. The exit code is 0 if the replay has the same result as the run and
finds a non-finite value, 1 if the result differs or if all values are finite, and 2 if the folder or the flags are
wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.extensions.observe.diagnosis.step_dump import SavedStep
from megatron.extensions.observe.diagnosis.step_replay import replay

from .common import add_extension_flag, parted, run_tool, tool_parser


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = parted(argv)
    args = build_parser(own).parse_args(own)
    saved = SavedStep.read(args.folder)
    print(f"iteration {saved.step.iteration}, samples from {saved.step.first_sample} on: {saved.step.samples}")
    print("in the run: " + (saved.finding.describe() if saved.finding else "all values were finite in a second pass"))
    found = replay(args.folder, flags, args.world_size)
    print("here:       " + (found.describe() if found else "all values are finite"))
    same = saved.finding is None if found is None else found.same_as(saved.finding)
    print("the results are the same" if same else "the results differ")
    return 0 if same and found is not None else 1


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    parser.add_argument("folder", type=Path, help="folder of the saved step, such as SAVE/nan/iter_0000012")
    parser.add_argument("--world-size", type=int, help="ranks; default: the fewest that the flags after -- need")
    return parser


if __name__ == "__main__":
    run_tool(main)

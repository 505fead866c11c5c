"""List the contents of a checkpoint, or compare two checkpoints.

    python tools/inspect_checkpoint.py checkpoints/
    python tools/inspect_checkpoint.py checkpoints/iter_0000100 other/iter_0000100

For a folder of checkpoints, the tool opens the one that a run would load: the latest, or the newest undamaged one. It
reads every file and verifies its checksum. The two checkpoints may come from different layouts: whole tensors are
compared bit by bit, one at a time. Exit code 0: equal; 1: different; 2: not a checkpoint, or damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

if not __package__:  # run as a file of a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.dist_checkpointing.integrity import read_manifest
from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.dist_checkpointing.state_dict import MODEL
from megatron.core.dist_checkpointing.storage import Checkpoint, CheckpointError
from megatron.core.parallel_state import Axis

from .common import run_tool


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("other", type=Path, nargs="?", help="a checkpoint to compare with")
    args = parser.parse_args(argv)
    try:
        checkpoint = open_or_complain(args.checkpoint)
        if args.other is None:
            print(describe(checkpoint))
            return 0
        difference = first_difference(checkpoint, open_or_complain(args.other))
    except (OSError, ValueError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    print(difference or f"equal: {len(checkpoint.tensors)} tensors, bit for bit")
    return 1 if difference else 0


def open_or_complain(path: Path) -> Checkpoint:
    """The checkpoint at `path`, its files verified. Raises ValueError if there is none that is whole."""
    checkpoint = choose_checkpoint(path, Axis(), lambda line: print(line, file=sys.stderr))
    if checkpoint is None:
        raise ValueError(f"{path} is no checkpoint and holds none")
    return checkpoint


def describe(checkpoint: Checkpoint) -> str:
    """Where the run stood, the layout it had, and every tensor; parameters first, each part in order of names."""
    payload, tensors = checkpoint.payload, checkpoint.tensors
    layout = " ".join(f"{name}={value}" for name, value in payload.get("layout", {}).items())
    names = sorted(tensors, key=lambda key: (not key.startswith(MODEL), key))
    width = max(map(len, names), default=0)
    sums = read_manifest(checkpoint.folder)
    lines = [
        str(checkpoint.folder),
        f"iteration          {payload.get('iteration')}",
        f"consumed samples   {payload.get('consumed_samples')}",
        f"saved at           {layout}",
        f"format, torch      {payload.get('format_version')}, {payload.get('torch_version')}",
        f"tensors            {len(tensors)}, {sum(info.nbytes for info in tensors.values()):,} bytes",
        f"parameters         {sum(tensors[key].numel for key in names if key.startswith(MODEL)):,}",
        f"files              {len(sums)}, {sum(entry['bytes'] for entry in sums.values()):,} bytes, checksums verified",
        "",
    ]
    for key in names:
        info = tensors[key]
        boxes = f"{info.boxes} box{'es' if info.boxes > 1 else ''}"
        lines.append(f"{key:{width}}  {info.dtype_name:9} {info.nbytes:>15,} bytes  {info.shape}  in {boxes}")
    return "\n".join(lines)


def first_difference(one: Checkpoint, two: Checkpoint) -> str | None:
    """The first tensor, parameters before optimizer state, in which two checkpoints differ, and how; else None."""
    for here, there in ((one, two), (two, one)):
        only = sorted(here.tensors.keys() - there.tensors.keys())
        if only:
            return f"only in {here.folder}: {only[0]}" + (f" and {len(only) - 1} more" if len(only) > 1 else "")
    for key in sorted(one.tensors, key=lambda key: (not key.startswith(MODEL), key)):
        a, b = one.tensors[key], two.tensors[key]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{key} is {a.dtype_name} {a.shape} in {one.folder} and {b.dtype_name} {b.shape} in {two.folder}"
        if difference := compare(key, one.read(key), two.read(key)):
            return difference
    return None


def compare(key: str, one: torch.Tensor, two: torch.Tensor) -> str | None:
    """How two tensors of one shape differ, or None. Equal bits are equal, NaN too."""
    flat_one, flat_two = one.reshape(-1), two.reshape(-1)
    bits_one, bits_two = (flat.view(torch.uint8).view(flat.numel(), -1) for flat in (flat_one, flat_two))
    differs = (bits_one != bits_two).any(dim=1)
    count = int(differs.sum())
    if not count:
        return None
    first = int(differs.nonzero()[0])
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), one.shape)] if one.dim() else []
    distance = (flat_one.double() - flat_two.double()).abs().max().item()
    return (
        f"{key} differs in {count} of {one.numel()} elements, by {distance:.3g} at most; "
        f"first at {place}: {flat_one[first].item()!r} and {flat_two[first].item()!r}"
    )


if __name__ == "__main__":
    run_tool(main)

"""List the contents of a checkpoint or of a model in another format, or compare two of them.

    python tools/inspect_checkpoint.py checkpoints/
    python tools/inspect_checkpoint.py checkpoints/iter_0000100 other/iter_0000100
    python tools/inspect_checkpoint.py Qwen3-0.6B checkpoints/

For a folder of checkpoints, the tool opens the checkpoint that a run would load: the latest, or the newest undamaged
one. The tool reads every file and verifies its checksum. For Hugging Face folders and Megatron-LM checkpoints, the tool
shows the parameters under this program's names. Two checkpoints can be compared even if they were saved under different
layouts, because the tool assembles each whole tensor and compares it bit by bit. The tool prints a line for each tensor
that differs. If more than 40 tensors differ, it prints one line for each tensor name, which covers all layers. The exit
code is 0 if both checkpoints are equal, 1 if they differ, and 2 if a path is a damaged checkpoint or not a
checkpoint."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.integrity import read_manifest
from megatron.core.dist_checkpointing.path_kind import OURS, PATH_KINDS, kind_of, refusal
from megatron.core.dist_checkpointing.state_dict import MODEL, model_key
from megatron.core.dist_checkpointing.storage import Checkpoint, CheckpointError, TensorInfo
from megatron.core.parallel_state import Axis
from megatron.extensions.interop.conversion.formats import MERGE_FILE, Origin
from megatron.training.checkpoints.loading import choose_checkpoint, saved_progress

from .common import add_extension_flag, run_tool, tool_parser

MOST_LINES = 40
"""Maximum number of tensors that are printed on separate lines."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    parser.add_argument("checkpoint", type=located, help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("other", type=located, nargs="?", help="a checkpoint to compare with")
    args = parser.parse_args(argv)
    try:
        one = open_or_complain(args.checkpoint)
        if args.other is None:
            print(describe(one))
            return 0
        two = open_or_complain(args.other)
        found = differences(one, two)
    except (OSError, ValueError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    print(comparison(one, two, found))
    return 1 if found else 0


class ForeignWeights:
    """Parameters of a model in another format. The class implements the part of the interface of `Checkpoint` that this
    tool uses."""

    def __init__(self, path: PurePath) -> None:
        from megatron.extensions.interop.conversion.convert import (
            recognize,  # imported here, because this program's checkpoints do not need it
        )
        from megatron.extensions.interop.conversion.formats import Options

        self.folder, self.format = path, recognize(path)
        self.source = self.format.open(path, Options())
        metas = self.source.metas.items()
        self.tensors = {
            model_key(name): TensorInfo(meta.global_shape, self.source.dtype(name, None), 1) for name, meta in metas
        }

    def read(self, key: str) -> torch.Tensor:
        return self.source.read(key.removeprefix(MODEL), None)


Contents = Checkpoint | ForeignWeights


def open_or_complain(path: PurePath) -> Contents:
    """Open a checkpoint and verify its files, or open the weights of a model. Raises ValueError if no complete
    checkpoint or model is found."""
    if (kind := kind_of(path)) not in OURS and PATH_KINDS.facts(kind).model:
        return ForeignWeights(path)
    remarks: list[str] = []
    checkpoint = choose_checkpoint(path, Axis(), remarks.append)
    if checkpoint is None:
        raise ValueError(refusal(path))
    for remark in remarks:
        print(remark, file=sys.stderr)
    return checkpoint


def describe(found: Contents) -> str:
    """Return a text that describes the training progress, the layout, and every tensor. Parameters precede all other
    tensors. Both groups are sorted by name."""
    tensors = found.tensors
    names = in_order(tensors)
    width = max(map(len, names), default=0)
    lines = [
        str(found.folder),
        *(about_checkpoint(found) if isinstance(found, Checkpoint) else about_weights(found)),
        f"tensors            {len(tensors)}, {sum(info.nbytes for info in tensors.values()):,} bytes",
        f"parameters         {sum(tensors[key].numel for key in names if key.startswith(MODEL)):,}",
        "",
    ]
    for key in names:
        info = tensors[key]
        boxes = f"  in {info.boxes} box{'es' if info.boxes > 1 else ''}" if isinstance(found, Checkpoint) else ""
        lines.append(f"{key:{width}}  {info.dtype_name:9} {info.nbytes:>15,} bytes  {info.shape}{boxes}")
    return "\n".join(lines)


def about_checkpoint(checkpoint: Checkpoint) -> Iterator[str]:
    payload, sums = checkpoint.payload, read_manifest(checkpoint.folder)
    layout = " ".join(f"{name}={value}" for name, value in payload.get("layout", {}).items())
    yield f"iteration          {payload.get('iteration')}"
    yield f"consumed samples   {payload.get('consumed_samples')}"
    yield f"saved at           {layout}"
    if (family := Origin.of(saved_progress(payload).origin).model_type) is not None:
        yield f"came from          {family} (Hugging Face)"
    if isinstance(merged := payload.get("merged"), dict) and isinstance(sources := merged.get("sources"), list):
        yield f"merged             from {len(sources)} checkpoints, listed in {MERGE_FILE}"
    yield f"format, torch      {payload.get('format_version')}, {payload.get('torch_version')}"
    if extensions := payload.get("config", {}).get("extensions", {}).get("extension"):
        yield f"extensions         {' '.join(map(str, extensions))} (not loaded)"
    size = sum(entry["bytes"] for entry in sums.values())
    yield f"files              {len(sums)}, {size:,} bytes, checksums verified"


def about_weights(weights: ForeignWeights) -> Iterator[str]:
    kind = weights.source.origin.model_type or "the optimizer's state is not listed"
    yield f"format             {weights.format.format} ({kind}), shown under this program's names"


def in_order(keys: Iterable[str]) -> list[str]:
    """Return the sorted keys of parameters, followed by the sorted keys of optimizer states."""
    return sorted(keys, key=lambda key: (not key.startswith(MODEL), key))


@dataclass(frozen=True)
class Difference:
    """Difference between the versions of a tensor in two checkpoints."""

    key: str
    how: str
    """Description of a difference such as another shape or dtype; empty if only the values differ."""

    count: int = 0
    of: int = 0
    largest: float = 0.0
    first: str = ""

    def __str__(self) -> str:
        return f"{self.key}  {self.how or f'{self.amount}; {self.first}'}"

    @property
    def amount(self) -> str:
        return f"{self.count:,} of {self.of:,} elements differ, by {self.largest:.3g} at most"


def differences(one: Contents, two: Contents) -> list[Difference]:
    """Return every tensor in which two checkpoints differ. If the first or the second is a model in another format,
    only parameters are compared."""
    found = []
    alone = {one: "first", two: "second"}
    for key in in_order(compared(one, two)):
        if missing := [name for each, name in alone.items() if key not in each.tensors]:
            found.append(Difference(key, f"is missing from the {missing[0]}"))
            continue
        a, b = one.tensors[key], two.tensors[key]
        if a.shape != b.shape:
            found.append(Difference(key, f"has the shape {a.shape} in the first, {b.shape} in the second"))
        elif a.dtype != b.dtype:
            values = compare(key, one.read(key).double(), two.read(key).double())
            how = f"is {a.dtype_name} in the first, {b.dtype_name} in the second"
            found.append(Difference(key, f"{how}, with {values.amount if values else 'equal values'}"))
        elif difference := compare(key, one.read(key), two.read(key)):
            found.append(difference)
    return found


def compared(one: Contents, two: Contents) -> set[str]:
    """Return the keys of the tensors to compare: all tensors of two checkpoints, or only parameters if either is a
    model in another format."""
    keys = one.tensors.keys() | two.tensors.keys()
    if isinstance(one, Checkpoint) and isinstance(two, Checkpoint):
        return keys
    return {key for key in keys if key.startswith(MODEL)}


def compare(key: str, one: torch.Tensor, two: torch.Tensor) -> Difference | None:
    """Describe how two tensors of the same shape and dtype differ. Return None if the tensors are equal bit for bit.
    NaN values with the same bits count as equal."""
    flat_one, flat_two = one.reshape(-1), two.reshape(-1)
    bits_one, bits_two = (flat.view(torch.uint8).view(flat.numel(), -1) for flat in (flat_one, flat_two))
    differs = (bits_one != bits_two).any(dim=1)
    count = int(differs.sum())
    if not count:
        return None
    first = int(differs.nonzero()[0])
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), one.shape)] if one.dim() else []
    distance = (flat_one.double() - flat_two.double()).abs().max().item()
    values = f"first at {place}: {flat_one[first].item()!r} and {flat_two[first].item()!r}"
    return Difference(key, "", count, one.numel(), distance, values)


def comparison(one: Contents, two: Contents, found: Sequence[Difference]) -> str:
    """Return a text that describes the comparison. Each tensor that differs has one line. If more than `MOST_LINES`
    tensors differ, the tensors with the same name in all layers share one line."""
    keys = compared(one, two)
    left_out = len((one.tensors.keys() | two.tensors.keys()) - keys)
    note = f"; {left_out} of the optimizer's state not compared" if left_out else ""
    if not found:
        return f"equal: {len(keys)} tensors, bit for bit{note}"
    head = f"first: {one.folder}\nsecond: {two.folder}\n{len(found)} of {len(keys)} tensors differ{note}:"
    if len(found) <= MOST_LINES:
        return "\n".join([head, *(f"  {each}" for each in found)])
    groups: dict[tuple[str, bool], list[Difference]] = {}
    for each in found:
        groups.setdefault((without_numbers(each.key), bool(each.how)), []).append(each)
    counts = Counter(map(without_numbers, keys))
    return "\n".join([head, *(f"  {group_line(name, counts[name], group)}" for (name, _), group in groups.items())])


def without_numbers(key: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", key)


def group_line(name: str, count: int, group: Sequence[Difference]) -> str:
    """Return one line for the tensors with the same name in several layers."""
    if len(group) == 1:
        return str(group[0])
    most = max(group, key=lambda each: (each.largest != each.largest, each.largest))  # NaN sorts last
    whole = replace(most, count=sum(each.count for each in group), of=sum(each.of for each in group))
    where = f"layer {' '.join(re.findall(r'[.]([0-9]+)[.]', most.key))}"
    example = f"{where} {most.how}" if most.how else f"{whole.amount}, in {where}"
    return f"{name}  {len(group)} of {count} layers: {example}"


if __name__ == "__main__":
    run_tool(main)

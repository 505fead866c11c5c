"""Names of parameters in Megatron-LM's checkpoints, and the place of each of ours in those of torch_dist.

Layers of equal kind are stacked along a new first dim under one name, or each has its own. Each tensor of theirs is one
of ours in another shape: query groups, heads and channels are one dim there, and so are gate and up. `names.json` has
the names that differ: `renamed` in a layer, by their beginnings, where the layer also has a parameter that begins with
`beside`; under all of `theirs` they are written, and under any they are read. `older` are those from before the core.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron.core.param_meta import ParamMeta
from megatron.extensions.interop.conversion.formats import few

EXTRA_STATE = "_extra_state"
"""Ends the names of what Transformer Engine keeps for fp8."""

LAYERS = "decoder.layers."

IN_LAYER = re.compile(
    r"(?P<front>decoder\.layers\.(?P<number>\d+)\."
    r"|mtp\.layers\.\d+\.transformer_layer\.)(?P<inside>.+)"
)

TABLES = json.loads(Path(__file__).with_name("names.json").read_text())


@dataclass(frozen=True)
class Way:
    """A way to store a parameter, or one rank's box of it: names of tensors, which it consists of in order.

    `shape`: that of each, in files of one rank. `layer`: the entry along their first dim. `transposed`: all experts are
    in one tensor, viewed as [experts, input channels, output channels].
    """

    names: tuple[str, ...]
    shape: tuple[int, ...] = ()
    layer: int | None = None
    transposed: bool = False


def find_ways(
    metas: Mapping[str, ParamMeta],
    ways_of: Callable[[ParamMeta], Iterable[Way]],
    present: Collection[str],
    misfits: Callable[[ParamMeta, Way], Iterable[str]],
    used: Iterable[str] = (),
) -> dict[str, Way]:
    """The first way of each parameter whose tensors are all present. Raises ValueError for all that is missing, of
    another shape, or unknown: present and in no way, and not `used` either."""
    found = dict[str, Way]()
    problems = []
    known = set(used)
    for name, meta in metas.items():
        ways = list(ways_of(meta))
        way = next((way for way in ways if all(each in present for each in way.names)), None)
        if way is None:
            problems.append(f"{name} is missing")
            continue
        known |= {each for way in ways for each in way.names}
        found[name] = way
        problems += misfits(meta, way)
    problems += [f"{name} is unknown" for name in sorted({*present} - known) if not is_skipped(name)]
    if problems:
        raise ValueError(few(problems, 6))
    return found


def is_skipped(key: str) -> bool:
    """Return whether a tensor of theirs is none of the model: buffers, and what is kept for fp8."""
    return key.endswith(EXTRA_STATE) or "rotary_pos_emb.inv_freq" in key or key.endswith("local_tokens_per_expert")


def stacked_misfits(shapes: Mapping[str, tuple[int, ...]], num_layers: int, meta: ParamMeta, way: Way) -> Iterator[str]:
    """Problems of the shapes of a parameter's tensors in torch_dist."""
    expected, count = their_shape(meta), len(way.names)
    for name in way.names:
        shape = shapes[name]
        if count == 1:
            wanted = (*(() if way.layer is None else (num_layers,)), *expected)
            if shape != wanted:
                yield f"{name} has shape {list(shape)}, not {list(wanted)}"
        elif prod(shape) * count != meta.numel or shape[-1:] != expected[-1:]:
            yield f"{name} has shape {list(shape)}, one of {count} parts of {list(expected)}"


def their_shape(meta: ParamMeta) -> tuple[int, ...]:
    """Shape of a parameter of one layer in their checkpoints."""
    shape = meta.global_shape
    if meta.expert:
        return (shape[0], prod(shape[1:-1]), shape[-1])
    if meta.name.endswith("bias") or not meta.matrix:
        return (prod(shape),)
    return (prod(shape[:-1]), shape[-1])


def _in_layer(name: str) -> tuple[str, int | None, str]:
    """(what is in front of the names of a layer, the layer's number in the decoder, name in the layer)."""
    match = IN_LAYER.fullmatch(name)
    if match is None:
        return "", None, name
    return match["front"], None if match["number"] is None else int(match["number"]), match["inside"]


def _renamed(inside: str) -> Iterator[tuple[str, list[str]]]:
    """(beginning of a name that the layer must have, their names of a parameter) by each rule for the parameter."""
    for rule in TABLES["renamed"]:
        if inside.startswith(rule["ours"]):
            rest = inside.removeprefix(rule["ours"])
            yield rule.get("beside", ""), [front + rest for front in rule["theirs"]]


class WrittenNames:
    """The names under which megatron-core looks for the parameters of a model.

    A norm is fused with the linear layer behind it. In front of experts it has two names: with Transformer Engine its
    own, and without it that of a fused one.
    """

    def __init__(self, names: Iterable[str], stacked: bool) -> None:
        self.stacked = stacked
        self.layers: dict[str, list[str]] = {}
        for front, _, inside in map(_in_layer, names):
            self.layers.setdefault(front, []).append(inside)

    def of(self, name: str) -> tuple[list[str], int | None]:
        """The names of one parameter, and its place in the stack if there is one."""
        front, number, inside = _in_layer(name)
        found = (
            theirs
            for beside, theirs in _renamed(inside)
            if any(sibling.startswith(beside) for sibling in self.layers.get(front, ()))
        )
        layer = number if self.stacked else None
        return [(front if layer is None else LAYERS) + each for each in next(found, [inside])], layer


def names_inside(name: str) -> Iterator[str]:
    """Every name, with the number of the layer, that a dense parameter of ours may have in one rank's module."""
    front, _, inside = _in_layer(name)
    yield from (front + each for each in _suffixes(inside))


def _suffixes(inside: str) -> Iterator[str]:
    """Names of a layer's parameter in their layer: `mlp.router.weight` of `decoder.layers.3.mlp.router.weight`."""
    yield from dict.fromkeys([*(each for _, theirs in _renamed(inside) for each in theirs), inside])


OLD_NAMES = tuple((re.compile(old), new) for old, new in TABLES["older"])
"""Names of Megatron-LM before its core -> those of its core."""


def current_name(name: str) -> str:
    """The name that a tensor of an older model has today."""
    for old, new in OLD_NAMES:
        name = old.sub(new, name)
    return name


def stacked_ways(meta: ParamMeta) -> Iterator[Way]:
    """Every way in which torch_dist may store a parameter."""
    front, number, inside = _in_layer(meta.name)
    for suffix in _suffixes(inside):
        if number is not None:
            yield Way((f"{LAYERS}{suffix}",), layer=number)
        own = front + suffix
        yield Way((own,))
        yield Way((f"{own}_w", f"{own}_v"))
        if meta.expert:  # under names of their own, whole or with gate (w) and up (v) apart
            experts = range(meta.global_shape[0])
            each = [own.replace(".experts.experts.", f".experts.experts.{expert}.") for expert in experts]
            yield Way(tuple(each))
            yield Way(tuple(f"{expert}_{half}" for expert in each for half in "wv"))

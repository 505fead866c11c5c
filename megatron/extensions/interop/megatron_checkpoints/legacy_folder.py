"""Reader of Megatron-LM checkpoints with one file per rank, `mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt`.

The file of a rank contains one shard of each parameter. The reader assembles the shards into unsharded parameters.
`ParamMeta.box` computes the position of a shard in the parameter, so this module does not depend on which dims are
sharded. Files are memory-mapped: a tensor is read from disk when it is requested.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.interop.megatron_checkpoints.common_state import args_of, load_common, load_pickle
from megatron.extensions.interop.megatron_checkpoints.legacy_states import FROZEN, Held, states_of
from megatron.extensions.interop.megatron_checkpoints.megatron_names import (
    LAYERS,
    Names,
    Way,
    current_name,
    find_ways,
    is_skipped,
    their_shape,
    their_states,
)

FILE = "model_optim_rng.pt"
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"
CHUNK = re.compile(r"model\d*")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
SAMPLE = 4096
"""Number of elements at each end of a parameter that are compared with the main parameter."""

Rank = tuple[int, int, int]
"""Rank as a tuple (TP rank, PP rank, EP rank)."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of the run that saved a checkpoint."""

    tp: int
    pp: int
    ep: int
    expt_tp: int
    said_by: str = "its arguments"
    """Text for error messages that states where the parallel sizes come from, such as "its arguments"."""

    @classmethod
    def of(cls, args: Mapping[str, object]) -> Layout:
        """Read the parallel sizes from Megatron-LM's arguments. Sizes that the arguments do not contain are assumed to
        be 1. Raises ValueError if a size is invalid."""
        tp = args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or 1
        given = {
            "tp": tp,
            "pp": args.get("pipeline_model_parallel_size") or 1,
            "ep": args.get("expert_model_parallel_size") or 1,
            "expt_tp": args.get("expert_tensor_parallel_size") or tp,
        }
        sizes = dict[str, int]()
        for name, size in given.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"the parallel size {name} in its arguments is {size!r:.40}")
            sizes[name] = size
        found = cls(sizes["tp"], sizes["pp"], sizes["ep"], sizes["expt_tp"])
        if found.expt_tp not in (1, tp):
            raise ValueError(
                f"experts with TP {found.expt_tp} in a model with TP {tp} cannot be read; supported: TP 1 or {tp}"
            )
        return found

    def __str__(self) -> str:
        return f"TP {self.tp}, PP {self.pp}, EP {self.ep}"

    def rank(self, folder: str) -> Rank:
        """Parse the name of a rank's folder and return the (TP, PP, EP) rank. Folder names omit the numbers of parallel
        axes of size 1. Raises ValueError if the name is invalid."""
        match = RANK_FOLDER.fullmatch(folder)
        tp, *others = [int(number) for number in match.groups() if number] if match else [self.tp]
        axes = [size for size in (self.pp, self.ep) if size > 1]
        if tp >= self.tp or len(others) != len(axes) or any(r >= size for r, size in zip(others, axes, strict=True)):
            raise ValueError(f"{folder} is not a rank of {self}, the sizes in {self.said_by}")
        pp = others.pop(0) if self.pp > 1 else 0
        return tp, pp, others.pop(0) if others else 0

    def folder(self, tp: int, pp: int, ep: int) -> str:
        return f"mp_rank_{tp:02d}" + f"_{pp:03d}" * (self.pp > 1) + f"_{ep:03d}" * (self.ep > 1)

    def check_complete(self, ranks: Collection[Rank]) -> None:
        """Raise ValueError if the folder of a rank is missing. If experts are not sharded over TP, not every
        combination of a TP rank and an EP rank needs a folder. In this case, it is sufficient that each TP rank and
        each EP rank occurs in the name of a folder."""
        whole = self.expt_tp == self.tp
        for tp, pp, ep in ((tp, pp, ep) for tp in range(self.tp) for pp in range(self.pp) for ep in range(self.ep)):
            present = (tp, pp, ep) in ranks
            if not whole:
                present = any(rank[:2] == (tp, pp) for rank in ranks) and any(rank[1:] == (pp, ep) for rank in ranks)
            if not present:
                raise ValueError(f"{self.folder(tp, pp, ep)} is missing; the sizes in {self.said_by} are {self}")


Tables = Mapping[tuple[int, int], Mapping[str, Tensor]]
"""Maps each (TP rank, EP rank) to the tensors of all its pipeline stages. The tensors are keyed by names that contain
the layer numbers of the whole model."""


class LegacyTensors:
    """Reader of a model's parameters from the files of all ranks. `MegatronSource` reads tensors through this class."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(each.name for each in folder.glob("mp_rank_*"))
        self.arguments_file = folder / names[0] / FILE
        self.common: Mapping[str, object] = load_common(self.arguments_file)
        self.args = args_of(self.common, self.arguments_file)
        version = self.common.get("checkpoint_version") or 0
        self.version = float(version) if isinstance(version, int | float | str) else 0.0
        try:
            layout = Layout.of(self.args)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        self._open_ranks(folder, names, layout)

    def _open_ranks(self, folder: Path, names: Sequence[str], layout: Layout) -> None:
        """Open the files of the ranks whose folders have the given names."""
        self.folder, self.layout = folder, layout
        try:
            self.ranks = {layout.rank(name): folder / name for name in names}
            layout.check_complete(self.ranks)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        self.chunks = self._open()
        self.tables = self._tables({rank: dict(ChainMap(*chunks)) for rank, chunks in self.chunks.items()})
        self.states: dict[str, Tables] = {}
        shapes = [tensor.shape for table in self.tables.values() for tensor in table.values()]
        self.sizes: Sequence[int] = [len(shapes) * self.layout.ep, *(max(shape, default=0) for shape in shapes)]

    def _open(self) -> dict[Rank, list[Held]]:
        """Return the model chunks of each rank. The layer numbers in tensor names count the layers of the whole model,
        not the layers of the chunk. A rank has several chunks under an interleaved schedule."""
        opened: dict[Rank, list[Held]] = {}
        for rank in self.ranks:
            content = self._load(rank)
            if (iteration := content.get("iteration")) != self.common.get("iteration"):
                raise ValueError(f"{self._file(rank)} is of iteration {iteration!r:.20}, unlike the others")
            keys = sorted(filter(CHUNK.fullmatch, map(str, content)), key=lambda key: (len(key), key))
            opened[rank] = [_tensors_of(content[key], self._file(rank)) for key in keys]
        counts = {len(chunks) for chunks in opened.values()}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"{self.folder}: its ranks have {min(counts)} to {max(counts)} model chunks (model0)")
        firsts = _first_layers({rank[1]: chunks for rank, chunks in reversed(opened.items())}, counts.pop())
        return {
            rank: [_renumbered(chunk, firsts[number, rank[1]]) for number, chunk in enumerate(chunks)]
            for rank, chunks in opened.items()
        }

    def _file(self, rank: Rank) -> Path:
        return self.ranks[rank] / FILE

    def _load(self, rank: Rank) -> Mapping[str, object]:
        path = self._file(rank)
        return self.common if path == self.arguments_file else load_common(path)

    def _tables(self, held: Mapping[Rank, Held]) -> Tables:
        pairs = dict.fromkeys((tp, ep) for tp, _, ep in held)
        return {
            (tp, ep): dict(ChainMap(*(held[rank] for rank in sorted(held) if (rank[0], rank[2]) == (tp, ep))))
            for tp, ep in pairs
        }

    # Parameters

    def find(self, model: TransformerConfig) -> list[str]:
        states = {name: meta for name, (meta, _) in their_states(model).items()}
        present = {name for table in self.tables.values() for name in table}
        self.metas = {meta.name: meta for meta in stage_metas(model)} | states
        used = ("output_layer.weight",) * model.tied_embeddings
        self.names = Names(self.metas.values(), hybrid=model.stated_layers is not None)
        self.ways = find_ways(self.metas, self._ways, present, self._misfits, states, used)
        self.buffers = [name for name in states if name in self.ways]
        return self.buffers

    def _boxes(self, meta: ParamMeta) -> Iterator[tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]]:
        """Yield the (TP, EP) rank, the offset and the shape of each shard of a parameter. A shard that several ranks
        store is yielded once, with one of these ranks."""
        sizes = {"tp": self.layout.tp, "ep": self.layout.ep, "expt_tp": self.layout.expt_tp}
        for ranks in product(*(range(sizes[axis]) for axis in meta.sharded)):
            coords = {axis: (rank, sizes[axis]) for axis, rank in zip(meta.sharded, ranks, strict=True)}
            tp, _ = coords.get("expt_tp" if meta.expert else "tp", (0, 1))
            ep, _ = coords.get("ep", (0, 1))
            yield (tp, ep), *meta.box(coords)

    def _parts(self, tables: Tables, way: Way, rank: tuple[int, int], expert: bool) -> list[Tensor] | None:
        """Return the tensors that store one shard of a parameter, or None if they are missing. Every EP rank stores the
        dense parameters. Experts that are not sharded over TP may be in the file of any TP rank."""
        free = 1 if not expert else 0 if self.layout.expt_tp == 1 else None
        for holder, table in tables.items():
            same = all(a == b for axis, (a, b) in enumerate(zip(holder, rank, strict=True)) if axis != free)
            if same and all(name in table for name in way.names):
                return [table[name] for name in way.names]
        return None

    def _misfits(self, meta: ParamMeta, way: Way) -> Iterator[str]:
        for rank, _, _ in self._boxes(meta):
            tensors, where = (
                self._parts(self.tables, way, rank, meta.expert),
                f"at TP rank {rank[0]}, EP rank {rank[1]}",
            )
            if tensors is None:
                yield f"{way.names[0]} is missing {where}"
            for name, tensor in zip(way.names, tensors or (), strict=False):
                if tuple(tensor.shape) != way.shape:
                    yield f"{name} has shape {list(tensor.shape)} {where}, not {list(way.shape)}"

    def _ways(self, meta: ParamMeta) -> Iterator[Way]:
        """Yield every `Way` in which the file of one rank may store the rank's shard of a parameter."""
        _, _, box = next(self._boxes(meta))
        shape = their_shape(replace(meta, global_shape=box))
        if not meta.expert:
            for name in self.names.inside(meta):
                yield Way((name,), shape, kinds=tuple(self.names.kinds(meta).values()))
            return
        experts, (front, linear) = range(box[0]), meta.name.rsplit("experts.", 1)
        yield Way(tuple(f"{front}experts.local_experts.{expert}.{linear}" for expert in experts), shape[1:])
        yield Way(tuple(f"{front}experts.{linear}{expert}" for expert in experts), shape[1:])
        if linear == "linear_fc1.weight":
            yield Way((f"{front}experts.weight1",), (shape[2], len(experts) * shape[1]), transposed=True)
        elif linear == "linear_fc2.weight":
            yield Way((f"{front}experts.weight2",), (len(experts) * shape[2], shape[1]), transposed=True)

    def dtype(self, name: str) -> torch.dtype:
        first = self.ways[name].names[0]
        return next(table[first].dtype for table in self.tables.values() if first in table)

    def read(self, name: str, kind: str | None = None) -> Tensor:
        tables = self.tables if kind is None else self.states[kind]
        meta = self.metas[name]
        way = self.ways[name]
        whole: Tensor | None = None
        for rank, offset, shape in self._boxes(meta):
            tensors = self._parts(tables, way, rank, meta.expert)
            assert tensors is not None, (name, kind, rank)
            tensors = [self._current_order(name, meta, tensor) for tensor in tensors]
            if shape == meta.global_shape and len(tensors) == 1 and not way.transposed:
                return way.whole(tensors, shape)
            if whole is None:
                whole = torch.empty(meta.global_shape, dtype=tensors[0].dtype)
            box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            _copy(way, tensors, whole[box])
        assert whole is not None
        return whole

    def _current_order(self, name: str, meta: ParamMeta, tensor: Tensor) -> Tensor:
        """Return a tensor with the rows of linear_qkv in the current order, [heads, 3, channels]. Checkpoints of
        version 0 store the rows as [3, heads, channels], and checkpoints of version 1 as [heads, channels, 3]."""
        if self.version >= 2 or ".self_attention.linear_qkv." not in name:
            return tensor
        groups = meta.global_shape[0] // self.layout.tp
        parts, channels = meta.global_shape[1:3]
        if self.version >= 1:
            return tensor.reshape(groups, channels, parts, -1).movedim(2, 1)
        return tensor.reshape(parts, groups, channels, -1).movedim(0, 1)

    # Optimizer states.

    def find_states(self, names: Collection[str]) -> tuple[str, ...]:
        if not self.common.get("optimizer"):
            return ()
        found: dict[str, dict[Rank, Held]] = {}
        for rank, chunks in self.chunks.items():
            other = {name for chunk in chunks for name in chunk if name in self.buffers or is_skipped(name)}
            trained = [{name: chunk[name] for name in chunk if name not in other} for chunk in chunks]
            path = self.ranks[rank] / DISTRIBUTED_OPTIMIZER
            buffers = load_pickle(path, dict | list) if path.exists() else None
            try:
                states = states_of(trained, self._load(rank).get("optimizer"), buffers, self.args)
            except ValueError as error:
                raise ValueError(f"the optimizer's state of {self.ranks[rank].name}: {error}") from None
            for kind, held in states.items():
                found.setdefault(kind, {})[rank] = held
        self.states = {kind: self._tables(held) for kind, held in found.items()}
        for kind, name in product(self.states, names):
            meta, way = self.metas[name], self.ways[name]
            for holder, _, _ in self._boxes(meta):
                if self._parts(self.states[kind], way, holder, meta.expert) is None:
                    raise ValueError(f"{kind} of {name} is missing{FROZEN}")
        return tuple(self.states)

    def check_states(self) -> None:
        """Raise ValueError if a main parameter, rounded to the parameter's dtype, differs from the parameter. Files of
        this format store states without names, in a fixed order. Comparing main parameters with the parameters detects
        a different order. For large tensors, only the first and last elements are compared."""
        for rank, table in self.states.get("main_param", {}).items():
            for name, main in table.items():
                weight, main = self.tables[rank][name].flatten(), main.flatten()
                for part in (slice(0, SAMPLE), slice(-SAMPLE, None)):
                    if not torch.equal(main[part].to(weight.dtype), weight[part]):
                        raise ValueError(
                            f"{self.folder}: the optimizer's fp32 parameters are not in the order of the model "
                            f"({name} differs); convert only the weights with --weights-only"
                        )


def _tensors_of(model: object, path: Path, prefix: str = "") -> Held:
    """Return the tensors of a model chunk, keyed by their current names. The dict has the same order as the chunk's
    parameters."""
    if not isinstance(model, Mapping):
        raise ValueError(f"{path} contains a {type(model).__name__} instead of a model")
    found: Held = {}
    for key, value in model.items():
        if isinstance(value, Mapping):
            found |= _tensors_of(value, path, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            found[current_name(f"{prefix}{key}")] = value
        elif value is not None and not is_skipped(f"{prefix}{key}"):
            raise ValueError(f"{path} contains a {type(value).__name__} as {prefix}{key}")
    return found


def _copy(way: Way, tensors: Sequence[Tensor], box: Tensor) -> None:
    """Copy checkpoint tensors into `box`, which is a slice of a parameter."""
    if way.transposed:
        box.copy_(tensors[0].reshape(box.shape[0], box.shape[-1], *box.shape[1:-1]).movedim(1, -1))
    elif len(tensors) == 1:
        box.copy_(way.whole(tensors, tuple(box.shape)))
    else:
        for part, tensor in zip(box, tensors, strict=True):
            part.copy_(tensor.reshape(part.shape))


def _layer(name: str) -> int | None:
    """Return the layer number in a tensor name, or None if the tensor belongs to no layer."""
    match = re.match(re.escape(LAYERS) + r"(\d+)\.", name)
    return int(match[1]) if match else None


def _first_layers(stages: Mapping[int, list[Held]], chunks: int) -> dict[tuple[int, int], int]:
    """Return a mapping from (chunk, PP rank) to the number of the chunk's first layer in the whole model. Pipeline
    stages may have different numbers of layers."""
    found, total = {}, 0
    for number, pp in product(range(chunks), sorted(stages)):
        found[number, pp] = total
        total += 1 + max((layer for name in stages[pp][number] if (layer := _layer(name)) is not None), default=-1)
    return found


def _renumbered(chunk: Held, first: int) -> Held:
    def renamed(name: str) -> str:
        layer = _layer(name)
        return name if layer is None else f"{LAYERS}{first + layer}.{name.removeprefix(LAYERS).split('.', 1)[1]}"

    return {renamed(name): tensor for name, tensor in chunk.items()}

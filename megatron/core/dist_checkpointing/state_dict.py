"""State dict of a checkpoint: parameters and optimizer state by global parameter name, independent of the layout.

Keys are `model.<name>`, `optimizer.<kind>.<name>` and `callbacks.<callback>.<kind>.<name>`. For each key, every rank
adds the boxes (rectangular blocks of the tensor) that the rank stores. If a tensor is replicated, `writes` is True for
only one of its replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn

from megatron.core.dist_checkpointing.sharded_tensor import LocalBox, OptimizerPiece, ShardedBoxes, pieces_by_name
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta

StateDict = dict[str, ShardedBoxes]

MODEL = "model."
OPTIMIZER = "optimizer."
CALLBACKS = "callbacks."
MAIN_PARAM = "main_param"


def model_key(name: str) -> str:
    return f"{MODEL}{name}"


def optimizer_key(kind: str, name: str) -> str:
    return f"{OPTIMIZER}{kind}.{name}"


def model_state(
    modules: Iterable[nn.Module], state: ParallelState, sharded: Iterable[OptimizerPiece] = ()
) -> StateDict:
    """Return the state dict for saving the parameters of this rank's stages.

    If the rank holds only some elements of a parameter, `sharded` contains the pieces that it holds.
    """
    writers = _Writers(state)
    of_shards = _Writers(state, True)
    entries = _Entries()
    pieces = pieces_by_name(sharded)
    for meta, param in tagged_parameters(modules):
        key, parts = model_key(meta.name), pieces.get(meta.name)
        mine = (writers if parts is None else of_shards).mine(key, meta)
        entries.add(key, meta.global_shape, _boxes(meta, param, state, parts), mine)
    return entries.state_dict()


def optimizer_state(
    pieces: Iterable[OptimizerPiece], state: ParallelState, data_sharded: bool, prefix: str = OPTIMIZER
) -> StateDict:
    """Return the state dict for saving the state of the optimizer or of a callback.

    Args:
        pieces: State of the optimizer or callback on this rank.
        state: Process groups.
        data_sharded: True if each data-parallel rank holds a different part (ZeRO-1).
        prefix: Prefix of all keys. The prefix identifies the optimizer or the callback.
    """
    writers, entries = _Writers(state, data_sharded), _Entries()
    for piece in pieces:
        key = f"{prefix}{piece.key}.{piece.meta.name}"
        mine = writers.mine(key, piece.meta) if piece.own_shape is None else writers.on_first_stage(piece.meta)
        entries.add(key, piece.global_shape, piece.boxes(state.coords), mine)
    return entries.state_dict()


def load_targets(
    modules: Iterable[nn.Module],
    pieces: Sequence[OptimizerPiece],
    state: ParallelState,
    saved: Collection[str],
    load_optimizer: bool,
    sharded: Iterable[OptimizerPiece] = (),
) -> StateDict:
    """Return the state dict into which a checkpoint with the keys `saved` is loaded.

    A model parameter and its main parameter are loaded from the same saved tensor. The saved main parameter is used if
    the optimizer is loaded and the checkpoint contains main parameters; otherwise, the saved model parameter is used. A
    run can therefore load a checkpoint of any precision, and each model parameter equals its main parameter after
    rounding.

    Args:
        modules: The stages of this rank.
        pieces: Optimizer state on this rank.
        state: Process groups.
        saved: Keys that the checkpoint contains.
        load_optimizer: Whether to also load the optimizer states.
        sharded: Pieces of those parameters that this rank holds only in part.
    """

    def weight_key(name: str) -> str:
        main = optimizer_key(MAIN_PARAM, name)
        return main if load_optimizer and main in saved else model_key(name)

    entries, parts = _Entries(), pieces_by_name(sharded)
    for meta, param in tagged_parameters(modules):
        entries.add(weight_key(meta.name), meta.global_shape, _boxes(meta, param, state, parts.get(meta.name)))
    for piece in pieces:
        name = piece.meta.name
        if piece.key == MAIN_PARAM:
            entries.add(weight_key(name), piece.global_shape, piece.boxes(state.coords))
        elif load_optimizer:
            entries.add(optimizer_key(piece.key, name), piece.global_shape, piece.boxes(state.coords))
    return entries.state_dict()


def callback_prefix(name: str) -> str:
    """Return the key prefix of a callback's tensors."""
    return f"{CALLBACKS}{name}."


def callback_targets(
    pieces: Iterable[OptimizerPiece], state: ParallelState, saved: Collection[str], prefix: str
) -> StateDict:
    """Return the state dict into which a callback's tensors are loaded. Tensors that are not in `saved` stay unchanged.

    Args:
        pieces: The callback's state on this rank.
        state: Process groups.
        saved: Keys in the checkpoint.
        prefix: Prefix of the keys of the callback's tensors.
    """
    entries = _Entries()
    for piece in pieces:
        if (key := f"{prefix}{piece.key}.{piece.meta.name}") in saved:
            entries.add(key, piece.global_shape, piece.boxes(state.coords))
    return entries.state_dict()


def tagged_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[ParamMeta, Tensor]]:
    """Yield (meta, parameter) for every parameter of the modules; each shared parameter appears once."""
    every = {id(param): (name, param) for module in modules for name, param in module.named_parameters()}
    for name, param in every.values():
        meta = getattr(param, "meta", None)
        assert isinstance(meta, ParamMeta), f"parameter {name} carries no ParamMeta"
        yield meta, param


def _boxes(meta: ParamMeta, param: Tensor, state: ParallelState, parts: list[OptimizerPiece] | None) -> list[LocalBox]:
    """Return the boxes (rectangular blocks) of a parameter that this rank stores: the boxes of `parts`, or the whole
    local tensor if `parts` is None."""
    if parts is not None:
        return [box for part in parts for box in part.boxes(state.coords)]
    offset, shape = meta.box(state.coords)
    assert tuple(param.shape) == shape, f"{meta.name}: local shape {tuple(param.shape)}, expected {shape}"
    return [(offset, param)]


class _Entries:
    """Collects boxes (rectangular blocks) of tensors, keyed by the tensor's name in the state dict. A tensor has
    several boxes if its elements are in several buckets, or if it is a tied weight with several copies."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[tuple[int, ...], list[LocalBox], bool]] = {}

    def add(self, key: str, whole: tuple[int, ...], boxes: list[LocalBox], writes: bool = False) -> None:
        shape, earlier, _ = self.found.get(key, (whole, [], writes))
        assert shape == whole, f"{key} has shapes {shape} and {whole}"
        self.found[key] = (shape, earlier + boxes, writes)

    def state_dict(self) -> StateDict:
        return {key: ShardedBoxes(shape, boxes, writes) for key, (shape, boxes, writes) in self.found.items()}


class _Writers:
    """Selects, for each tensor, the replica that writes it. Every rank computes the same selection independently.

    Among model-parallel replicas, only the first one writes (`ParamMeta.is_first_replica`). Data-parallel replicas
    divide the tensors among themselves. A tensor is assigned to the replica that has the fewest elements to write so
    far. All replicas assign the tensors in the same order.
    """

    def __init__(self, state: ParallelState, data_sharded: bool = False) -> None:
        self.state, self.data_sharded = state, data_sharded
        self.loads: dict[str, list[int]] = {}
        self.decided: dict[str, bool] = {}

    def on_first_stage(self, meta: ParamMeta) -> bool:
        """Return whether this rank's stage may write a tensor. If several stages hold the tensor, only the first of
        these stages may write it."""
        return not meta.shared_stages or self.state.pp.first

    def mine(self, key: str, meta: ParamMeta) -> bool:
        if key not in self.decided:
            first = self.state.copies_axis(meta.data_axis).first
            mine = first if self.data_sharded else self._my_turn(meta)
            self.decided[key] = meta.is_first_replica(self.state.coords) and mine
        return self.decided[key]

    def _my_turn(self, meta: ParamMeta) -> bool:
        data = self.state.axis(meta.data_axis)
        loads = self.loads.setdefault(meta.data_axis, [0] * data.size)
        turn = loads.index(min(loads))
        loads[turn] += meta.numel
        return turn == data.rank

"""The one tag a parameter carries.

Initial values, gradient reduction, gradient norm, weight decay, checkpoints, conversion and replica checks
read a parameter's `ParamMeta` and nothing else about it, so a new layer is described once, where it is built.
No torch here: plans and tools read the same tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

HISTORY = "_history"
"""End of the names of tensors that record earlier steps, as scales of number formats do. A checkpoint may lack them, or
have them of another length: they begin anew. A run may have no use for them."""


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `kind` is "normal" (mean 0, `std`), "uniform" (in [`low`, `high`)), "log_of_uniform" (the
    logarithm of such numbers), "inverse_softplus" (numbers whose softplus is in that range, with uniform logarithms),
    "zeros", "ones", "constant" (`value`, several of them repeated along the last dim), or "choices" (whole numbers
    below `high`, those of a row distinct)."""

    kind: str = "normal"
    std: float = 0.0
    low: float = 0.0
    high: float = 1.0
    value: float | tuple[float, ...] = 0.0


@dataclass(frozen=True)
class Fused:
    """Weights of several linear maps that one parameter holds side by side: `sizes` are their lengths along `dim`."""

    name: str
    """"qkv" (queries, keys and values), "gate_up" (both halves of a gated fc1), or a name of your own."""

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ParamMeta:
    """Position of a local tensor in the whole model.

    A parameter is a rectangle ("box") of one global tensor: `sharded` names, for each mesh axis that cuts it, the
    dimension that is cut into equal parts. On every other axis of its view of the mesh the ranks hold replicas.
    """

    name: str
    """Name in the whole model, with global layer numbers: `decoder.layers.3.mlp.fc1.weight`."""

    global_shape: tuple[int, ...]

    sharded: Mapping[str, int] = field(default_factory=dict)
    """Mesh axis ("tp", or "ep" and "expt_tp") -> dimension that it cuts."""

    init: Init = Init()

    partial_over: tuple[str, ...] = ()
    """Model-parallel axes over which the local gradient is a partial sum and must be added up:
    ("tp",) for what acts on sequence-parallel activations. Data axes are always summed over and not named."""

    shared_stages: tuple[int, ...] = ()
    """Pipeline stages that each hold a replica (tied embeddings: first and last); their gradients are summed.
    The first one counts for norms and checkpoints."""

    expert: bool = False
    """Lives on the expert view of the mesh: reduced over "expt_dp" instead of "dp" and "cp"."""

    role: str = "hidden"
    """Role of a matrix: "embedding" for tables that tokens or positions look up, "output" for the logits of the
    vocabulary, "router" for the logits of experts, "convolution" for kernels over tokens, "packed" for a weight
    whose rows are linear maps of several kinds (gates, inputs and step sizes of Mamba-2), "hidden" for everything
    else."""

    linear: bool = False
    """Weight of a linear layer, whose products may run in fp8."""

    stacked: int = 0
    """Leading dimensions that number matrices: 1 for the experts of [E, ffn, h]."""

    fused: Fused | None = None
    """The linear maps whose weights lie side by side in the parameter; by default it is the weight of one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharded", MappingProxyType(dict(self.sharded)))

    @property
    def kind(self) -> str:
        """Kinds that weight decay distinguishes: "matrices", "embeddings" (matrices too), "norms" (their weights), and
        "biases" for all other vectors."""
        if self.name.endswith("bias"):
            return "biases"
        if "norm" in self.name.rsplit(".", 2)[-2]:
            return "norms"
        if len(self.global_shape) < 2:
            return "biases"
        return "embeddings" if self.role == "embedding" else "matrices"

    @property
    def matrix(self) -> bool:
        """Whether this multiplies activations, as opposed to a norm weight, a bias or a scalar."""
        return self.kind in ("matrices", "embeddings")

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.global_shape)

    @property
    def data_axis(self) -> str:
        """The data-parallel axis over which the gradient is summed."""
        return "expt_dp" if self.expert else "dp_cp"

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The tensor- and expert-parallel axes along which ranks hold replicas: those that do not cut the tensor."""
        return tuple(axis for axis in (("ep", "expt_tp") if self.expert else ("tp",)) if axis not in self.sharded)

    def is_first_replica(self, coords: Mapping[str, tuple[int, int]]) -> bool:
        """Whether the rank at `coords` (axis -> (rank, size)) holds the replica that counts in norms and is saved.

        It is the first along `replica_axes` and, for a parameter of several stages, on the first of them. Data-parallel
        ranks get the same answer: they share the work out among themselves.
        """
        first_stage = not self.shared_stages or coords["pp"][0] == 0
        return first_stage and all(coords[axis][0] == 0 for axis in self.replica_axes)

    def box(self, coords: Mapping[str, tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) in the global tensor of the part held at `coords`, a map axis -> (rank, size)."""
        offset = [0] * len(self.global_shape)
        shape = list(self.global_shape)
        for axis, dim in self.sharded.items():
            rank, size = coords[axis]
            assert shape[dim] % size == 0, f"{self.name}: dim {dim} of {self.global_shape} over {axis}={size}"
            shape[dim] //= size
            offset[dim] += rank * shape[dim]
        return tuple(offset), tuple(shape)

"""Metadata of parameters: role, global shape, sharding and initial values.

Initialization, gradient reduction, gradient norms, learning rates, weight decay, checkpoints, conversion and replica
checks read only the `ParamMeta` of a parameter. A new layer therefore only has to describe its parameters, in the place
where it creates them. This module does not import torch, so that plans and tools can read the same metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Literal, Protocol, get_args

HISTORY = "_history"
"""Name suffix of tensors that record earlier steps, such as fp8 amax histories.

If a checkpoint lacks a history tensor, or contains it with a different length, the run starts with an empty history. A
run may ignore the history tensors of a checkpoint.
"""


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter.

    Values of `kind`:

    - "normal": mean 0 and standard deviation `std`.
    - "uniform": numbers in [`low`, `high`).
    - "log_of_uniform": logarithms of numbers in [`low`, `high`).
    - "inverse_softplus": numbers whose softplus is in [`low`, `high`), with uniform logarithms.
    - "zeros" and "ones".
    - "constant": the number `value`; if `value` is a tuple, its numbers repeat along the last dim.
    - "choices": integers below `high` that are distinct within each row.
    """

    kind: str = "normal"
    std: float = 0.0
    low: float = 0.0
    high: float = 1.0
    value: float | tuple[float, ...] = 0.0


@dataclass(frozen=True)
class Fused:
    """Weights of several linear maps that are concatenated along `dim` in one parameter. `sizes` contains the length of
    each weight along `dim`."""

    name: str
    """"qkv" (queries, keys and values), "gate_up" (both halves of a gated fc1), or a custom name."""

    dim: int
    sizes: tuple[int, ...]


Role = Literal[
    "embedding",
    "hidden",
    "packed",
    "output",
    "router",
    "gate",
    "convolution",
    "norm",
    "bias",
    "sink",
    "vector",
    "state",
]
"""Role of a parameter in the model:

- `embedding`: a table that tokens or positions look up.
- `hidden`: the weight of a linear map whose input and output sizes both grow with the model's width.
- `packed`: a hidden weight whose rows form several kinds of linear maps (gates, inputs and step sizes of Mamba-2).
- `output`: the weight that computes the logits of the vocabulary.
- `router`: the weight that computes the logits of experts.
- `gate`: the weight that computes a few numbers per token, whose count does not grow with the model's width.
- `convolution`: a kernel over the last tokens of each channel.
- `norm`: the weight of a norm, which multiplies the normalized values.
- `bias`: a vector that is added to the output of a linear map or a norm.
- `sink`: a logit per attention head that enters the softmax together with the attention scores.
- `vector`: any other vector or scalar, such as a decay or the slope of an activation function.
- `state`: numbers that are saved but not trained.
"""

WidthKind = Literal["input", "hidden", "output", "vector"]
"""Kind of a parameter, determined by whether its input and output dimensions grow with the model's width (muP,
arXiv:2203.03466, table 8)."""

WIDTH_KINDS: Mapping[str, WidthKind] = {
    "embedding": "input",
    "hidden": "hidden",
    "packed": "hidden",
    "output": "output",
    "router": "output",
    "gate": "output",
}
"""Width kinds (`ParamMeta.width_kind`), keyed by role. All other roles have the kind "vector"."""

KINDS = {"embedding": "embeddings", "norm": "norms"} | dict.fromkeys(("bias", "sink", "vector", "state"), "biases")
"""Kinds of parameters for weight decay (`ParamMeta.kind`), keyed by role. All other roles have the kind "matrices"."""


@dataclass(frozen=True)
class ParamMeta:
    """Metadata of a parameter: its role, and the position of the local tensor in the whole model.

    The parameter on a rank is a rectangular block of one global tensor. `sharded` maps each mesh axis that shards the
    global tensor to the dimension that the axis divides into equal parts. Along all other mesh axes, the ranks hold
    replicas.
    """

    name: str
    """Name in the whole model, with global layer numbers, such as `decoder.layers.3.mlp.fc1.weight`."""

    global_shape: tuple[int, ...]

    sharded: Mapping[str, int] = field(default_factory=dict)
    """Dimension along which each mesh axis shards the parameter, keyed by the name of the axis. The keys are a subset
    of "tp", "ep" and "expt_tp"."""

    init: Init | None = None
    """Initial values of the parameter. If `init` is None, `make_parameter` fills in the default that `InitPolicy`
    defines for the role."""

    partial_over: tuple[str, ...] = ()
    """Model-parallel axes over which gradients must be summed, because each rank computes only a part of the sum. The
    tuple is ("tp",) for a parameter that acts on sequence-parallel activations. The data-parallel axes, over which
    gradients are always reduced, are not listed."""

    shared_stages: tuple[int, ...] = ()
    """Pipeline stages that each hold a replica of the parameter. For tied embeddings, these are the first and the last
    stage. The gradients of the replicas are summed. Gradient norms and checkpoints use the replica of the stage listed
    first."""

    expert: bool = False
    """True for an expert parameter, whose gradient is reduced over "expt_dp" instead of "dp" and "cp"."""

    role: Role = field(kw_only=True)
    """Role of the parameter in the model. The role determines the initial values, the learning rate and the weight
    decay."""

    fan_in: int = field(default=0, kw_only=True)
    """Number of inputs that are summed to compute one output. The default of `fan_in` is the size of the last dimension
    for a weight [..., out, in] or a convolution [..., taps], and 1 for embeddings, norm weights, biases and other
    vectors."""

    to_residual: bool = field(default=False, kw_only=True)
    """True if the output of the linear map is added to the residual stream, like the outputs of linear_proj and
    linear_fc2."""

    tied: bool = field(default=False, kw_only=True)
    """True if the word embeddings are also the weight of the output layer."""

    linear: bool = False
    """True for the weight of a linear layer, whose GEMMs may run in fp8."""

    stacked: int = 0
    """Number of leading dimensions that index matrices: 1 for experts stacked as [E, ffn, h]."""

    fused: Fused | None = None
    """Linear maps whose weights are concatenated in the parameter; None if the parameter is the weight of a single
    map."""

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"{self.name}: role {self.role!r} is none of {', '.join(get_args(Role))}")
        object.__setattr__(self, "sharded", MappingProxyType(dict(self.sharded)))
        if not self.fan_in:
            sums = (self.role in WIDTH_KINDS and self.role != "embedding") or self.role == "convolution"
            object.__setattr__(self, "fan_in", self.global_shape[-1] if sums else 1)

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copying and pickling. The read-only mapping `sharded` is replaced with a dict, because
        the mapping cannot be pickled."""
        return vars(self) | {"sharded": dict(self.sharded)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def fan_out(self) -> int:
        """Number of outputs to which an input contributes, analogous to `fan_in`. If the parameter stacks several
        matrices, `fan_out` is the number of outputs of one matrix."""
        if self.role == "embedding":
            return self.global_shape[-1]
        return self.numel // prod(self.global_shape[: self.stacked]) // self.fan_in

    @property
    def width_kind(self) -> WidthKind:
        """Kind of the parameter, determined by the dims that grow with the model's width: both dims ("hidden"), only
        the output dim ("input"), or only the input dim ("output"). A parameter of the kind "vector" has one number per
        channel, like a norm weight or a bias.
        """
        return WIDTH_KINDS.get(self.role, "vector")

    @property
    def layer(self) -> int | None:
        """Number of the parameter's decoder layer, counted from 0; None if the parameter belongs to no decoder
        layer."""
        found = re.match(r"decoder\.layers\.(\d+)\.", self.name)
        return int(found[1]) if found else None

    @property
    def kind(self) -> str:
        """Kind of the parameter for weight decay: "embeddings", "matrices" for all other matrices, "norms" for norm
        weights, or "biases" for all other vectors."""
        return KINDS.get(self.role, "matrices")

    @property
    def matrix(self) -> bool:
        """True if the parameter multiplies activations as a matrix, unlike a norm weight, a bias or a scalar."""
        return self.kind in ("matrices", "embeddings")

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.global_shape)

    @property
    def data_axis(self) -> str:
        """Data-parallel axis over which the gradient is summed: "expt_dp" for expert parameters, "dp_cp" for all
        others."""
        return "expt_dp" if self.expert else "dp_cp"

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Tensor- and expert-parallel axes that do not shard the parameter. Along these axes, ranks hold replicas."""
        return tuple(axis for axis in (("ep", "expt_tp") if self.expert else ("tp",)) if axis not in self.sharded)

    def is_first_replica(self, coords: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether the rank at `coords` (axis -> (rank, size)) holds the first replica of the parameter. Only the
        first replica is included in gradient norms and saved in checkpoints. The first replica has index 0 along all
        `replica_axes`. If several pipeline stages share the parameter, the first of these stages holds the first
        replica. All data-parallel ranks get the same result; each of them saves a part of the replica.
        """
        first_stage = not self.shared_stages or coords["pp"][0] == 0
        return first_stage and all(coords[axis][0] == 0 for axis in self.replica_axes)

    def box(self, coords: Mapping[str, tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the offset and shape of a rank's shard within the global tensor. `coords` locates the rank: it maps
        each axis to (rank, size)."""
        offset = [0] * len(self.global_shape)
        shape = list(self.global_shape)
        for axis, dim in self.sharded.items():
            rank, size = coords[axis]
            assert shape[dim] % size == 0, f"{self.name}: dim {dim} of {self.global_shape} over {axis}={size}"
            shape[dim] //= size
            offset[dim] += rank * shape[dim]
        return tuple(offset), tuple(shape)


class InitRule(Protocol):
    """Rule that changes the initial values of parameters, such as `megatron.core.config.param_groups.ParameterRule`."""

    def initial(self, meta: ParamMeta, init: Init) -> Init:
        """Return the initial values of a parameter under this rule. `init` contains the values without this rule."""


@dataclass(frozen=True)
class InitPolicy:
    """Default initial values for parameters of each role. If a parameter needs other initial values, its
    `ParamMeta.init` defines them."""

    std: float = 0.02
    """Standard deviation of weights and sinks."""

    residual_std: float = 0.02
    """Standard deviation of weights whose output is added to the residual stream. This deviation is smaller in models
    with more layers."""

    embedding_std: float = 0.02
    """Standard deviation of word and position embeddings."""

    norm_weight: float = 1.0
    """Initial norm weight: 0 if norms multiply by 1 + weight, and 1 otherwise."""

    rules: Sequence[InitRule] = ()
    """Rules that change the initial values, applied in order."""

    def complete(self, meta: ParamMeta) -> ParamMeta:
        """Return a copy of `meta` in which the field `init` is set. The method starts from `meta.init` or, if
        `meta.init` is None, from the default for the parameter's role. It then applies the `rules` of this policy in
        order.

        The method raises ValueError if initial values are defined neither for the parameter nor for its role.
        """
        init = meta.init or self._of_role(meta)
        for rule in self.rules:
            init = rule.initial(meta, init)
        return replace(meta, init=init)

    def _of_role(self, meta: ParamMeta) -> Init:
        if meta.role == "embedding":
            return Init("normal", self.embedding_std)
        if meta.role == "norm":
            return Init("ones" if self.norm_weight else "zeros")
        if meta.role == "bias":
            return Init("zeros")
        if meta.role == "convolution":  # as in torch
            return Init("uniform", low=-(meta.fan_in**-0.5), high=meta.fan_in**-0.5)
        if meta.role in ("vector", "state"):
            raise ValueError(f"{meta.name}: the role {meta.role!r} has no initial values; set `init` of its ParamMeta")
        return Init("normal", self.residual_std if meta.to_residual else self.std)

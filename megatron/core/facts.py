"""Facts about parts, known without importing them: the facts that are registered beside them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class NormFacts:
    centered: bool = False
    """Whether it subtracts the mean."""

    biased: bool = False
    """Whether it has a bias by default."""

    standard: bool = False
    """Whether it is the library's LayerNorm or RMSNorm, which norms of single heads and other programs compute too."""


@dataclass(frozen=True)
class ActivationFacts:
    gated: bool = False
    """Whether it maps [..., 2f], gate before up, to [..., f]; else it keeps the width."""

    bounded: bool = False
    """Whether --activation-func-clamp-value and --glu-linear-offset apply to it."""


@dataclass(frozen=True)
class RecomputedFacts:
    within: str | None = None
    """A larger part that includes it."""

    needs: str = ""
    """Feature that a model without it lacks: a flag."""


@dataclass(frozen=True)
class BalancingFacts:
    """Of a way to balance the loads of experts."""

    loss: bool = True
    """Whether it is an auxiliary loss, to which others can be added."""


@dataclass(frozen=True)
class RouterFacts:
    when: Callable[[Any, int], bool] = lambda config, number: True
    """(model's configuration, layer) -> whether it routes the layer's tokens."""


@dataclass(frozen=True)
class LossFacts:
    multi_token: bool = False
    """Whether it may be called with the labels of a later token (--mtp-num-layers): each loss follows from its logits
    and its label alone."""


def _no_roles(optimizer: Any) -> frozenset[str]:
    return frozenset()


def _no_dtypes(optimizer: Any, main_dtype: str) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class OptimizerFacts:
    """Functions are of the OptimizerConfig."""

    by_element: bool = False
    """Whether the update of an element depends on this element alone, so that states can be in host memory and each
    instance of the data-parallel ranks can update by itself."""

    whole_roles: Callable[[Any], frozenset[str]] = _no_roles
    """Roles (`ParamMeta.role`) of matrices that it updates, each as a whole. They have buffers of their own."""

    others: Callable[[Any], str] | None = None
    """The optimizer of all other parameters; None: the same."""

    fields: tuple[str, ...] = ()
    """Fields of flags that say which optimizer a parameter has: a run has those of the checkpoint that it loads."""

    product_dtypes: Callable[[Any, str], tuple[str, ...]] = _no_dtypes
    """(config, name of the main dtype) -> names of the dtypes in which it multiplies matrices."""


class StatePlan:
    """How states of an optimizer are stored, as far as it is known without torch: here in the main dtype."""

    optional: tuple[str, ...] = ()
    """Kinds of states that a checkpoint may lack, and that other stores have no use for."""

    def holds(self, optimizer: Any) -> bool:
        """Whether an OptimizerConfig asks for it."""
        return True

    def main_kind(self, optimizer: Any, params_dtype: str, main_dtype: str, on_host: bool = False) -> str:
        """How main parameters are stored, given the names of both dtypes: "aliased" (the parameters themselves), or
        "stored" (a copy in the main dtype), which those `on_host` always are; extensions have others."""
        return "aliased" if params_dtype == main_dtype and not on_host else "stored"

    def main_bytes(self, numel: int, kind: str, main: int) -> int:
        """Bytes of main parameters of this kind, where the main dtype has `main`."""
        return 0 if kind == "aliased" else numel * main

    def gradients_dtype(self, optimizer: Any) -> str | None:
        """Dtype in which gradients are summed over micro-batches; None: the main dtype."""
        return None

    def described(self, optimizer: Any, params_dtype: str, main_dtype: str) -> str:
        """Formats of main parameters and states, for a plan."""
        return f"{optimizer.optimizer} state {main_dtype}"


def stated_plan(plan: StatePlan) -> StatePlan:
    """The facts of a store of states, its plan."""
    return plan


@dataclass(frozen=True)
class HostUpdateFacts:
    fraction: Callable[[Any], float]
    """OptimizerConfig -> share of the elements whose states are in host memory, and are updated there."""


@dataclass(frozen=True)
class WhenFacts:
    when: Callable[[Any], bool]
    """Section of the configuration -> whether it asks for the part."""


class UpdateBytes(NamedTuple):
    """Bytes of a rank that an update changes or reads."""

    parameters: int
    """All that the rank keeps, in their own dtype."""

    gradients: int
    """Of the rank's shards, as is `main`: parameters in the main dtype, wherever they lie, and states."""

    main: int


@dataclass(frozen=True)
class ResidualFacts(WhenFacts):
    """Functions are of the model's configuration, as `when` is."""

    width: Callable[[Any], int]
    """Channels of the stream between layers, which pipeline stages send to each other."""

    experts_apart: bool = False
    """Whether a layer of experts gives it the outputs of the shared expert and of the chosen ones side by side."""


@dataclass(frozen=True)
class UpdateAheadFacts(WhenFacts):
    kept: Callable[[UpdateBytes], int] = lambda rank: 0
    """Bytes that it keeps on the device."""

    what: str = ""
    """Name of these states, for plans."""


@dataclass(frozen=True)
class LinearFormatFacts:
    """Functions are of the ModelParallelConfig."""

    when: Callable[[Any], bool]
    """Whether it asks for the format."""

    layers: Callable[[Any, int], range]
    """(config, layers of the model) -> numbers of those whose linear layers use it."""

    alignment: Callable[[Any, int], tuple[int, str]]
    """(config, ranks) -> number that divides a rank's features if `ranks` have a part of them, and the flag that asks
    for it."""

    tokens: int
    """Number that divides the tokens of a micro-batch for every kernel."""

    described: Callable[[Any], str]
    """The format in a few words."""

    peak_tflops: Mapping[str, float]
    """Part of the name of a GPU -> peak of its data sheet."""


@dataclass(frozen=True)
class ShardingFacts:
    about: str
    """Sharded state, for --help."""

    gradients: bool = False
    """ZeRO-2: whether a rank keeps the gradients of its shards alone."""

    parameters: bool = False
    """ZeRO-3: whether a rank keeps the parameters of its shards alone."""


@dataclass(frozen=True)
class StoreFacts:
    layers: Callable[[Any], int]
    """ModelParallelConfig -> layers of each stage, from its first one, whose activations it keeps."""

    with_layers: Callable[[Any, int], Any]
    """(ModelParallelConfig, layers) -> the same with at most this many, for plans."""


@dataclass(frozen=True)
class ScheduleFacts:
    chunks: int = 1
    """Stages on a rank, where nobody says how many."""
    any_chunks: bool = False
    """Whether it is called with the number of stages on a rank as a third argument, and takes any."""
    any_groups: bool = False
    """Whether it is called with the number of micro-batches in a group as a fourth argument (None: its own choice)."""
    v_shaped: bool = False
    """Whether stages are placed in a V, so that rank 0 has the first and the last one."""
    splits_backward: bool = False
    """Whether it has I and W, the gradients of inputs and of weights, in place of B."""

    always_legal: bool = False
    """Whether it takes any number of ranks and of micro-batches, so that validation need not build its lists."""

    in_turns: bool = False
    """Whether it takes `in_turns=True`, for `PASS_PAIRS`: FB before each F and B, or I, that run in turns
    (`schedules.runs_in_turns`)."""

    of_step: str | None = None
    """Where the lists of a step are that begins the passes of the next one, "module:function": (schedule, p,
    micro-batches of the step before, of the step, of the next one) -> lists, communication included. None: a step ends
    before the next one begins."""

    asks_for: tuple[Any, ...] = ()
    """Options that `config.options` of its runs finds."""

    rules: str | None = None
    """Where its rules are, "module:function": (RunConfig, world size) -> problems of a run that has it."""

    @property
    def flushes(self) -> bool:
        """Whether a step ends before the next one begins."""
        return self.of_step is None

    def form(self) -> str:
        """The arguments of a schedule."""
        wider = ", v" * (self.any_chunks or self.any_groups) + ", group" * self.any_groups
        return f"p, m{wider}{', in_turns=' * self.in_turns}"


@dataclass(frozen=True)
class RunnerFacts(WhenFacts):
    launches_once: bool = False
    """Whether the host launches all kernels of a micro-batch at once, for plans."""


@dataclass(frozen=True)
class DataReaderFacts:
    urls: bool = False
    """Whether it reads URLs."""


@dataclass(frozen=True)
class TokenizerFacts:
    needs: tuple[str, ...] = ()
    """Fields of TokenizerConfig that must name a file."""
    finds_files: bool = False
    """Whether these may also be names that it finds files by."""

"""Optimizers, the stores of their states, and schedules of learning rates: the registries. This module does not import
torch.

    @OPTIMIZERS.register("lion", by_element=True)
    def lion(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
        return [SignOfAverage(), AddDecay(), ScaleByRate()]

Functions among the facts are called with the `megatron.core.config.optimizer.OptimizerConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.core.config.flag_spec import Section
from megatron.core.param_meta import ParamMeta
from megatron.core.registry import NoFacts, Registry


def _no_roles(optimizer: Section) -> frozenset[str]:
    return frozenset()


def _no_dtypes(optimizer: Section, main_dtype: str) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer."""

    by_element: bool = False
    """True if the update of an element depends on this element alone, so that states can be in host memory and each
    instance of the data-parallel ranks can update by itself."""

    whole_roles: Callable[..., frozenset[str]] = _no_roles
    """Roles (`ParamMeta.role`) of matrices that it updates, each as a whole. They have buffers of their own."""

    others: Callable[..., str] | None = None
    """The optimizer of all other parameters; None: the same."""

    fields: tuple[str, ...] = ()
    """Fields of flags that determine which optimizer a parameter has: a run must use the values of the checkpoint that
    it loads."""

    product_dtypes: Callable[..., tuple[str, ...]] = _no_dtypes
    """(config, name of the main dtype) -> names of the dtypes in which the optimizer multiplies matrices."""


class MakeChain(Protocol):
    """Make the chain of one parameter."""

    def __call__(self, config: Section, meta: ParamMeta) -> Sequence[object]:
        """Returns the links, each a `megatron.core.optimizer.transforms.Transform`. Which ones follows from both
        arguments alone: plans call it too."""


OPTIMIZERS = Registry("--optimizer", OptimizerFacts, protocol=MakeChain)
"""Name -> `MakeChain`."""

OPTIMIZERS.register("adam", "megatron.core.optimizer.fused:adam", by_element=True)
OPTIMIZERS.register("sgd", "megatron.core.optimizer.fused:sgd", by_element=True)


class StatePlan:
    """Storage of main parameters and states, as far as it is known without torch: here in the main dtype."""

    optional: tuple[str, ...] = ()
    """Kinds of states that a checkpoint may lack, and that other stores have no use for."""

    def holds(self, optimizer: Section) -> bool:
        """Returns whether the configuration asks for it."""
        return True

    def main_kind(self, optimizer: Section, params_dtype: str, main_dtype: str, on_host: bool = False) -> str:
        """Returns how main parameters are stored, given the names of both dtypes: "aliased" (the parameters
        themselves), or "stored" (a copy in the main dtype), which those `on_host` always are; extensions have
        others."""
        return "aliased" if params_dtype == main_dtype and not on_host else "stored"

    def main_bytes(self, numel: int, kind: str, main: int) -> int:
        """Returns the bytes of main parameters of this kind, where the main dtype has `main`."""
        return 0 if kind == "aliased" else numel * main

    def gradients_dtype(self, optimizer: Section) -> str | None:
        """Returns the dtype in which gradients are summed over micro-batches; None: the main dtype."""
        return None

    def described(self, optimizer: Section, params_dtype: str, main_dtype: str) -> str | None:
        """Returns the formats of main parameters and states, for a plan; None: the main dtype."""
        return None


def _stated(plan: StatePlan) -> StatePlan:
    """The facts of a store of states are its plan."""
    return plan


class StateStore(Protocol):
    """Makes the shards of main parameters and optimizer states of a rank. Its facts are a `StatePlan`; if several
    apply, the last one is used."""

    def __call__(self, spec: object) -> object:
        """Returns the `Shard` of a `ShardSpec`, both of `megatron.core.optimizer.optimizer`."""


STATE_STORES = Registry("store of states", _stated, protocol=StateStore)
"""Name -> `StateStore`."""

STATE_STORES.register("main", "megatron.core.optimizer.optimizer:OptimizerShard", plan=StatePlan())


class LrSchedule(Protocol):
    """A schedule of learning rates.

    @LR_SCHEDULES.register("half")
    def half(samples, length, config):
        return config.lr * 0.5 ** (samples / length.decay)
    """

    def __call__(self, samples: float, length: object, config: Section) -> float:
        """Returns the learning rate of the update at `samples`, the samples consumed since the start of the run.

        It is called only after the warm-up, `length.warmup` samples, and also after the decay, `length.decay` samples.
        `length` is a `megatron.core.optimizer.param_scheduler.ScheduleLength`.
        """


LR_SCHEDULES = Registry("--lr-decay-style", NoFacts, protocol=LrSchedule)
"""Name -> `LrSchedule`."""

for _style in ("constant", "linear", "cosine", "inverse_square_root", "WSD"):
    LR_SCHEDULES.register(_style.replace("_", "-"), f"megatron.core.optimizer.param_scheduler:{_style.lower()}")

"""Registries of optimizers, optimizer-state stores and learning-rate schedules. This module does not import torch.

    @OPTIMIZERS.register("lion", by_element=True)
    def lion(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
        return [SignOfAverage(), AddDecay(), ScaleByRate()]

Functions in `OptimizerFacts` are called with the `megatron.core.config.optimizer.OptimizerConfig`.
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
    """Properties of an optimizer."""

    by_element: bool = False
    """True if the update of an element depends only on this element. With such an optimizer, states can be in host
    memory, and each data-parallel rank can update its shard without communication."""

    whole_roles: Callable[..., frozenset[str]] = _no_roles
    """Function that returns the roles (`ParamMeta.role`) of the matrices that the optimizer updates as whole matrices.
    Matrices with these roles are stored in separate buffers."""

    others: Callable[..., str] | None = None
    """Function that returns the name of the optimizer for the parameters without a role in `whole_roles`; None if this
    optimizer also updates these parameters."""

    fields: tuple[str, ...] = ()
    """Configuration fields that determine the optimizer of a parameter. A run that loads the optimizer states of a
    checkpoint must therefore not change these fields."""

    product_dtypes: Callable[..., tuple[str, ...]] = _no_dtypes
    """Function that returns the names of the dtypes in which the optimizer multiplies matrices. The function receives
    the `OptimizerConfig` and the name of the main dtype."""


class MakeChain(Protocol):
    """Function that creates the update rule of one parameter."""

    def __call__(self, config: Section, meta: ParamMeta) -> Sequence[object]:
        """Return the update rule of a parameter as a sequence of `megatron.core.optimizer.transforms.Transform`s, which
        are applied in order. The result must depend only on the arguments, because plans also call this function."""


OPTIMIZERS = Registry("--optimizer", OptimizerFacts, protocol=MakeChain)
"""Registry that maps each choice of --optimizer to a `MakeChain`."""

OPTIMIZERS.register("adam", "megatron.core.optimizer.fused:adam", by_element=True)
OPTIMIZERS.register("sgd", "megatron.core.optimizer.fused:sgd", by_element=True)


class StatePlan:
    """Description of the format in which main parameters and optimizer states are stored. By default, main parameters
    and states are stored in the main dtype."""

    optional: tuple[str, ...] = ()
    """Kinds of optimizer states that may be missing from a checkpoint. If a checkpoint contains such optional states,
    runs with other stores ignore them."""

    def holds(self, optimizer: Section) -> bool:
        """Return whether the configuration selects this store."""
        return True

    def main_kind(self, optimizer: Section, params_dtype: str, main_dtype: str, on_host: bool = False) -> str:
        """Return the way in which main parameters are stored, such as "aliased". `params_dtype` and `main_dtype` are
        the names of the dtypes of parameters and main parameters.

        "aliased" means that the main parameters are the parameters themselves. "stored" means that the main parameters
        are a copy in the main dtype. If `on_host` is True, the main parameters are in host memory and therefore always
        "stored". Extensions may define other kinds of storage.
        """
        return "aliased" if params_dtype == main_dtype and not on_host else "stored"

    def main_bytes(self, numel: int, kind: str, main: int) -> int:
        """Return the size in bytes of `numel` main parameters that are stored as `kind` (see `main_kind`). `main` is
        the size of an element of the main dtype in bytes."""
        return 0 if kind == "aliased" else numel * main

    def gradients_dtype(self, optimizer: Section) -> str | None:
        """Return the dtype in which gradients are summed over micro-batches; None for the main dtype."""
        return None

    def described(self, optimizer: Section, params_dtype: str, main_dtype: str) -> str | None:
        """Return the description of the formats of main parameters and states that a plan prints. Return None if the
        main parameters and states have the main dtype."""
        return None


def _stated(plan: StatePlan) -> StatePlan:
    """Return the `StatePlan` with which a state store is registered."""
    return plan


class StateStore(Protocol):
    """Class or function that creates a rank's shards of main parameters and optimizer states. A store is registered
    together with a `StatePlan`, which describes its states. If several stores apply, the store that was registered last
    is used."""

    def __call__(self, spec: object) -> object:
        """Create the `megatron.core.optimizer.optimizer.Shard` that a `megatron.core.optimizer.optimizer.ShardSpec`
        describes."""


STATE_STORES = Registry("store of states", _stated, protocol=StateStore)
"""Registry that maps the name of each state store to a `StateStore`."""

STATE_STORES.register("main", "megatron.core.optimizer.optimizer:OptimizerShard", plan=StatePlan())


class LrSchedule(Protocol):
    """Function that computes the learning rate of a schedule.

    @LR_SCHEDULES.register("half")
    def half(samples, length, config):
        return config.lr * 0.5 ** (samples / length.decay)
    """

    def __call__(self, samples: float, length: object, config: Section) -> float:
        """Return the learning rate of an update. `samples` is the number of samples that the run has consumed.

        The schedule is not called during the warm-up, that is, for the first `length.warmup` samples. The schedule is
        also called after the decay has ended at `length.decay` samples. `length` is a
        `megatron.core.optimizer.param_scheduler.ScheduleLength`.
        """


LR_SCHEDULES = Registry("--lr-decay-style", NoFacts, protocol=LrSchedule)
"""Registry that maps each choice of --lr-decay-style to an `LrSchedule`."""

for _style in ("constant", "linear", "cosine", "inverse_square_root", "WSD"):
    LR_SCHEDULES.register(_style.replace("_", "-"), f"megatron.core.optimizer.param_scheduler:{_style.lower()}")

"""Registry of classes by which extensions replace the objects that perform a training step. This module does not import
torch.

Three objects perform a step: the loop's `TrainStep`, the `Pipeline` that runs the passes, and the
`DistributedOptimizer`. An extension defines a subclass of one of these classes, overrides methods, and registers the
subclass:

    STEP_PARTS.register(
        "logged", "my_package.logged_step:PARTS", when=lambda config: config.options(MyFlags).log_updates
    )  # in logged_step.py: PARTS = StepParts(step=LoggedStep)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.config.flag_spec import Section
from megatron.core.registry import Registry

if TYPE_CHECKING:
    from megatron.core.collectives import PassPair
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.training.config.run_config import RunConfig
    from megatron.training.forward_backward import Pipeline
    from megatron.training.train_step import TrainStep


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Classes by which an extension replaces the objects that perform a step. If a field is None, this extension does
    not replace that object."""

    step: type[TrainStep] | None = None
    pipeline: type[Pipeline] | None = None
    optimizer: type[DistributedOptimizer] | None = None
    pair: type[PassPair] | None = None
    """Class that alternates between parts of a forward pass and parts of a backward pass on a rank."""


class UpdateBytes(NamedTuple):
    """Sizes, in bytes, of a rank's tensors that an update changes or reads."""

    parameters: int
    """Bytes of all parameters that the rank holds, in the parameters' dtypes."""

    gradients: int
    """Bytes of the gradients for the rank's shards of the parameters."""

    main: int
    """Bytes of the main parameters and optimizer states of the rank's shards, on the device or in host memory."""


@dataclass(frozen=True)
class StepFacts:
    """Properties of the classes with which an extension replaces objects of a training step. Memory plans and
    validation rules use these properties. The functions receive a section of the run's configuration, which also gives
    access to the flags of extensions."""

    when: Callable[[Section], bool]
    """Function that takes a configuration section, and returns True if a run with this configuration uses these
    classes."""

    kept: Callable[[UpdateBytes], int] | None = None
    """Function that returns the number of extra bytes that these classes keep on the device because their updates do
    not wait for the gradient norm at the end of the step. None if all updates wait for the gradient norm."""

    kept_name: str = ""
    """Name that memory plans show for the bytes that `kept` returns."""

    in_turns: bool = False
    """True if parts of a forward pass alternate with parts of a backward pass (`ScheduleFacts.in_turns`)."""

    launches_once: bool = False
    """True if the host launches all kernels of a micro-batch with one call, as with CUDA graphs."""


STEP_PARTS = Registry("training step", StepFacts, protocol=StepParts)


def step_parts(config: RunConfig) -> StepParts:
    """Return the classes with which extensions replace the objects that perform a training step. Validation rules of
    the extensions ensure that no two extensions replace the same object."""
    found: dict[str, object] = {}
    for name in STEP_PARTS.wanted(config):
        parts = STEP_PARTS[name]
        own = {each.name: value for each in fields(parts) if (value := getattr(parts, each.name)) is not None}
        assert not found.keys() & own.keys(), f"{name} and another extension replace {found.keys() & own.keys()}"
        found |= own
    return StepParts(**found)  # type: ignore[arg-type]


def late_update(config: Section) -> str | None:
    """Return the name of the registered classes in this run whose weight updates do not wait for the gradient norm at
    the end of the step. Return None if all updates wait for the gradient norm."""
    return next((name for name in STEP_PARTS.wanted(config) if STEP_PARTS.facts(name).kept is not None), None)


def runs_passes_in_turns(config: Section) -> bool:
    """Return True if parts of a forward pass alternate with parts of a backward pass."""
    return any(STEP_PARTS.facts(name).in_turns for name in STEP_PARTS.wanted(config))


def launches_once(config: Section) -> bool:
    """Return True if the host launches all kernels of a micro-batch with one call, as with CUDA graphs."""
    return any(STEP_PARTS.facts(name).launches_once for name in STEP_PARTS.wanted(config))

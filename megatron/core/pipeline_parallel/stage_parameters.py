"""Parameters of a model and of its pipeline stages, counted from their ParamMetas. Needs torch for extensions only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.parameters import is_declared, parameter_metas
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stages import Stage, whole_model


def stage_metas(
    config: TransformerConfig,
    stage: Stage | None = None,
    *,
    sequence_parallel: bool = False,
    tied_stages: tuple[int, ...] = (),
) -> list[ParamMeta]:
    """The trained parameters of a stage, by default of the whole model; of an extension's parts, whose parameters are
    listed nowhere, those of a stage that is built on fake tensors."""
    stage = stage or whole_model(config)
    if is_declared(config):
        return list(_declared_metas(config, replace(stage, layers=tuple(stage.layers)), sequence_parallel, tied_stages))
    return built_metas(config, stage, sequence_parallel, tied_stages)


@lru_cache(maxsize=2048)
def _declared_metas(
    config: TransformerConfig, stage: Stage, sequence_parallel: bool, tied_stages: tuple[int, ...]
) -> tuple[ParamMeta, ...]:
    ends = {"first": stage.first, "last": stage.last}
    return tuple(
        parameter_metas(config, stage.layers, **ends, sequence_parallel=sequence_parallel, tied_stages=tied_stages)
    )


def built_metas(
    config: TransformerConfig, stage: Stage, sequence_parallel: bool, tied_stages: tuple[int, ...]
) -> list[ParamMeta]:
    """The trained parameters of a stage, as its parts make them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron.core.models.gpt.gpt_model import GPTModel

    parallel = ModelParallelConfig(sequence_parallel=sequence_parallel)
    with FakeTensorMode():
        model = GPTModel(
            config,
            parallel,
            layers=stage.layers,
            first=stage.first,
            last=stage.last,
            tied_stages=tied_stages,
            initialize=False,
        )
    return [parameter.meta for parameter in model.parameters() if parameter.requires_grad]  # type: ignore[attr-defined]


def check_declared(built: Iterable[Any], config: TransformerConfig, stage: Stage) -> None:
    """Raises ValueError if `built`, the parameters of a stage, are not those that its parts list. Plans, checkpoints
    and conversions read the list."""
    if not is_declared(config):
        return  # plans build the model too
    shapes = {meta.name: meta.global_shape for meta in (each.meta for each in built if each.requires_grad)}
    listed = {meta.name: meta.global_shape for meta in stage_metas(config, stage)}
    wrong = next((name for name in {**shapes, **listed} if shapes.get(name) != listed.get(name)), None)
    if wrong is not None:
        found, stated = (list(of[wrong]) if wrong in of else "absent" for of in (shapes, listed))
        raise ValueError(
            f"{wrong}: the model has this parameter with shape {found}, and its part lists it with shape {stated}; "
            "correct what parameters= names in the registration of the part, or leave parameters= out"
        )


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by component; a tied embedding counts once."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    """Dense layers' and shared experts."""
    router: int = 0
    experts: int = 0
    norms: int = 0
    other: int = 0
    """Projections of multi-token prediction, and what an extension's layers have under names of their own."""
    output_layer: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def count_parameters(config: TransformerConfig) -> ParameterCount:
    """Counts of the whole model."""
    sums: dict[str, int] = {}
    for meta in stage_metas(config):
        component = _component(meta.name)
        sums[component] = sums.get(component, 0) + meta.numel
    return ParameterCount(**sums)


def active_parameters(config: TransformerConfig) -> int:
    """Active parameters, by which a token is multiplied: of the experts, those it is routed to."""
    count = count_parameters(config)
    if not count.experts or config.num_experts is None:
        return count.total
    return count.total - count.experts + count.experts * config.moe_router_topk // config.moe_choices


def _component(name: str) -> str:
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer."):
        return "output_layer"
    if ".self_attention." in name:
        return "attention"
    for part in ("router", "experts"):
        if f".mlp.{part}." in name:
            return part
    if ".mlp." in name:
        return "mlp"
    return "norms" if "norm" in name else "other"

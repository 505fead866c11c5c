"""Learning-rate factor for each parameter role. muP uses such factors to transfer learning rates to another width
(arXiv:2203.03466).

python pretrain_gpt.py --extension examples/rates_by_role.py --role-lr embedding=10 norm=0.5 ...

A rule can use every field of `ParamMeta`, including `meta.fan_in`, `meta.width_kind`, `meta.layer` and `meta.expert`.
A rule can also change initial values (`initial`) or freeze parameters (`freezes`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from megatron.core.config.flag_spec import Section, flag
from megatron.core.config.param_groups import PARAMETER_RULES, ParameterRule, ParamGroup
from megatron.core.param_meta import ParamMeta
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import Problem, extension_flags


def factors(options: "RoleRates") -> dict[str, float]:
    """Return the learning-rate factors keyed by role. Raises ValueError if a text does not have the form
    ROLE=NUMBER."""
    pairs = (text.split("=") for text in options.role_lr or ())
    return {role: float(factor) for role, factor in pairs}


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    options = config.options(RoleRates)
    try:
        factors(options)
    except ValueError:
        given = " ".join(options.role_lr or ())
        yield Problem("--role-lr", given, "must be ROLE=NUMBER", "write for example --role-lr embedding=10 norm=0.5")


@extension_flags("rates by role", may_change=True, rules=rules)
@dataclass(frozen=True)
class RoleRates:
    role_lr: tuple[str, ...] | None = flag(None, many=True)
    """Learning-rate factors in the form ROLE=FACTOR, such as embedding=10. Roles that are not listed have the factor
    1."""


@PARAMETER_RULES.register("rates by role", when=lambda optimizer: optimizer.options(RoleRates).role_lr is not None)
class RatesByRole(ParameterRule):
    def __init__(self, optimizer: Section) -> None:
        self.factors = factors(optimizer.options(RoleRates))

    def group(self, group: ParamGroup, meta: ParamMeta) -> ParamGroup:
        return replace(group, lr_mult=group.lr_mult * self.factors.get(meta.role, 1.0))

    def errors(self, metas: Collection[ParamMeta]) -> Iterator[str]:
        roles = {meta.role for meta in metas}
        for role in sorted(self.factors.keys() - roles):
            yield f"--role-lr {role}: no parameter of the model has this role; its roles are {', '.join(sorted(roles))}"

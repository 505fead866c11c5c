"""Factors of the parity matrix (factors.yaml), and combinations of their choices."""

from __future__ import annotations

import shlex
from collections.abc import Container, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.layers import LAYERS
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model_fields import RECOMPUTED_PARTS
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.extensions import load
from megatron.training.config.flags import home_of, spelling_table

COMMON = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --vocab-size 60 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --weight-decay 0.1 --mock-data --global-batch-size 4 "
    "--train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu"
)

TABLE = yaml.safe_load(Path(__file__).with_name("factors.yaml").read_text(encoding="utf-8"))
MODEL_FACTORS: dict[str, dict[str, str]] = TABLE["model"]
LAYOUT_FACTORS: dict[str, dict[str, str]] = TABLE["layout"]
"""Dictionary that maps each factor to its choices, and each choice to the flags that the choice adds to the command
line."""

REGISTRIES: dict[str, Container[str]] = {
    "--activation-func": ACTIVATIONS,
    "--attention-module": MIXERS,
    "--layer-module": LAYERS,
    "--optimizer": OPTIMIZERS,
    "--pipeline-schedule": PIPELINE_SCHEDULES,
}
"""Flags whose values name components that an extension may register."""

load()  # this module reads flags and components that extensions register


def _is_there(choice: str) -> bool:
    """Return True if a choice is available. A choice is not available if one of its flags, components or recomputed
    modules belongs to an extension that has been deleted."""
    words = choice.split()
    gone = any(home_of(word) and word not in spelling_table() for word in words)
    gone |= any(flag in REGISTRIES and name not in REGISTRIES[flag] for flag, name in pairwise(words))
    return not gone and all(part in RECOMPUTED_PARTS for part in ("mla_up_proj", "mhc") if part in words)


for _options in (*MODEL_FACTORS.values(), *LAYOUT_FACTORS.values()):
    for _name in [name for name, choice in _options.items() if not _is_there(choice)]:
        del _options[_name]
FACTORS = LAYOUT_FACTORS | MODEL_FACTORS
FIRST = {name: next(iter(options)) for name, options in FACTORS.items()}
OF_EXPERTS = ("ep", "etp", "dispatcher", "expert messages", "row counts", "routing", "balancing")
"""Names of the factors that apply only to models with experts."""


@dataclass(frozen=True)
class Combination:
    """One choice for each factor, in the order of `FACTORS`."""

    choices: tuple[str, ...]

    @classmethod
    def of(cls, **changed: str) -> Combination:
        """Return a combination with the given choices. Use underscores instead of spaces in the names of factors. All
        other factors have their first choice."""
        named = {name.replace("_", " "): choice for name, choice in changed.items()}
        assert named.keys() <= FACTORS.keys(), named
        return cls(tuple(named.get(name, first) for name, first in FIRST.items()))

    @classmethod
    def read(cls, line: str) -> Combination:
        """Parse a line such as "tp=2, pp=2" and return the combination."""
        return cls.of(**dict(part.split("=") for part in line.split(", ")))

    @property
    def is_there(self) -> bool:
        """True if all choices of the combination are available. Choices of deleted extensions are not available."""
        return all(choice in options for choice, options in zip(self.choices, FACTORS.values(), strict=True))

    @property
    def world_size(self) -> int:
        return int(self["world"])

    @property
    def items(self) -> Set[tuple[str, str]]:
        return dict(zip(FACTORS, self.choices, strict=True)).items()

    @property
    def argv(self) -> list[str]:
        moe = self["mlp"] != "dense"
        named = [options[self[name]] for name, options in FACTORS.items() if moe or name not in OF_EXPERTS]
        line = " ".join([COMMON, *named])
        # shlex is slow and is only used for lines with quotes
        return shlex.split(line) if "'" in line else line.split()

    def changed(self, factor: str, choice: str) -> Combination:
        place = list(FACTORS).index(factor)
        return Combination((*self.choices[:place], choice, *self.choices[place + 1 :]))

    @property
    def alone(self) -> Combination:
        """Return the combination that trains the same model in one process."""
        return Combination.of(**{name: self[name] for name in MODEL_FACTORS})

    def __getitem__(self, factor: str) -> str:
        return self.choices[list(FACTORS).index(factor)]

    def __str__(self) -> str:
        return ", ".join(f"{name}={self[name]}" for name in FACTORS if name == "world" or self[name] != FIRST[name])

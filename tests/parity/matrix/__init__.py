"""The parity matrix: legal combinations of parallelisms, each against one process in fp64.

A pairwise-covering design picks combinations over worlds of 1, 2, 4 and 8 such that every legal pair of choices
occurs; `NAMED` adds the pairs that have gone wrong in published frameworks. Of each combination two training
steps are compared: loss, every gradient, gradient norm, every weight and moment. Fused regions are those of --compile,
run as they are written: tests/pure/test_regions.py compares them with what a compiler makes of them.

    python -m tests.parity.matrix             the whole matrix, a line each, and a summary
    python -m tests.parity.matrix --list      what it would run
    python -m tests.parity.matrix --with optimizer=gradients,parameters instances=2    those with one of these choices

CI runs a part, see test_matrix.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from unittest import mock

from megatron.core import compiled_regions
from megatron.core.datasets import mock as mock_data
from megatron.core.distributed import param_layout
from megatron.testing.parity import TOLERANCE
from megatron.testing.snapshot import Snapshot, differences, train_in_world
from tests.parity.matrix.combination import Combination
from tests.parity.matrix.named import NAMED
from tests.parity.matrix.pairwise import pairwise

STEPS = 2

HOST_CHUNK = 2048
"""Elements of offloaded states that are updated at a time, so that there are several chunks."""

DOCUMENT_ENDS = 1 / 5
"""Share of tokens that end a document, where documents are packed."""


def whole_matrix() -> list[Combination]:
    """The named combinations, then the covering ones."""
    return list(dict.fromkeys([*NAMED.values(), *pairwise()]))


@lru_cache
def reference(model_argv: tuple[str, ...]) -> Snapshot:
    """The same model on one process."""
    with mock.patch.object(mock_data, "END_OF_DOCUMENT", DOCUMENT_ENDS):
        return train_in_world(1, model_argv, STEPS)


def difference(combination: Combination) -> str | None:
    """What of a combination is not what one process computes; None if all of it is."""
    return compared(combination)[0]


def compared(combination: Combination) -> tuple[str | None, float]:
    """(what is not what one process computes or None, the largest relative error of a tensor)"""
    with (
        mock.patch.object(compiled_regions, "_compiled", lambda function, static: function),
        mock.patch.object(mock_data, "END_OF_DOCUMENT", DOCUMENT_ENDS),
        mock.patch.object(param_layout, "HOST_CHUNK", HOST_CHUNK),
    ):
        unseen = int(combination["norm"] != "awaited")  # what is recorded, is read before the next step
        snapshot = train_in_world(combination.world_size, combination.argv, STEPS - unseen, unseen=unseen)
    if snapshot.replica_errors:
        return snapshot.replica_errors[0], inf
    one = reference(tuple(combination.model_argv))
    found = list(differences(Snapshot({key: one[key] for key in snapshot.tensors}), snapshot))
    wrong = next((f"{key}: relative error {error:.1e}" for key, error in found if error > TOLERANCE), None)
    return wrong, max(error for _, error in found)

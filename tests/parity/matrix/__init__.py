"""Parity matrix: valid combinations of parallelisms and features. The results of each combination are compared with a
one-process run in fp64.

The combinations in `design.txt` run on 1 to 8 ranks and cover all valid pairs of choices. `NAMED` adds combinations
that failed in published frameworks. The initial weights must be bit-identical to the initial weights of the one-process
run. The loss, every gradient, the gradient norm, and every weight and moment of two steps must be equal up to rounding.
The choice of fused regions uses the regions of --compile without compiling them. tests/pure/test_regions.py compares
the compiled regions with the uncompiled regions.

    python -m tests.parity.matrix             run the whole matrix; print one line per combination, and a summary
    python -m tests.parity.matrix --list      list the combinations without running them
    python -m tests.parity.matrix --design    update `design.txt` after adding a choice or a rule (takes minutes)
    python -m tests.parity.matrix --with optimizer=gradients,parameters instances=2    run those with such choices

CI runs a part of the matrix (see test_matrix.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import import_module
from math import inf
from typing import Any
from unittest import mock

import numpy as np

from megatron.core import compiled_regions
from megatron.core.datasets import mock as mock_data
from megatron.core.datasets.sample_format import Sample
from megatron.core.moe import dispatcher, layer
from megatron.core.tensor_parallel.layers import Hardware
from megatron.testing.layout_matrix import TOLERANCE
from megatron.testing.snapshot import Snapshot, differences, train_in_world
from tests.extensions import installed
from tests.parity.matrix.combination import FACTORS, Combination
from tests.parity.matrix.design import pairwise
from tests.parity.matrix.named import NAMED

HOST_CHUNK = 2048
"""Number of elements of offloaded optimizer states that are updated at a time. The number is small, so that each update
consists of several chunks."""

DOCUMENT_ENDS = 1 / 5
"""Fraction of tokens that end a document, in combinations with packed documents."""


def whole_matrix() -> list[Combination]:
    """Return the combinations in `NAMED`, followed by the combinations of the covering design."""
    return list(dict.fromkeys([*NAMED.values(), *pairwise()]))


def every_choice() -> list[Combination]:
    """Return combinations with more than one rank that together include every choice of the matrix. Combinations with
    few ranks are preferred."""
    return covering([combination for combination in pairwise() if combination.world_size > 1])


def covering(combinations: Sequence[Combination]) -> list[Combination]:
    """Return a subset of the combinations that contains every choice that the combinations contain."""
    found, missing = list[Combination](), {each for c in combinations for each in c.items}
    while missing:
        found.append(max(combinations, key=lambda c: len(missing & c.items) / (2 + c.world_size)))
        missing -= found[-1].items
    return found


def many_pairs(count: int) -> list[Combination]:
    """Return `count` combinations in addition to `every_choice`. Combinations that add many new pairs of choices are
    preferred, and so are combinations with few ranks."""
    choices = [(name, choice) for name, options in FACTORS.items() for choice in options]
    first, second = np.triu_indices(len(FACTORS), 1)
    numbers = np.array([[choices.index(item) for item in zip(FACTORS, c.choices, strict=True)] for c in pairwise()])
    pairs, seen = numbers[:, first] * len(choices) + numbers[:, second], np.zeros(len(choices) ** 2, bool)
    seen[pairs[[pairwise().index(combination) for combination in every_choice()]]] = True
    costs, found = np.array([4 + combination.world_size for combination in pairwise()]), list[Combination]()
    for _ in range(count):
        best = int(((~seen[pairs]).sum(1) / costs).argmax())
        found.append(pairwise()[best])
        seen[pairs[best]] = True
    return found


NOISE = 1e8
"""Threshold below which SOAP ignores eigenvalues, as a multiple of the rounding error of the largest eigenvalue.

SOAP's steps are equally large along all eigenvectors. Rounding changes the eigenvectors of eigenvalues below the
threshold by more than 1e-8. At a threshold of 1e7, rounding the gradients of a single process differently changed a
gradient of the third step by 7e-10.
"""

NOT_UNIQUE = frozenset({"left_basis", "right_basis", "rotated_avg", "rotated_avg_sq"})
"""SOAP states that are not compared, because the signs of basis vectors are arbitrary. Errors in these states would
change the weights in the next step."""

_plain_sample = mock_data.MockGPTDataset.__getitem__


def _masked_sample(self: mock_data.MockGPTDataset, index: int) -> Sample:
    """Return a sample with a loss mask of random density. Samples 0, 1 and 7 are fully masked. Entire micro-batches
    therefore have no loss, and under layouts with several data-parallel ranks, one entire rank has no loss. In sample
    5, the tokens of one of two context-parallel ranks are masked."""
    random = np.random.default_rng(index)
    mask = (random.random(self.format.seq_length) < random.random()).astype(np.float32)
    if index in (0, 1, 7):
        mask[:] = 0
    if index == 5:
        mask[:4] = mask[12:] = 0
    return {**_plain_sample(self, index), "loss_mask": mask}


def _counting_on_the_device(kind: Any) -> Any:
    return lambda experts, ctx, grouped, *more: kind(experts, ctx, True, *more)


@contextmanager
def settings(combination: Combination) -> Iterator[None]:
    """Apply the settings of a combination that cannot be set with flags: sizes, data, and the option that row counts
    stay on the device as on a GPU."""
    patches: list[tuple[Any, str, Any]] = [
        (compiled_regions, "_compiled", lambda function, static: function),
        (mock_data, "END_OF_DOCUMENT", DOCUMENT_ENDS),
    ]
    if installed("offload"):
        patches.append((import_module("megatron.extensions.memory.offload.placement"), "HOST_CHUNK", HOST_CHUNK))
    if installed("optimizers"):
        patches.append((import_module("megatron.extensions.optim.optimizers.soap"), "NOISE", NOISE))
    if combination["documents"] == "masked":
        patches.append((mock_data.MockGPTDataset, "__getitem__", _masked_sample))
    if combination["row counts"] == "on the device":
        patches.append((Hardware, "host_waits_for", lambda self, x: True))
        kinds = {name: _counting_on_the_device(kind) for name, kind in dispatcher.DISPATCHERS.items()}
        patches.append((layer, "DISPATCHERS", kinds))
    with ExitStack() as stack:
        if combination["offload"] == "weights":
            late = import_module("tests.extensions.offload.late_copies")
            stack.enter_context(late.late_copies())
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def steps_of(combination: Combination) -> tuple[int, int]:
    """Return the number of steps, and the number of steps whose results are not recorded. The results of a recorded
    step are read before the next step begins."""
    if combination["update"] == "two versions":  # some passes of steps 2 and 3 already start in the preceding step
        return 4, 3
    # The first update only prepares the second update, which computes the bases that the third update uses.
    if combination["update"] == "soap":
        return 3, int(combination["norm"] != "awaited")
    return 2, int(combination["norm"] != "awaited")


@lru_cache
def reference(alone: Combination, more: tuple[str, ...]) -> Snapshot:
    """Train the model of a combination in one process, and return a snapshot of the results."""
    with settings(alone):
        return train_in_world(1, [*alone.argv, *more], steps_of(alone)[0])


def difference(combination: Combination) -> str | None:
    """Compare the results of a combination with a one-process run, and return a description of the difference, or None
    if there is no difference."""
    return compared(combination)[0]


def compared(
    combination: Combination, more: tuple[str, ...] = (), train: Callable[..., Snapshot] = train_in_world
) -> tuple[str | None, float]:
    """Return the difference between a combination and a one-process run (None if there is no difference), and the
    largest relative error of any tensor. `more` contains additional flags for both runs. `train` is the function that
    runs the combination."""
    with settings(combination):
        steps, unseen = steps_of(combination)
        snapshot = train(combination.world_size, [*combination.argv, *more], steps - unseen, unseen=unseen)
    if snapshot.replica_errors:
        return snapshot.replica_errors[0], inf
    one = reference(combination.alone, more)
    initial = [key for key in snapshot.tensors if key.startswith("initial weight")]
    if wrong := next((key for key in initial if not one[key].equal(snapshot[key])), None):
        return f"{wrong}: has other bits", inf
    unique = {key: value for key, value in snapshot.tensors.items() if not NOT_UNIQUE.intersection(key.split())}
    found = list(differences(Snapshot({key: one[key] for key in unique}), Snapshot(unique)))
    wrong = next((f"{key}: relative error {error:.1e}" for key, error in found if error > TOLERANCE), None)
    return wrong, max(error for _, error in found)

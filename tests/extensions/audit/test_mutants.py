"""Mutation tests of the audits: each guarantee is broken on purpose, and at least one test must then fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.extensions.operate.audit.verdict import OUTPUT
from tests.extensions.audit import test_audit
from tests.extensions.audit.runs import Flip
from tests.parity.matrix.combination import Combination
from tests.parity.mutants import Mutant, planted


def finds_a_product() -> None:
    tensor = "decoder.layers.0.self_attention.linear_qkv"
    test_audit.test_a_flipped_bit_is_detected_and_the_rank_named("", 2, Flip("product", 1), OUTPUT, tensor)


def is_no_source() -> None:
    test_audit.test_a_rank_with_wrong_inputs_is_not_blamed()


MUTANTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    "nothing compared": (
        "peer.PeerAudit._first",
        "rows[:length, :2]).any(",
        "own[:length, :2]).any(",
        finds_a_product,
    ),
    "any difference allowed": (
        "peer.PeerAudit._differs",
        "return one[:2] != other[:2]",
        "return False",
        finds_a_product,
    ),
    "the peer named": ("verdict._suspects", "yield report.rank", "yield report.peer", finds_a_product),
    "a rank with wrong inputs named": ("verdict._is_source", "not any(", "any(", is_no_source),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_detected(name: str) -> None:
    place, old, new, check = MUTANTS[name]
    with (
        planted(Mutant({f"extensions.operate.audit.{place}": [(old, new)]}, Combination.of())),
        pytest.raises((AssertionError, ValueError)),
    ):
        check()

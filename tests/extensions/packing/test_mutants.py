"""Mutation tests of packing: each rule about order, lengths and work is broken on purpose, and the test of the rule
must fail.

`mutants.txt` lists further mutants, which the parity matrix must detect.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.extensions.data.packing import context_shards
from tests.extensions.packing import test_bins as bins
from tests.extensions.packing import test_context_shards as shards
from tests.extensions.packing import test_dealing as dealing
from tests.parity.matrix.combination import Combination
from tests.parity.mutants import Mutant, planted

PACKING = "extensions.data.packing"
MUTANTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    "the shortest document first": (
        f"{PACKING}.bins.best_fit_decreasing",
        'order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")',
        'order = np.argsort(-np.asarray(lengths, np.int64) % 7, kind="stable")',
        bins.test_bins_match_the_rule,
    ),
    "the emptiest bin": (
        f"{PACKING}.bins._Room.place",
        "length + (above & -above).bit_length() - 1 if above else",
        "length + above.bit_length() - 1 if above else",
        bins.test_bins_match_the_rule,
    ),
    "parts that share no token": (
        f"{PACKING}.order.cut",
        "np.minimum(np.repeat(lengths, parts) - starts, seq_length + 1)",
        "np.minimum(np.repeat(lengths, parts) - starts, seq_length)",
        bins.test_every_token_but_the_first_is_predicted_once_an_epoch,
    ),
    "a round like the one before": (
        f"{PACKING}.order.round_of",
        "{seed} {number}",
        "{seed}",
        bins.test_seeds_and_rounds_differ_and_samples_are_shuffled,
    ),
    "work by tokens": (
        f"{PACKING}.dealing.pairs_of",
        "size * (size + 1) // 2",
        "size",
        lambda: dealing.test_pairs_of_a_sample([4, 5], 20),
    ),
    "no swaps": (
        f"{PACKING}.dealing.equal_groups",
        "if not _swap(found, works):",
        "if True:",
        dealing.test_each_sample_is_assigned_once_and_no_exchange_helps_the_busiest,
    ),
    "extra tokens to the first ranks": (
        f"{PACKING}.context_shards.chunks_of_documents",
        "turn = (turn + more) % ranks",
        "turn = 0",
        shards.test_chunks_of_documents_are_equal_to_a_token,
    ),
    "keys of cut documents stay": (
        f"{PACKING}.context_shards._in_cut_documents",
        "found |= np.repeat",
        "found &= np.repeat",
        shards.test_divided_samples_have_each_token_and_each_pair_once,
    ),
    "keys of the busiest rank only": (
        f"{PACKING}.context_shards.shards_of",
        "most = max(",
        "most = min(",
        shards.test_whole_documents_stay_on_one_rank_if_they_fit,
    ),
    "short documents on several ranks": (
        f"{PACKING}.context_shards._Deal.__init__",
        "step = size if size <= longest else chunk",
        "step = chunk",
        shards.test_short_documents_send_no_keys,
    ),
    "the cost in tokens": (
        f"{PACKING}.context_shards.score",
        "seen_keys(documents, len(owners))",
        "None",
        lambda: shards.test_log_normal_lengths_are_balanced(4),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_detected(name: str) -> None:
    path, old, new, check = MUTANTS[name]
    check()
    forget()
    with planted(Mutant({path: [(old, new)]}, Combination.of())), pytest.raises((AssertionError, BaseExceptionGroup)):
        check()
    forget()


def forget() -> None:
    """Clear the caches of the functions that compute shards."""
    for kept in (context_shards.balanced_shards, context_shards.hybrid_shards):
        kept.cache_clear()

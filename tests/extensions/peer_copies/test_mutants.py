"""Mutation tests of copies in peer memory. Each guarantee is broken on purpose, and a test must then fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.extensions.peer_copies import test_holder, test_identity, test_memory_checkpoint, test_placement
from tests.extensions.peer_copies.runs import Planned, Run
from tests.parity.matrix.combination import Combination
from tests.parity.mutants import Mutant, planted

Check = Callable[[Path], object]


def resumes_at_its_position(folder: Path) -> None:
    """Kill a one-rank run and resume it. Assert that its result is bitwise equal to that of an undisturbed run."""
    whole, run = Run(folder / "whole", 1), Run(folder / "run", 1)
    whole.start()
    try:
        run.start(Planned("kill", 0, 2))
        run.start()
        run.assert_equal(whole)
    finally:
        run.end()


MUTANTS: dict[str, tuple[str, str, str, Check]] = {
    "checksum ignored before loading": (
        "memory_checkpoint.damaged",
        "zlib.crc32(file.read(entry.nbytes)) != crc",
        "len(file.read(entry.nbytes)) != entry.nbytes",
        test_memory_checkpoint.test_a_flipped_bit_is_found_before_and_while_it_is_read,
    ),
    "checksum ignored while loading": (
        "memory_checkpoint.Readers.read",
        "zlib.crc32(data) == crc",
        "len(data) == entry.nbytes",
        test_memory_checkpoint.test_a_flipped_bit_is_found_before_and_while_it_is_read,
    ),
    "generation not checked": (
        "sets.complete_sets",
        "setdefault((copy.generation, copy.number, copy.iteration), {})",
        "setdefault((next(iter(parts)), copy.number, copy.iteration), {})",
        lambda folder: test_holder.test_a_set_belongs_to_one_step_of_one_start(),
    ),
    "copies from before and after going back mixed": (
        "sets.complete_sets",
        "setdefault((copy.generation, copy.number, copy.iteration), {})",
        "setdefault((copy.generation, 0, copy.iteration), {})",
        lambda folder: test_holder.test_a_set_does_not_mix_iterations_before_and_after_a_rollback(),
    ),
    "incomplete sets accepted": (
        "sets.complete_sets",
        "if there.keys() >= set(",
        "if there.keys() or set(",
        lambda folder: test_holder.test_a_set_belongs_to_one_step_of_one_start(),
    ),
    "identity ignored": (
        "sets.Inventory.of_folder",
        "if each == identity",
        "if each or identity",
        lambda folder: test_identity.test_copies_of_another_identity_do_not_count(),
    ),
    "two copies on one host": (
        "placement.partners",
        "for way in range(1, min(copies + 1, len(group)))",
        "for way in range(0, min(copies, len(group) - 1))",
        lambda folder: test_placement.test_each_part_is_on_enough_hosts_and_at_most_once_per_host(),
    ),
    "position not restored": (
        "memory_checkpoint.MemoryCheckpoint.__init__",
        "= payloads[0]",
        "= payloads[0] | {'consumed_samples': 0}",
        resumes_at_its_position,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_detected(name: str, tmp_path: Path) -> None:
    place, old, new, check = MUTANTS[name]
    mutant = Mutant({f"extensions.operate.peer_copies.{place}": [(old, new)]}, Combination.of())
    check(tmp_path / "sound") if name != "position not restored" else None
    with planted(mutant), pytest.raises((AssertionError, pytest.fail.Exception, ValueError)):
        check(tmp_path / "broken")

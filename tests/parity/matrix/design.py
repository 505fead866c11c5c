"""Covering design: every pair of choices for which a search finds a valid combination occurs in at least one
combination.

`design.txt` contains the combinations, one per line. Below the combinations, lines of the form `FACTOR=CHOICE without
FACTOR=CHOICE, ...` list the pairs for which the search found no valid combination. `python -m tests.parity.matrix
--design` adds missing pairs. To repeat the search for a pair, remove its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, groupby
from operator import itemgetter
from pathlib import Path
from random import Random

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import findings
from tests.parity.matrix.combination import FACTORS, FIRST, OF_EXPERTS, Combination
from tests.parity.matrix.named import NAMED

DESIGN = Path(__file__).with_name("design.txt")
SEPARATOR = " without "

SIZES = ("world", "tp", "pp", "cp", "ep", "etp", "schedule", "optimizer", "batch", "mlp", "style", "heads")
"""Names of the factors on which most validation rules depend."""

RUNNING_LOADS = ("batch", "two losses", "forced")
"""Choices of the factor "balancing" whose losses depend on earlier samples of the batch."""

Choice = tuple[str, str]
Pair = tuple[Choice, Choice]


@cache
def faults(combination: Combination) -> int:
    """Return the number of faults of a combination. A fault is a finding of validation, such as an error or a flag
    without effect, or a choice that makes the combination equivalent to another combination."""
    found = findings(parse_args(combination.argv), combination.world_size)
    said = sum("has a bubble" not in each.rule for each in found)
    if combination["update"] == "two versions":  # with two versions of the weights, the update determines the schedule
        said += combination["schedule"] != FIRST["schedule"]
    # This choice reorders samples, which changes the running means of the expert loads.
    if combination["cp"] == "2by work":
        said += combination["balancing"] in RUNNING_LOADS
    if combination["mlp"] == "dense":
        said += sum(combination[name] != FIRST[name] for name in OF_EXPERTS)
    return said


def pairs_of(combination: Combination) -> set[Pair]:
    return set(combinations(zip(FACTORS, combination.choices, strict=True), 2))


def all_pairs() -> Iterator[Pair]:
    choices = [(name, choice) for name, options in FACTORS.items() for choice in options]
    return ((a, b) for a, b in combinations(choices, 2) if a[0] != b[0])


@cache
def pairwise() -> tuple[Combination, ...]:
    """Return the combinations in `design.txt`, except combinations with a choice that is not available."""
    lines = DESIGN.read_text(encoding="utf-8").splitlines()
    found = (Combination.read(line) for line in lines if SEPARATOR not in line)
    return tuple(combination for combination in found if combination.is_there)


def illegal_pairs() -> set[Pair]:
    """Return the pairs of choices that `design.txt` lists as mutually exclusive."""
    lines = [line.split(SEPARATOR) for line in DESIGN.read_text(encoding="utf-8").splitlines() if SEPARATOR in line]
    read = [((*one.split("="),), (*other.split("="),)) for one, others in lines for other in others.split(", ")]
    return {pair for pair in read if all(choice in FACTORS[name] for name, choice in pair)}


def complete(pair: Pair, known: Sequence[Combination], random: Random, steps: int) -> Combination | None:
    """Search for a valid combination that contains `pair`, and return the combination, or None if the search finds
    none. The search starts from a known combination that contains one choice of the pair. The search then tries choices
    of combinations that contain the other choice, and random choices, and keeps those that add no faults."""
    with_a, with_b = ([c for c in known if choice in c.items] or known for choice in pair)
    free = [name for name in FACTORS if name not in dict(pair)]
    sizes = [name for name in free if name in SIZES]
    starts = [random.choice(each) for each in (with_a, with_b) for _ in range(8)]
    found = min((start.changed(*pair[0]).changed(*pair[1]) for start in starts), key=faults)
    left = faults(found)
    for _ in range(steps):
        if not left:
            return found
        other, donor = found, random.choice(random.choice((with_a, with_b)))
        for name in random.sample(random.choice((free, sizes)), random.choice((1, 1, 2, 3))):
            other = other.changed(name, random.choice((donor[name], random.choice(list(FACTORS[name])))))
        if (now := faults(other)) <= left:
            found, left = other, now
    return None


def write_design(seed: int = 0) -> None:
    """Write `design.txt`. Keep existing combinations that are still valid, and the pairs that are listed as mutually
    exclusive. Add a combination for each missing pair. Each new combination covers as many other missing pairs as
    possible."""
    random, illegal = Random(seed), illegal_pairs()
    chosen = [combination for combination in pairwise() if not faults(combination)]
    known = [c for c in (Combination.of(), *NAMED.values()) if not faults(c)]
    covered = set[Pair]().union(*map(pairs_of, chosen))
    missing = dict.fromkeys(pair for pair in all_pairs() if pair not in covered and pair not in illegal)
    for choice in ((name, choice) for name, options in FACTORS.items() for choice in options):
        known += filter(None, [complete((choice, choice), known, random, 3000)])
    while missing:
        pair = next(iter(missing))
        found = complete(pair, [*known, *chosen], random, 400)
        if found is None:
            illegal.add(pair)
            del missing[pair]
            continue
        for name in random.sample(list(FACTORS), len(FACTORS)):
            gains = {c: len(missing.keys() & pairs_of(found.changed(name, c))) for c in FACTORS[name]}
            for choice in sorted(gains, key=lambda c: -gains[c]):
                if gains[choice] <= gains[found[name]]:
                    break
                if name not in dict(pair) and not faults(found.changed(name, choice)):
                    found = found.changed(name, choice)
                    break
        chosen.append(found)
        for other in pairs_of(found):
            missing.pop(other, None)
        illegal -= pairs_of(found)
    lines = [str(combination) for combination in chosen]
    for one, pairs in groupby((pair for pair in all_pairs() if pair in illegal), key=itemgetter(0)):
        lines.append("=".join(one) + SEPARATOR + ", ".join("=".join(other) for _, other in pairs))
    DESIGN.write_text("\n".join(lines) + "\n", encoding="utf-8")

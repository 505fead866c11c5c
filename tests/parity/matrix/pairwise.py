"""A design in which every legal pair of choices occurs."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product
from random import Random

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.parity.matrix.combination import FACTORS, OF_EXPERTS, Combination


def legal(combination: Combination) -> bool:
    """Whether it passes validation, and is not another combination under a second name."""
    sizes = [int(combination[name][0]) for name in ("tp", "pp", "cp")]
    if combination.world_size % (sizes[0] * sizes[1] * sizes[2]) or not _distinct(combination):
        return False
    config = resolve(parse_args(combination.argv), combination.world_size)
    return not validate(config, combination.world_size)


def _distinct(combination: Combination) -> bool:
    """Without experts, their layout is not varied; nor are messages that do not travel, or a plain schedule without a
    pipeline."""
    if combination["norm"] != "awaited" and combination["pp"] == "1":
        return False
    if combination["mlp"] == "dense":
        return all(combination[name] == next(iter(FACTORS[name])) for name in OF_EXPERTS)
    if combination["expert messages"] == "padded" and (combination["mlp"], combination["dispatcher"]) != (
        "drops",
        "alltoall",
    ):
        return False
    if combination["expert messages"] != "plain" and combination["ep"] == "1":
        return False
    return combination["pp"] != "1" or combination["schedule"] in ("1f1b", "interleaved2", "zb-v")


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(combination: Combination) -> set[Pair]:
    return set(combinations(zip(FACTORS, combination.choices, strict=True), 2))


@lru_cache
def pairwise(tries: int = 60) -> tuple[Combination, ...]:
    """Combinations in which every pair of choices occurs that a legal combination has. The same every time.

    Greedy: of several random legal combinations that contain a pair still missing, the one that covers most of the
    missing pairs is taken. A pair that `tries` random completions do not make legal counts as illegal; with rules
    that reach over three or four factors, ready-made covering designs miss most of what is legal.
    """
    random = Random(0)
    missing = dict.fromkeys(
        pair
        for a, b in combinations(FACTORS, 2)
        for pair in product(product([a], FACTORS[a]), product([b], FACTORS[b]))
    )
    chosen = []
    while missing:
        pair = next(iter(missing))
        found = [candidate for candidate in (_complete(pair, random) for _ in range(tries)) if legal(candidate)][:8]
        if not found:
            del missing[pair]
            continue
        chosen.append(max(found, key=lambda candidate: sum(p in missing for p in pairs_of(candidate))))
        for covered in pairs_of(chosen[-1]):
            missing.pop(covered, None)
    return tuple(chosen)


def _complete(pair: Pair, random: Random) -> Combination:
    """A random combination with `pair` in it."""
    fixed = dict(pair)
    if "mlp" not in fixed and any(name in fixed for name in OF_EXPERTS):
        fixed["mlp"] = random.choice(("moe", "drops", "biased"))
    if fixed.setdefault("mlp", random.choice(list(FACTORS["mlp"]))) == "dense":
        for name in OF_EXPERTS:
            fixed.setdefault(name, next(iter(FACTORS[name])))
    messages = fixed.setdefault("expert messages", random.choice(("plain", "plain", *FACTORS["expert messages"])))
    if messages != "plain":
        fixed.setdefault("ep", random.choice(("2", "4")))
        fixed.setdefault("dispatcher", "alltoall")
    if messages == "in turns":
        fixed.setdefault("schedule", random.choice(("interleaved2", "interleaved3", "zb-h2")))
    if fixed.setdefault("norm", random.choice(("awaited", "awaited", "awaited", "validated later"))) != "awaited":
        fixed.setdefault("pp", random.choice(("2", "4")))
        fixed.setdefault("optimizer", random.choice(("zero1", "replicated", "overlapped", "replicated overlapped")))
        fixed.setdefault("update", random.choice(("adam", "muon")))
        for name in ("states", "offload", "activations"):
            fixed.setdefault(name, next(iter(FACTORS[name])))
    return Combination(tuple(fixed.get(name) or random.choice(list(options)) for name, options in FACTORS.items()))

"""The vocabulary of pipeline schedules: what one rank does, one action after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple


class Kind(Enum):
    """Compute: F forward, B whole backward, or its halves I (gradient of the input) and W (of the weights).

    Communication: SEND_F sends the output of a stage to the next one, whose RECV_F takes it in; SEND_B sends the
    gradient of a stage's input to the stage before, whose RECV_B takes it in. Each is named by its own stage, so SEND_F
    of stage 2 pairs with RECV_F of stage 3, and SEND_B of stage 3 with RECV_B of stage 2.

    VALIDATE, named by the first stage of its rank, stands before whatever cannot be computed again: there the rank
    learns whether the update before the step stands, or makes it (`StepFacts.kept` of `megatron.training.step_parts`).

    FB, named by the forward, stands before an F and a B or I of other micro-batches that run in turns: while an
    all-to-all of experts of one is under way, the other computes.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the papers' letter)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FB = "FB"
    VALIDATE = "VALIDATE"

    __hash__ = object.__hash__  # members are singletons, and schedules are made of many of them


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARDS = frozenset({Kind.B, Kind.I})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})


class Action(NamedTuple):
    """One step of a rank. `stage` is the global stage number."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}(stage {self.stage}, microbatch {self.microbatch})"


Lists = Sequence[Sequence[Action]]
"""The actions of every pipeline rank, in the order in which it runs them."""


def units(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """A rank's actions as what it runs one after another: single ones, and FB with the two that run in turns.

    Raises ValueError where FB does not stand before its F and a B or I of another micro-batch.
    """
    following = iter(actions)
    for action in following:
        if action.kind is not Kind.FB:
            yield (action,)
            continue
        pair = tuple(islice(following, 2))
        kinds = [other.kind for other in pair]
        if len(pair) < 2 or pair[0] != action._replace(kind=Kind.F) or kinds[1] not in BACKWARDS:
            raise ValueError(
                f"{action} stands before {' and '.join(map(str, pair)) or 'nothing'}, not its F and a B or I"
            )
        if pair[0].microbatch == pair[1].microbatch:
            raise ValueError(f"{pair[0]} and {pair[1]} of one micro-batch cannot run in turns")
        yield (action, *pair)


OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
"""Kind -> the kind at the other end, and how many stages further that is."""


def counterpart(action: Action) -> Action:
    """The other end of a send or receive."""
    kind, distance = OTHER_END[action.kind]
    return Action(kind, action.stage + distance, action.microbatch)


def owners_of(lists: Lists) -> dict[int, int]:
    """Stage -> the rank that computes it."""
    return {action.stage: rank for rank, actions in enumerate(lists) for action in actions if action.kind in COMPUTE}

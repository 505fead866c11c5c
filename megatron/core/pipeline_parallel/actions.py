"""Actions of pipeline schedules. An action is an operation that a pipeline rank runs, such as a forward pass or a
send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple


class Kind(Enum):
    """Kinds of actions.

    Compute: F is a forward pass, and B is a whole backward pass. I is the half of a backward pass that computes the
    input gradient, and W is the half that computes the weight gradients.

    Communication: SEND_F sends a stage's output to the next stage, which receives it with RECV_F. SEND_B sends the
    gradient of a stage's input to the previous stage, which receives it with RECV_B. Each action contains the number of
    the stage that runs it. For example, SEND_F of stage 2 matches RECV_F of stage 3, and SEND_B of stage 3 matches
    RECV_B of stage 2.

    Update of the previous step: at a VALIDATE, a rank either learns whether the optimizer update of the previous step
    was kept, or applies this update (`StepFacts.kept` of `megatron.training.step_parts`). A VALIDATE precedes all
    actions that cannot be repeated. The stage number of a VALIDATE is the number of the rank's first stage.

    Interleaved passes: an FB directly precedes two passes that are interleaved: an F, and a B or I of a different
    micro-batch. While the expert all-to-alls of one pass are in flight, the other pass computes. An FB has the same
    stage and micro-batch as its F.
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

    __hash__ = (
        object.__hash__
    )  # Enum members are singletons. The hash function of Enum would slow down the construction of schedules.


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARDS = frozenset({Kind.B, Kind.I})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})


class Action(NamedTuple):
    """One action of a pipeline rank. `stage` is the global stage number, counted over all ranks."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}(stage {self.stage}, microbatch {self.microbatch})"


Lists = Sequence[Sequence[Action]]
"""Actions of every pipeline rank, as one list in execution order per rank."""


def units(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Group a rank's actions into units, which run one after another. A unit is either a single action, or an FB action
    together with the forward and the backward pass that it interleaves.

    The function raises ValueError if an FB is not directly followed by its F and by a B or I of another micro-batch.
    """
    following = iter(actions)
    for action in following:
        if action.kind is not Kind.FB:
            yield (action,)
            continue
        pair = tuple(islice(following, 2))
        kinds = [other.kind for other in pair]
        if len(pair) < 2 or pair[0] != action._replace(kind=Kind.F) or kinds[1] not in BACKWARDS:
            found = " and ".join(map(str, pair)) or "nothing"
            raise ValueError(f"{action} must be followed by its F and by a B or I, but is followed by {found}")
        if pair[0].microbatch == pair[1].microbatch:
            raise ValueError(f"{pair[0]} and {pair[1]} belong to the same micro-batch, so they cannot run in turns")
        yield (action, *pair)


OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
"""Dictionary that maps each kind of send or receive to a pair (kind, distance) for the matching action at the other end
of the message. The stage of the matching action is the stage of the send or receive plus the distance."""


def counterpart(action: Action) -> Action:
    """Return the receive that matches a send, or the send that matches a receive."""
    kind, distance = OTHER_END[action.kind]
    return Action(kind, action.stage + distance, action.microbatch)


def owners_of(lists: Lists) -> dict[int, int]:
    """Return a dictionary that maps each stage to the pipeline rank that computes the stage."""
    return {action.stage: rank for rank, actions in enumerate(lists) for action in actions if action.kind in COMPUTE}

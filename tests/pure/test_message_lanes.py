"""Messages that run in order on each lane, as NCCL's do, hang no schedule, and no send waits behind a receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from megatron.core.parts import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.actions import COMPUTE, SENDS, Action, Kind, counterpart
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.p2p import lane_of
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import layout_of

Lane = Callable[[Action, int], int]

CASES = [("1f1b", p, 1, m) for p in (2, 3, 4, 5) for m in (1, 2, 9)]
CASES += [("gpipe", 4, 1, 5), ("zb-h1", 4, 1, 8), ("zb-h2", 4, 1, 8), ("zb-h1", 3, 1, 7)]
CASES += [("interleaved", p, v, m) for p, v, m in ((2, 2, 5), (3, 2, 6), (4, 3, 8), (5, 2, 10))]
CASES += [("zb-v", p, 2, m) for p, m in ((2, 4), (3, 5), (4, 8))]
CASES = [case for case in CASES if case[0] in PIPELINE_SCHEDULES]


def lane(action: Action, sender: int) -> int:
    return lane_of(action.kind in (Kind.SEND_B, Kind.RECV_B), sender)


def one_lane(action: Action, sender: int) -> int:
    return 0


def run(lists: Sequence[Sequence[Action]], layout: PipelineLayout, lane: Lane) -> int:
    """Actions left when nothing can go on. Posting a message waits for nothing; on each lane of a rank messages
    start one after the other, and each is over when both ends have started."""
    waiting = [deque(actions) for actions in lists]
    lanes: list[dict[int, deque[Action]]] = [{} for _ in lists]
    done: set[Action] = set()

    def ready(action: Action) -> bool:
        """Whether the message that a compute action takes, if it comes from another rank, is here."""
        of = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}.get(action.kind)
        take = None if of is None else Action(of, action.stage, action.microbatch)
        return take is None or take not in received or take in done

    received = {action for actions in lists for action in actions if action.kind in (Kind.RECV_F, Kind.RECV_B)}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(waiting):
            while actions and (actions[0].kind not in COMPUTE or ready(actions[0])):
                action, moved = actions.popleft(), True
                if action.kind not in COMPUTE:
                    sender = rank if action.kind in SENDS else layout.rank_of(counterpart(action).stage)
                    lanes[rank].setdefault(lane(action, sender), deque()).append(action)
        for queues in lanes:
            for number, queue in queues.items():
                while queue and queue[0].kind in SENDS:
                    end = counterpart(queue[0])
                    other = lanes[layout.rank_of(end.stage)].get(number)
                    if other is None or not other or other[0] != end:
                        break
                    done |= {queue.popleft(), other.popleft()}
                    moved = True
    return sum(map(len, waiting)) + sum(len(queue) for queues in lanes for queue in queues.values())


@pytest.mark.parametrize(("schedule", "p", "v", "m"), CASES)
def test_nothing_hangs(schedule: str, p: int, v: int, m: int) -> None:
    layout = layout_of(schedule, p, v)
    for evaluate in (False, True):
        lists = pipeline_lists(schedule, p, m, v, evaluate)
        assert run(lists, layout, lane) == 0
        assert run(lists, layout, one_lane) == 0


def test_the_simulation_can_hang() -> None:
    layout = layout_of("1f1b", 2, 1)
    first, second = (list(actions) for actions in pipeline_lists("1f1b", 2, 2))
    receives = [place for place, action in enumerate(second) if action.kind is Kind.RECV_F]
    second[receives[0]], second[receives[1]] = second[receives[1]], second[receives[0]]
    assert run((first, second), layout, lane) > 0


# Of an odd number of interleaved ranks the first and the last are both even: at that seam a lane goes both ways.
@pytest.mark.parametrize(("schedule", "p", "v", "m"), [c for c in CASES if c[0] != "interleaved" or c[1] % 2 == 0])
def test_a_rank_sends_or_receives_on_a_lane(schedule: str, p: int, v: int, m: int) -> None:
    layout = layout_of(schedule, p, v)
    for rank, actions in enumerate(pipeline_lists(schedule, p, m, v)):
        sends: dict[int, set[bool]] = {}
        for action in actions:
            if action.kind not in COMPUTE:
                out = action.kind in SENDS
                sender = rank if out else layout.rank_of(counterpart(action).stage)
                sends.setdefault(lane(action, sender), set()).add(out)
        assert all(len(kinds) == 1 for kinds in sends.values()), f"rank {rank}"

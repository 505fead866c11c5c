"""Pure functions that generate the schedules ZB-H1, ZB-H2 and ZB-V for p pipeline ranks and m micro-batches."""

from __future__ import annotations

from collections import Counter

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.schedules import F, Schedule, alternate


def I(stage: int, microbatch: int) -> Action:  # noqa: E743 (the papers' letter)
    return Action(Kind.I, stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    return Action(Kind.W, stage, microbatch)


def zb_h1(p: int, m: int) -> Schedule:
    """Return the schedule ZB-H1 (arXiv 2401.10241, section 2.1). ZB-H1 equals 1F1B, except that weight gradient passes
    are delayed until a rank would otherwise be idle.

    Every rank keeps activations of up to p micro-batches. In 1F1B, only the first rank keeps activations of p
    micro-batches, and later ranks keep fewer. The bubble is (p - 1)(F + I - W), where F, I and W are the durations of a
    forward pass, of an input gradient pass and of a weight gradient pass.
    """
    return _zero_bubble(p, m, 1)


def zb_h2(p: int, m: int, in_turns: bool = False) -> Schedule:
    """Return the schedule ZB-H2 (arXiv 2401.10241, section 2.2). ZB-H2 has twice as many initial forward passes as
    ZB-H1. The bubble is therefore only (p - 1)(F + I - 2W), where F, I and W are the durations of a forward pass, of an
    input gradient pass and of a weight gradient pass. A rank keeps activations of up to 2p - 1 micro-batches.

    If `in_turns` is True, each forward pass in the steady state is interleaved with an input gradient pass, and each
    rank runs one more initial forward pass. The results of both passes are then available only at the end of the
    interleaved pair. An activation reaches the next rank one pair later, and the gradient of this activation returns
    another pair later. Each rank therefore runs two more initial forward passes than the next rank. If the difference
    were only one, as in ZB-H1, ranks would wait for each other.
    """
    return _zero_bubble(p, m, 2, in_turns)


def _zero_bubble(p: int, m: int, k: int, in_turns: bool = False) -> Schedule:
    """Return a schedule for p pipeline ranks and m micro-batches. Rank r runs k (p - r - 1) initial forward passes, or
    one more if `in_turns` is True. Rank r delays weight gradient passes by k r micro-batches."""
    lists = []
    for rank in range(p):
        behind = k * rank
        ahead = k * (p - rank - 1) + in_turns
        base = alternate([F(rank, i) for i in range(m)], [I(rank, i) for i in range(m)], ahead, in_turns)
        actions = []
        for action in base:
            actions.append(action)
            if action.kind is Kind.I and action.microbatch >= behind:
                actions.append(W(rank, action.microbatch - behind))
        lists.append(actions + [W(rank, i) for i in range(max(0, m - behind), m)])
    return lists


def zb_v(p: int, m: int) -> Schedule:
    """Return the schedule ZB-V (arXiv 2401.10241, section 6). Rank r has the stages r and 2p - 1 - r, so rank 0
    computes the loss.

    There is no bubble if forward, input gradient and weight gradient passes take the same time and m >= 2p - 1. The
    peak memory equals the peak memory of 1F1B. If m is less than 2p - 1, the schedule is first generated for 2p - 1
    micro-batches, and the passes of micro-batches that do not exist are then removed.
    """
    n = max(m, 2 * p - 1)
    lists = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        f0 = (Kind.F, down)
        i0 = (Kind.I, down)
        w0 = (Kind.W, down)
        f1 = (Kind.F, up)
        i1 = (Kind.I, up)
        w1 = (Kind.W, up)
        # Number of repetitions of the steady-state pattern in which the first stage of this rank still runs a forward
        # pass.
        fed = n - (2 * p - 1 - rank)
        order = [f0] * (2 * (p - rank) - 1) + [f1, f0] * rank + [f1, i1, w1] * (p - rank)
        order += [f0, i0, w0, f1, i1, w1] * fed + [i0, w0, f1, i1, w1] * (n - p - fed)
        order += [i0, i1] * rank + [i0, w0] * (p - rank) + [w1] * rank + [w0] * rank
        counts: Counter[tuple[Kind, int]] = Counter()
        actions = []
        for kind, stage in order:
            actions.append(Action(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1
        lists.append([action for action in actions if action.microbatch < m])
    return lists

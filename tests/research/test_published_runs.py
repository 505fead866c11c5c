"""research/published_runs.py: predictions are compared with published figures for runs that are quick to predict."""

from __future__ import annotations

from dataclasses import replace

from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.time.events import Attention, Collective, Move, PassEvents, Product, Wait
from research.published_programs import Program, attention_with_scores
from research.published_runs import MEMORY, compare, plan_peaks, published_runs


def test_cheap_published_runs_are_predicted_within_their_error() -> None:
    """This test covers a few published runs. `python research/published_runs.py` computes the whole table in about a
    minute."""
    every = list(published_runs())
    assert len(every) > 60 and sum(run.fit for run in every) == 13
    some = [run for run in every if run.model == "llama3.1-8b" and run.gpus == 8 and not run.other]
    found = list(compare([run for run in some if run.source == "dgxc"], PlannerCache()))
    assert len(found) == 2
    assert all(abs(each.error) < 0.08 for each in found)


def test_programs_that_keep_scores_and_add_gradients_separately() -> None:
    """Both passes do twice the FLOPs of a causal kernel that does not recompute scores. The prediction also counts the
    additional bytes."""
    heads, length, width = 6, 512, 64
    pairs = heads * length**2 / 2
    for backward, factor in ((False, 4), (True, 10)):
        kernel = Attention("auto", width, factor * pairs * width, length, backward)
        found = attention_with_scores(kernel)
        products = [event for event in found if isinstance(event, Product)]
        flops = sum(2 * each.batches * each.m * each.n * each.k for each in products)
        assert flops == 2 * (8 if backward else 4) * pairs * width
        moved = sum(event.moved for event in found if isinstance(event, Move))
        assert moved == (9 if backward else 8) * heads * length**2
    gradient = Product("bf16", 8, 4, 2, moved=48, sums=2 * 4 * 32)
    written, added = Program(adds_apart=True).events([gradient])
    assert (written, added) == (replace(gradient, sums=0, moved=48 + 64), Move(2 * 4 * 32 + 64))
    assert list(Program().events([gradient, kernel])) == [gradient, kernel]
    reduced, own = Collective("all_reduce", 8, "tp", 1), [Collective("all_gather", 8, "cp", 2), Wait(2)]
    given = [reduced, kernel, Wait(1), *own]
    assert list(Program(waits_at_once=True).events(given)) == [reduced, Wait(1), kernel, *own]
    head = PassEvents((Product("bf16", 16, 32, 8),), (Move(1),))
    passes = Program(loss_in_passes=True).passes(head, True)
    assert sum(event.moved for event in passes.forward + passes.backward) == 1 + 16 * 32 * (52 - 6)
    assert Program(loss_in_passes=True).passes(head, False) == head


def test_the_planned_memory_matches_a_published_pipeline() -> None:
    """For all rows, run python research/published_runs.py --memory."""
    every = list(published_runs(MEMORY))
    assert all(run.published.keys() == {"memory"} for run in every)
    [found] = plan_peaks([run for run in every if run.model == "gpt-6.2b" and run.vp == 1])
    assert found.scores == 5 * 7 * 4 * 3 * 32 * 1024**2 / 2**30  # scores of 7 micro-batches in flight in 4 layers
    assert abs(found.error_with_scores) < 0.02

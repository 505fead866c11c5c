"""Rules of --optimizer-post-validation."""

from __future__ import annotations

import pytest

from megatron.core.parts import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import StageCosts, simulate
from megatron.extensions.post_validation.flags import PostValidationFlags
from megatron.extensions.post_validation.rules import WAIT_FOR_RANK_0
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import config_of_sections
from megatron.training.config.validation import findings, resolve
from tests.extensions import installed
from tests.rules import BASE, problems

AHEAD = "--optimizer-post-validation --pp 4 --log-interval 10"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--untie-embeddings-and-output-weights", "with --pipeline-schedule 1f1b"),
        ("", "with --pipeline-schedule 1f1b"),  # and no word of the embedding, which changes nothing there
        ("--pipeline-schedule zb-h1", "with --pipeline-schedule zb-h1"),
        ("--num-virtual-stages-per-pipeline-rank 2", "with --pipeline-schedule interleaved"),
        ("--pipeline-schedule zb-h2", "the embedding on the first and on the last rank"),
        ("--pipeline-schedule zb-h2 --untie-embeddings-and-output-weights", ""),
        ("--pipeline-schedule zb-v", ""),
    ],
)
def test_where_updates_ahead_of_the_norm_save_no_time(flags: str, expected: str) -> None:
    found = [line for line in problems(f"{AHEAD} {flags}", 4) if line.startswith("--optimizer-post-validation")]
    assert len(found) == bool(expected) and all(expected in line and "saves no time" in line for line in found)


@pytest.mark.skipif(not installed("planner"), reason="the planner is deleted")
@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_schedules_that_wait_for_rank_0_are_those_that_the_simulator_finds(schedule: str) -> None:
    from megatron.extensions.planner.time.pipeline import post_validated

    p, m, chunks = 4, 8, PIPELINE_SCHEDULES.facts(schedule).chunks
    time, _ = post_validated(pipeline_lists(schedule, p, m, chunks, validates=True))
    saved = simulate(build_schedule(schedule, p, m, chunks), StageCosts()).makespan - time
    assert (saved == pytest.approx(0)) == (schedule in WAIT_FOR_RANK_0)


def test_without_a_pipeline_it_is_turned_off() -> None:
    given = parse_args([*BASE.split(), "--optimizer-post-validation", "--use-precision-aware-optimizer"])
    (notice,) = findings(given, 1)
    assert notice.harmless and "has no effect without --pipeline-model-parallel-size above 1" in str(notice)
    assert not resolve(given, 1).options(PostValidationFlags).optimizer_post_validation


def test_configurations_saved_in_the_section_of_the_optimizer_are_read() -> None:
    config = config_of_sections({"optimizer": {"optimizer_post_validation": True}})
    assert config.options(PostValidationFlags).optimizer_post_validation

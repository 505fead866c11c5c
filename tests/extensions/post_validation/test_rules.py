"""Rules of --optimizer-post-validation."""

from __future__ import annotations

import pytest

from megatron.core.parts import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.extensions.post_validation.flags import PostValidationFlags
from megatron.extensions.post_validation.rules import WAIT_FOR_RANK_0
from megatron.extensions.simulator.simulator import StageCosts, simulate
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import config_of_sections
from megatron.training.config.validation import findings, resolve
from tests.extensions import installed
from tests.rules import BASE


@pytest.mark.skipif(not installed("planner"), reason="the planner is deleted")
@pytest.mark.parametrize("schedule", [name for name in PIPELINE_SCHEDULES if PIPELINE_SCHEDULES.facts(name).flushes])
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

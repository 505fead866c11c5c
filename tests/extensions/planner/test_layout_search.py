"""Tests of the layout search: the generated layouts, the lower bounds, and the agreement with an exhaustive search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.extensions.plan.planner.device_file import read_device
from megatron.extensions.plan.planner.suggest.costs import LayoutCosts, step_bound
from megatron.extensions.plan.planner.suggest.report import duration
from megatron.extensions.plan.planner.suggest.search import (
    Candidate,
    Effort,
    Found,
    LayoutSearch,
    best_first,
    ranked_with,
)
from megatron.extensions.plan.planner.suggest.space import OFFLOADING, SHARDING, Layout, Saving, SearchedRun, Space
from megatron.extensions.plan.simulator.simulator import StageCosts, simulate
from megatron.training.config.arguments import command_line, parse_args
from megatron.training.config.prepare import prepare
from megatron.training.config.validation import resolve, validate
from megatron.training.reliability.launch import Launch
from tests.extensions import installed

KINDS = ("1f1b", "interleaved", "zb-h1")
RUN = (
    "--num-layers 5 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 512 --bf16 --mock-data "
    "--micro-batch-size 1 --global-batch-size 16 --train-iters 4 --lr 1e-3 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --disable-bias-linear --swiglu".split()
WIDE = (
    "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 4096 --bf16 --mock-data "
    "--swiglu --disable-bias-linear --position-embedding-type rope --normalization RMSNorm --attention-dropout 0 "
    "--hidden-dropout 0 --global-batch-size 64 --train-iters 4 --lr 1e-3"
).split()
WORLD = 4


def test_best_first_yields_by_cost_and_refines_only_what_is_needed() -> None:
    costs = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 9.0, "e": 1.0}
    bounds = {"a": 0.5, "b": 1.0, "c": 0.0, "d": 8.0, "e": 0.0}
    refined = []

    def refine(candidate: Candidate[str]) -> Iterator[Candidate[str]]:
        refined.append(candidate.item)
        yield Candidate(costs[candidate.item], candidate.order, candidate.item, final=True)

    found = best_first((Candidate(bound, (name,), name) for name, bound in bounds.items()), refine)
    assert [next(found).item for _ in range(4)] == ["b", "e", "c", "a"]
    assert "d" not in refined


@pytest.mark.parametrize("world", [1, 12, 96, 768])
@pytest.mark.parametrize("experts", [None, 6])
def test_every_generated_size_is_a_divisor(world: int, experts: int | None) -> None:
    space = Space(world, 30, 24, 4096, 768, KINDS, experts)
    layouts = [layout for family in space.families() for layout in space.layouts(family)]
    assert layouts and len(set(layouts)) == len(layouts)
    for family, pipeline, dp, _ in layouts:
        assert family.tp * family.cp * pipeline.ranks * dp == world
        assert 24 % family.tp == 0 and 768 % (dp * family.micro_batch) == 0
        assert world // pipeline.ranks % (family.ep * family.expert_tp) == 0 and (experts or 1) % family.ep == 0
        assert pipeline.ranks * pipeline.chunks <= 30


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)])
def test_no_schedule_of_uneven_stages_beats_the_bound(name: str, chunks: int) -> None:
    split = name.startswith("zb")
    for ranks, microbatches in product((2, 3), (1, 2, 7)):
        layout = PipelineLayout(ranks, chunks, name == "zb-v")
        stages = [(1 + place % 3, 2 - place % 2 / 2, 1.5 * split) for place in range(layout.num_stages)]
        forward, backward, weight = zip(*stages, strict=True)
        costs = StageCosts(list(forward), list(backward), list(weight))
        time = simulate(build_schedule(name, ranks, microbatches, chunks), costs).makespan
        assert 0.4 * time < step_bound(stages, layout, microbatches) <= time + 1e-9


def test_the_bound_of_even_stages_is_the_time_of_1f1b() -> None:
    time = simulate(build_schedule("1f1b", 4, 8), StageCosts(1.0, 2.0, 0.0)).makespan
    assert step_bound([(1.0, 2.0, 0.0)] * 4, PipelineLayout(4), 8) == time == (8 + 3) * 3.0


def found_of(costs: LayoutCosts, layout: Layout) -> Found | None:
    config = costs.run.with_layout(layout)
    if not costs.legal(config):
        return None
    return Found(layout, config, costs.step(config), tuple(costs.memory(config)))


@dataclass
class Tried:
    costs: LayoutCosts
    every: list[Found]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tried" in metafunc.fixturenames:
        models = [(), EXPERTS] if metafunc.config.getoption("--whole") else [()]
        metafunc.parametrize("tried", models, ids=["dense", "experts"][: len(models)], indirect=True, scope="module")


@pytest.fixture(scope="module")
def tried(request: pytest.FixtureRequest) -> Tried:
    """Evaluate every valid layout of a small run, each combined with every memory-saving option. With --whole, the
    search space is larger."""
    run = SearchedRun(resolve(parse_args([*RUN, *request.param]), WORLD), WORLD)
    whole = request.config.getoption("--whole")
    most = {"most_tp": 4, "most_samples": 2} if whole else {"most_tp": 2, "most_samples": 1}
    run.space = replace(run.space, schedules=KINDS if whole else KINDS[:2], recompute=("none", "full"), **most)
    costs = LayoutCosts(run, read_device("h100"), 2)
    savings = [Saving(*pair) for pair in product(SHARDING, OFFLOADING)]
    layouts = (layout for family in run.space.families() for layout in run.space.layouts(family))
    every = (found_of(costs, layout._replace(saving=saving)) for layout in layouts for saving in savings)
    return Tried(costs, [found for found in every if found is not None])


def test_bounds_of_a_layout_are_below_its_time_and_memory(tried: Tried) -> None:
    assert len(tried.every) > 50
    for found in tried.every:
        seconds = found.step.seconds
        assert tried.costs.family_bound(found.layout.family) <= tried.costs.time_bound(found.layout) <= seconds
        assert tried.costs.memory_bound(found.layout) <= found.fullest.total


def test_the_bound_of_wide_layers_is_tight() -> None:
    """The GEMMs of this model fill the device, and replicas exchange little data."""
    costs = LayoutCosts(SearchedRun(resolve(parse_args(WIDE), 8), 8), read_device("h100"), 8)
    family = next(costs.run.space.families())
    assert (family.tp, family.cp, family.recompute) == (1, 1, "none")
    found = found_of(costs, next(costs.run.space.layouts(family)))
    assert found is not None and 0.65 < costs.family_bound(family) / found.step.seconds <= 1


def test_memory_does_not_depend_on_earlier_layouts(tried: Tried) -> None:
    """The layouts in this test offload different numbers of layers. Each layout has the same planned memory if it is
    evaluated alone."""
    offloading = [found for found in tried.every if found.layout.saving == Saving("optim", "activations")]
    layers = {found.config.parallel.offloaded_layers: found for found in offloading}
    assert len(layers) > 1
    for found in layers.values():
        alone = LayoutCosts(tried.costs.run, tried.costs.device, 2).memory(found.config)
        assert [rank.record for rank in found.memory] == [rank.record for rank in alone]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_search_matches_an_exhaustive_search(tried: Tried, share: float) -> None:
    sizes = sorted(found.fullest.total for found in tried.every)
    limit = sizes[int(share * (len(sizes) - 1))]
    fastest: dict[tuple[object, ...], float] = {}
    for found in tried.every:
        if found.fullest.total <= limit:
            shape = found.layout.shape
            fastest[shape] = min(found.step.seconds, fastest.get(shape, found.step.seconds))
    best = LayoutSearch(tried.costs, limit).best(10)
    assert [each.step.seconds for each in best] == sorted(fastest.values())[:10]
    assert all(fastest[each.layout.shape] == each.step.seconds for each in best)
    assert all(each.fullest.total <= limit for each in best)


@pytest.mark.parametrize("most_timed", [1, 2])
def test_a_search_of_few_families_prints_a_bound_for_the_others(tried: Tried, most_timed: int) -> None:
    limit = max(found.fullest.total for found in tried.every)
    fastest = LayoutSearch(tried.costs, limit).best(10)
    few = LayoutSearch(tried.costs, limit, most_timed=most_timed)
    found = few.best(10)
    assert few.effort.traced == most_timed and len({each.layout.family for each in found}) <= most_timed
    assert few.effort.bound is not None and few.effort.bound <= fastest[0].step.seconds <= found[0].step.seconds
    missed = [each.step.seconds for each in fastest if each.layout not in {each.layout for each in found}]
    assert not missed or few.effort.bound <= min(missed)


def test_an_interrupted_search_returns_its_predictions_so_far(tried: Tried) -> None:
    limit = max(found.fullest.total for found in tried.every)
    fastest = LayoutSearch(tried.costs, limit).best(10)

    def end(effort: Effort) -> None:
        if effort.predicted == 4:
            search.end_early()

    search = LayoutSearch(tried.costs, limit, progress=end)
    found = search.best(10)
    assert 0 < len(found) <= 4 <= search.effort.predicted and search.effort.interrupted
    assert search.effort.bound is not None
    left_out = [each for each in fastest if each.layout.shape not in {every.layout.shape for every in found}]
    assert left_out and search.effort.bound <= left_out[0].step.seconds


def test_an_approximate_search_finds_layouts_that_fit(tried: Tried) -> None:
    sizes = sorted(found.fullest.total for found in tried.every)
    for share in (0.02, 0.1, 0.4):
        limit = sizes[int(share * len(sizes))]
        seconds = [found.step.seconds for found in tried.every if found.fullest.total <= limit]
        early = LayoutSearch(tried.costs, limit, most_timed=1000)
        found = early.best(10)
        assert found and all(each.fullest.total <= limit for each in found)
        assert min(seconds) == found[0].step.seconds or (early.effort.bound or 0.0) <= min(seconds)


def test_offloaded_data_fits_the_host(tried: Tried) -> None:
    costs = LayoutCosts(tried.costs.run, replace(tried.costs.device, host_memory_gib=1e-6), 2)
    limit = max(found.fullest.total for found in tried.every if not found.host) // 4
    assert any(each.host for each in LayoutSearch(tried.costs, limit).best(10))
    search = LayoutSearch(costs, limit)
    assert not any(each.host for each in search.best(10)) and search.effort.beyond_host


def test_the_given_layout_is_ranked_among_the_suggestions(tried: Tried) -> None:
    best = LayoutSearch(tried.costs, max(found.fullest.total for found in tried.every)).best(10)
    for own in (replace(found, given=True) for found in tried.every):
        ranked = ranked_with(own, best)
        seconds = [each.step.seconds for each in ranked]
        assert seconds == sorted(seconds) and [each for each in ranked if each.given] == [own]
        place = ranked.index(own)
        assert ranked[:place] == best[:place] and all(each.step.seconds < own.step.seconds for each in best[:place])
        missing = [each for each in best if each not in ranked]
        assert all(each.layout.shape == own.layout.shape for each in missing) and len(missing) < 2


def test_a_runs_own_layout_is_recognized_from_its_flags(tried: Tried) -> None:
    for found in tried.every:
        assert SearchedRun(found.config, WORLD).own_layout == found.layout


def test_if_no_layout_fits_only_the_nearest_is_named(tried: Tried) -> None:
    search = LayoutSearch(tried.costs, 1000)
    assert search.best(10) == [] and search.effort.traced == search.effort.predicted == 0
    nearest = search.nearest()
    assert nearest is not None and nearest.fullest.total == min(found.fullest.total for found in tried.every)


def test_pasted_flags_give_the_same_figures(tried: Tried) -> None:
    """On a command line, the flags that the search prints override earlier flags that select a different layout."""
    own = [*RUN, *(EXPERTS if tried.costs.run.own.model.num_experts else ())]
    own += "--tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-h1 --no-overlap-grad-reduce".split()
    run = SearchedRun(resolve(parse_args(own), WORLD), WORLD)
    shapes = {found.layout.shape: found for found in tried.every}
    for found in shapes.values():
        config = run.with_layout(found.layout)
        assert run.dropped(config) == []
        pasted = resolve(parse_args([*own, *run.flags(config)]), WORLD)
        assert tried.costs.step(pasted) == found.step
        assert [rank.record for rank in tried.costs.memory(pasted)] == [rank.record for rank in found.memory]


def test_a_flag_that_cannot_be_undone_is_named() -> None:
    own = [*RUN, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    run = SearchedRun(resolve(parse_args(own), WORLD), WORLD)
    layout = next(run.space.layouts(next(run.space.families())))
    config = run.with_layout(layout)
    assert run.dropped(config) == ["--recompute-method", "--recompute-num-layers"]
    words = run.flags(config)
    assert words[words.index("--recompute-granularity") + 1] == "none"


def test_sizes_that_do_not_divide_matrices_are_not_searched() -> None:
    """The search space contains TP 3, but three ranks cannot evenly split the 512 rows of the embedding."""
    narrow = "--num-layers 1 --hidden-size 96 --num-attention-heads 6 --global-batch-size 12".split()
    run = SearchedRun(resolve(parse_args([*RUN, *narrow]), 6), 6)
    run.space = replace(run.space, schedules=(), recompute=("none",), most_samples=1)
    assert 3 in run.space.tp_sizes
    found = LayoutSearch(LayoutCosts(run, read_device("h100"), 6), 2**40).best(10)
    assert sorted(each.layout.family.tp for each in found) == [1, 2]


def test_the_verdict_on_illegal_flags_is_followed_by_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    own = [*RUN, *"--global-batch-size 1 --tp 3 --dry-run --suggest --device h100 --world-size 1 --json".split()]
    with pytest.raises(SystemExit) as ended:
        prepare(command_line(own, Launch()), Launch())
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert not record["given"]["legal"] and any("TP 3" in problem for problem in record["given"]["problems"])
    (only,) = record["suggestions"]
    assert only["fits"] and only["layout"]["recompute"] == "none" and only["cross_nodes"] == []
    assert only["hours"] == 4 * only["time"]["seconds"] / 3600


def test_the_verdict_ranks_the_given_layout(capsys: pytest.CaptureFixture[str]) -> None:
    own = [*RUN, *"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()]
    own += "--global-batch-size 1 --dry-run --suggest --device h100 --world-size 1".split()
    with pytest.raises(SystemExit) as ended:
        prepare(command_line(own, Launch()), Launch())
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "the given layout is slower than all suggested layouts; the first takes " in said
    assert "DP 1, MBS 1, ZeRO-1, full recomputation (given)" in said


@pytest.mark.skipif(not installed("phases"), reason="phases is deleted")
def test_runs_whose_batch_grows_are_searched() -> None:
    """The initial batch size of the ramp-up does not restrict the search, because the search tries constant batch
    sizes."""
    run = SearchedRun(resolve(parse_args([*RUN, *"--rampup-batch-size 8 8 64".split()]), WORLD), WORLD)
    assert LayoutCosts(run, read_device("h100"), 2).divides(2, 1, 1, 2)


def test_problems_of_every_layout_are_reported_without_a_search() -> None:
    config = resolve(parse_args([*RUN, "--tp", "3", "--train-tokens", "1e6", "--lr-warmup-iters", "5"]), WORLD)
    problems = validate(config, WORLD)
    flags = {problem.flag for problem in SearchedRun(config, WORLD).unavoidable(problems)}
    assert "--lr-warmup-iters" in flags and len(flags) < len({problem.flag for problem in problems})


TIMES = {0.2095: "0.209 seconds", 59.96: "60 seconds", 60: "1 minute", 1800: "30 minutes", 3600: "1 hour"}
TIMES |= {47.6 * 3600: "47.6 hours", 2.04 * 86400: "2.04 days", 1810 * 86400: "4.96 years"}
TIMES |= {1.2345e6 * 365.25 * 86400: "1,230,000 years"}


@pytest.mark.parametrize(("seconds", "said"), TIMES.items())
def test_run_times_have_suitable_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(("flags", "ranks"), [("", 1), ("--tp 4 --pp 2", 8)])
def test_a_search_without_the_number_of_ranks_is_refused(flags: str, ranks: int) -> None:
    command = command_line([*RUN, *"--dry-run --device h100 --suggest".split(), *flags.split()], Launch())
    assert command.world_size == ranks and command.notes == (
        f"--suggest searches layouts of {ranks} ranks, the number that the flags require; "
        "add --world-size, the number of ranks of the cluster",
    )


MISTAKES = [
    ("--suggest --dry-run", "--suggest: searches by predicted times; add --device, one of"),
    (
        "--device-memory 80",
        "--device-memory 80: has no effect without a plan or a rehearsal; add --dry-run or --rehearse",
    ),
    ("--suggest --dry-run --device h100 --device-memory much", "--device-memory much: must be a number above 0"),
    ("--dry-run --device h1000", "--device h1000: there is no device h1000; known devices: a100"),
    ("--dry-run --device h1000", "use one of a100"),
    ("--dry-run --device h100 --gpus-per-node 0", "--gpus-per-node 0: must be a whole number above 0"),
    ("--dry-run --device h100 --world-size 8 --gpus-per-node 3", "3: does not divide the 8 ranks: predictions assume"),
    ("--dry-run --device h100 --world-size 8 --gpus-per-node 3", "nearest: 2"),
    ("--dry-run --gpus-per-node 4", "--gpus-per-node 4: describes the nodes of --device, but --device is not given"),
    ("--device h100", "--device h100: needs --dry-run, which predicts; add --dry-run"),
    ("--rehearse --suggest", "--suggest: searches by predicted times; replace --rehearse by --dry-run, and add "),
    ("--rehearse --suggest --device h100", "searches by predicted times; replace --rehearse by --dry-run"),
    ("--rehearse --suggest --device h100", "--device h100: needs --dry-run, which predicts; replace --rehearse by"),
    ("--dry-run --ranks 0", "--ranks 0: has no effect without a rehearsal; add --rehearse"),
    ("--json plan.json", "--json plan.json: writes the plan of --dry-run or the report of --rehearse, but neither"),
    ("--dry-run --json /nowhere/plan.json", "--json /nowhere/plan.json: cannot be written; name a file"),
    ("--dry-run --json /", "--json /: cannot be written; name a file"),
]


@pytest.mark.parametrize(("flags", "said"), MISTAKES)
def test_wrong_flags_are_reported(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line([*RUN, *flags.split()], Launch())
    assert said in "".join(capsys.readouterr())

"""Report, as text and as JSON, on the layout that a run's flags describe and on the best layouts found."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.plan.planner.device_file import read_device
from megatron.extensions.plan.planner.dry_run import share_text
from megatron.extensions.plan.planner.memory import GIB, RankMemory, gib
from megatron.extensions.plan.planner.memory_lines import Fit
from megatron.extensions.plan.planner.suggest.costs import LayoutCosts
from megatron.extensions.plan.planner.suggest.search import Effort, Found, LayoutSearch, ranked_with
from megatron.extensions.plan.planner.suggest.space import CHUNKS, OFFLOADING, RECOMPUTATION, Layout, SearchedRun
from megatron.extensions.plan.planner.terminal import at_interrupt, progress
from megatron.extensions.plan.planner.time.replay import placement
from megatron.training.config.commands import Prepared
from megatron.training.config.output_files import write_json
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import plan_of

CROSSING = {"tp": "TP", "cp": "CP", "ep": "EP"}
ZERO = {
    "optim": "ZeRO-1",
    "optim_grads": "ZeRO-2",
    "optim_grads_params": "ZeRO-3",
    "no_shard": "states not sharded",
}


def crossing(each: Found) -> list[str]:
    """Return the parallel sizes (TP, CP or EP) whose groups span several nodes. In every layer, the ranks of a group
    that spans several nodes wait for messages between these nodes."""
    dims = ParallelDims.from_config(each.config.parallel, each.step.world_size)
    return [
        f"{name} {dims.size(axis)}"
        for axis, name in CROSSING.items()
        if dims.size(axis) > 1 and placement(dims, (axis,), each.step.gpus_per_node).crosses
    ]


UNITS = (("seconds", 1, 60), ("minutes", 60, 60), ("hours", 3600, 48), ("days", 86400, 730))
"""Time units as (name, length in seconds, limit). Durations of at least `limit` units are shown in the next larger
unit."""


def duration(seconds: float) -> str:
    """Format a duration with three digits in the most readable unit: `5.82 seconds`, `36.5 hours`, `1,230 years`."""
    for name, unit, most in UNITS:
        if seconds / unit < most:
            number = f"{seconds / unit:.3g}"
            return f"{number} {name.removesuffix('s') if number == '1' else name}"
    return f"{float(f'{seconds / (365.25 * 86400):.3g}'):,.15g} years"


def iterations_of(config: RunConfig) -> int | None:
    """Return the number of steps of a run; None if the number depends on the data."""
    plan = plan_of(config)
    return None if plan.phases[-1].end is None else plan.iterations


def tokens_of(config: RunConfig) -> int:
    """Return the number of tokens of a run. The number of steps of the run must be known (`iterations_of`)."""
    plan = plan_of(config)
    return plan.tokens(plan.sizes.samples(plan.iterations))


def verdict_lines(each: Found, limit: int) -> Iterator[str]:
    """Yield lines that state whether a legal layout fits, how long a step takes, and which groups span several
    nodes."""
    step = each.step
    yield from _fit(each, limit).lines
    line = f"{step.seconds:.4g} s a step, {step.tflops:.4g} TFLOP/s a device, MFU {share_text(step.mfu)} (causal)"
    yield f"{line}, bound by {step.bound_by.replace('_', ' ')}"
    if (steps := iterations_of(each.config)) is not None:
        tokens = tokens_of(each.config)
        yield f"{duration(steps * step.seconds)} for {tokens:,} tokens in {steps:,} steps of the full batch"
    crosses, nodes = crossing(each), f"nodes of {step.gpus_per_node}"
    yield f"{' and '.join(crosses)} cross {nodes}" if crosses else f"TP, CP and EP stay within {nodes}"


def _fit(each: Found, limit: int) -> Fit:
    return Fit.of(each.memory, limit / GIB, each.step.device)


def verdict_record(each: Found, limit: int) -> dict[str, object]:
    """Return the predicted time and memory of a layout as a JSON object."""
    steps = iterations_of(each.config)
    return {
        "legal": True,
        **_fit(each, limit).record,
        "hours": None if steps is None else steps * each.step.seconds / 3600,
        "cross_nodes": crossing(each),
        "time": each.step.record,
        "memory": [rank.record for rank in each.memory],
    }


def standing_line(ranked: Sequence[Found]) -> str:
    """Return a line that states the position of the run's own layout among the suggested layouts."""
    place = next(place for place, each in enumerate(ranked, 1) if each.given)
    if place == 1:
        return "the given layout is the fastest of these"
    share = 1 - ranked[0].step.seconds / ranked[place - 1].step.seconds
    where = "slower than all suggested layouts" if place == len(ranked) else f"number {place} of {len(ranked)}"
    return f"the given layout is {where}; the first takes {share:.1%} less time"


def table_lines(found: Sequence[Found], run: SearchedRun) -> Iterator[str]:
    """Yield a table with one row per layout, followed by the flags of each layout."""
    steps = iterations_of(run.own)
    yield f"{'':<4}{'s a step':>9} {'run':>15}{'TFLOP/s':>9}{'MFU':>7}{'GiB':>7}  {'bound by':<18}layout"
    for number, each in enumerate(found, 1):
        step, whole = each.step, "" if steps is None else duration(steps * each.step.seconds)
        yield (
            f"{number:<4}{step.seconds:>9.4g} {whole:>15}{step.tflops:>9.1f}{share_text(step.mfu):>7}"
            f"{gib(each.fullest.total):>7}  {step.bound_by.replace('_', ' '):<18}{layout_text(each.layout)}"
            f"{f', {gib(each.host)} GiB of the host' if each.host else ''}{' (given)' if each.given else ''}"
        )
    yield "flags to append to those of the run:"
    for number, each in enumerate(found, 1):
        if each.given:
            yield f"{number:<4}those of the run"
            continue
        without = run.dropped(each.config)
        yield f"{number:<4}{' '.join(run.flags(each.config))}" + (f"   without {' '.join(without)}" if without else "")


def layout_text(layout: Layout) -> str:
    """Format a layout, as in `TP 8 PP 4 VP 2 DP 16, MBS 1, interleaved, ZeRO-1`."""
    family = layout.family
    pipeline = layout.pipeline
    saving = layout.saving
    sizes = {"TP": family.tp, "CP": family.cp, "PP": pipeline.ranks, "VP": pipeline.chunks, "EP": family.ep}
    sizes |= {"ETP": family.expert_tp} if family.ep > 1 and family.expert_tp != family.tp else {}
    text = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    parts = [f"{text} DP {layout.dp}".strip(), f"MBS {family.micro_batch}"]
    parts += [pipeline.schedule] if pipeline.ranks > 1 else []
    parts += [ZERO[saving.sharding]]
    parts += [f"{family.recompute} recomputation"] if family.recompute != RECOMPUTATION[0] else []
    parts += [f"{saving.offload} offloaded"] if saving.offload != OFFLOADING[0] else []
    return ", ".join(parts)


def found_record(each: Found, run: SearchedRun, limit: int) -> dict[str, object]:
    """Return a layout, with its flags and its predicted time and memory, as a JSON object."""
    layout = each.layout
    return {
        "given": each.given,
        "layout": {**layout.family._asdict(), **layout.pipeline._asdict(), "dp": layout.dp, **layout.saving._asdict()},
        "flags": run.flags(each.config),
        "without": run.dropped(each.config),
        **verdict_record(each, limit),
    }


def nearest_lines(nearest: Found | None, run: SearchedRun, limit: int) -> Iterator[str]:
    """Yield report lines that state that no layout fits, and that describe the layout that exceeds the memory limit by
    the least."""
    yield f"no layout fits {gib(limit)} GiB"
    if nearest is None:
        yield "no layout is legal for this model, batch and number of ranks"
        return
    most = nearest.fullest
    yield f"nearest: {layout_text(nearest.layout)}: {gib(most.total - limit)} GiB too much on pp {most.plan.pp_rank}"
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in most.sizes.items())
    yield f"    GiB there: {sizes}"
    yield f"    {_remedy(most, run.world_size)}"
    yield f"    {' '.join(run.flags(nearest.config))}"


def _remedy(most: RankMemory, ranks: int) -> str:
    states = sum(most.sizes[name] for name in ("weights", "gradients", "optimizer"))
    if 2 * states > most.total:
        return f"parameters and their states take most of the memory: use more than {ranks} ranks, or larger devices"
    return "activations and temporary tensors take most of the memory: use a shorter --seq-length, or larger devices"


def early_lines(effort: Effort, found: Sequence[Found]) -> Iterator[str]:
    """Yield lines about the layouts that a search did not evaluate."""
    if effort.bound is not None and (not found or effort.bound < found[-1].step.seconds):
        why = "interrupted" if effort.interrupted else "ended early"
        beaten = bool(found) and effort.bound >= found[0].step.seconds
        yield (
            f"{why}: layouts that were not evaluated may take as little as {effort.bound:.4g} s"
            + (", so none can be faster than the first one" if beaten else "")
            + "; --suggest all searches until no layout can be faster"
        )


def effort_line(effort: Effort, run: SearchedRun) -> str:
    """Return a line about the size of the searched space."""
    space = run.space
    return (
        f"searched: TP up to {max(space.tp_sizes)}, with sequence parallelism, PP, VP up to {CHUNKS[-1]}, CP of "
        f"{space.fewest_tokens} tokens or more, "
        + ("EP, expert TP, " if space.num_experts is not None else "")
        + f"micro-batches up to {max(space.micro_batches)}, {', '.join(space.schedules)}, recomputation "
        f"({', '.join(space.recompute)}), ZeRO-1 to 3, offloading: {effort.families:,} kinds of layers, "
        f"{effort.layouts:,} layouts with a memory bound, {effort.predicted:,} predicted, "
        f"{effort.measured:,} measured"
    )


SUGGESTED = 10

MOST_TIMED = 90
"""Default maximum number of layout families (`Family`) whose layers are timed."""


def progress_text(effort: Effort) -> str:
    counts = f"{effort.traced:,} kinds of layers timed, {effort.predicted:,} layouts predicted"
    return f"searching: {counts}; Ctrl-C or SIGTERM ends the search and prints the layouts found so far"


def print_suggestions(
    asked: Prepared, device: str, gpus_per_node: int | None, device_memory: float | None, most_timed: int | None
) -> bool:
    """Print whether the given layout fits and how long its step takes. Then print the ten fastest layouts that fit.

    Returns True if at least one layout is legal. `device_memory` is in GiB; the default is the memory in the device
    file. `most_timed` is passed to `LayoutSearch`. The same content is written to the file that --json names. If this
    path is "", only the JSON is printed. Raises OutputError if the file cannot be written, and DeviceError if the
    device file lacks an entry that the prediction needs.
    """
    config = asked.config
    world_size = asked.world_size
    plan_file = asked.json_file
    problems = asked.problems
    speeds, run = read_device(device), SearchedRun(config, world_size)
    if run.unavoidable(problems):
        return False
    costs = LayoutCosts(run, speeds, gpus_per_node or speeds.ranks_of_node(world_size))
    limit = int((device_memory or speeds.memory_gib) * GIB)
    record: dict[str, object] = {
        "world_size": world_size,
        "device": speeds.name,
        "gpus_per_node": costs.gpus_per_node,
        "device_memory": limit,
    }

    def show(title: str, lines: Sequence[str]) -> None:
        if plan_file != "":
            print("\n".join([title, *(f"  {line}" for line in lines)]), flush=True)

    title = f"The given layout on {world_size} x {speeds.name}, {costs.gpus_per_node} a node, predicted"
    standing, mine = list[str](), None
    with progress() as say:
        search = LayoutSearch(costs, limit, most_timed, lambda effort: say(progress_text(effort)))
        if problems:
            show(title, ["cannot run:", *(f"    {problem}" for problem in problems)])
            record["given"] = {"legal": False, "problems": [str(problem) for problem in problems]}
        else:
            mine = Found(run.own_layout, config, costs.step(config), tuple(costs.memory(config)), given=True)
            show(title, list(verdict_lines(mine, limit)))
            record["given"] = verdict_record(mine, limit)
        with at_interrupt(search.end_early, (signal.SIGINT, signal.SIGTERM)):
            found = search.best(SUGGESTED)
    if mine is not None and mine.fullest.total <= limit:
        found = ranked_with(mine, found)
        standing = [standing_line(found)]
    nearest = None if found else search.nearest()
    record["suggestions"] = [found_record(each, run, limit) for each in found]
    record["searched"] = {"space": vars(run.space), **vars(search.effort)}
    if found:
        count = sum(not each.given for each in found)
        title = f"Suggested layouts, {count} of the fastest that fit" + (", and the given layout" if standing else "")
        show(title, [*standing, *table_lines(found, run)])
    else:
        show("Suggested layouts", list(nearest_lines(nearest, run, limit)))
        record["nearest"] = None if nearest is None else found_record(nearest, run, limit)
    show("Search", [effort_line(search.effort, run), *early_lines(search.effort, found)])
    if plan_file is not None:
        write_json(record, plan_file)
    return bool(found or nearest)

"""Sections of a run's report. A section shows the data that could be read, and states which data is missing.

The page, page.html, needs no network: styles and pictures are inline. Text that comes from the run is HTML-escaped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from megatron.extensions.observe.diagnosis.trace.pipeline_timeline import measured_steps
from megatron.training.config.batch_size import byte_text

from .drawing import NARROW, WIDE, Marks, Series, curves, inline, short_number, time_text
from .plot_memory import in_order, measured_bars, memory_picture, planned_bars, told
from .plot_ranks import lines, map_of_trace, planned_map, rank_picture
from .plot_trace import chosen, phases_picture, timeline_picture
from .plot_trace import told as step_told
from .run_folder import CONFIG, RunFolder, labels_of, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 200
IN_SIGHT = 20


def cell_look(value: Any) -> str:
    """Return the CSS class of a table cell. The class "short" keeps text on one line, and "long" allows a line break
    within a long word."""
    words = str(value).split()
    return "short" if len(str(value)) <= 22 else "long" if max(map(len, words), default=0) > 24 else ""


_pages = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
_pages.filters["look"] = cell_look
html: Any = _pages.get_template("page.html").module
"""Macros of page.html."""


def figures(pictures: Iterable[Figure | None]) -> Markup:
    """Place charts next to each other if there is room."""
    return html.pictures([inline(picture) for picture in pictures if picture is not None], "pictures")


def wide_figures(draw: Callable[[float], Figure]) -> Markup:
    """Return the figures that `draw` produces for wide windows and for phones. The argument of `draw` is a width in
    inches."""
    return html.pictures([inline(draw(WIDE))], "wide") + html.pictures([inline(draw(NARROW))], "narrow")


def summary(run: RunFolder) -> Markup:
    """Return the summary of a run: its most important figures."""
    facts = [("status", *status(run))]
    of = run.config.get("train-iters")
    reached = max((int(record["iteration"]) for record in run.records), default=None)
    if reached is not None:
        facts.append(("iterations", f"{reached:,}" + (f" of {of:,}" if isinstance(of, int) else ""), ""))
    if loss := run.values("lm_loss"):
        facts.append(("training loss", f"{loss[-1][1]:.4f}", "" if math.isfinite(loss[-1][1]) else "bad"))
    for name in ("validation", "test"):
        if measured := run.values(f"{name.removesuffix('ation')}_loss"):
            facts.append((f"{name} loss", f"{measured[-1][1]:.4f} at {measured[-1][0]:,.0f}", ""))
    if tokens := run.values("consumed_tokens"):
        facts.append(("tokens", short_number(tokens[-1][1]), ""))
    for name, key, figure, text in (
        ("tokens/s, median", "tokens_per_second", statistics.median, short_number),
        ("MFU, median", "mfu", statistics.median, "{:.1%}".format),
        ("peak memory of a rank", "peak_memory_bytes", max, byte_text),
    ):
        if usual := _finite(run.values(key)):
            facts.append((name, text(figure(usual)), ""))
    if run.world_size is not None:
        facts.append(("ranks", f"{run.world_size:,}", ""))
    return html.cards(facts) + html.bullets(run.notes)


def _finite(points: Sequence[tuple[float, float]]) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]


def status(run: RunFolder) -> tuple[str, str]:
    """Return the status of the run and the CSS class of the status color."""
    last = next((event for event in reversed(run.events) if event.get("event") in ("start", "end")), None)
    name = str(last.get("name", "")) if last is not None and last["event"] == "end" else ""
    name = name or run.outcome.get("name", "")
    if name in ("DONE", "TO_BE_RESUMED"):
        return name.lower().replace("_", " "), "good"
    if name and name != "RUNNING":
        return name.lower().replace("_", " "), "bad"
    if last is not None or name:
        return "no end recorded: still running, or killed", "bad"
    return "not recorded", ""


COLOURS_OF_RUNS = [f"C{number}" for number in range(10)] * 10


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return a legend label for each run: its name, or its path if two runs have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else labels_of(runs)


def marks_of(run: RunFolder) -> Marks:
    """Return the restarts and phases of a run."""
    again = [number(event.get("iteration")) for event in run.events if event.get("event") == "start"][1:]
    return Marks([at for at in again if at is not None], run.phases)


def of_runs(runs: Sequence[RunFolder], key: str) -> list[Series]:
    """Return one curve for each run that has logged a metric, in the color of the run."""
    named = zip(runs, COLOURS_OF_RUNS, names_of(runs), strict=False)
    return [Series(name, run.values(key), colour=colour) for run, colour, name in named]


def loss(run: RunFolder, others: Sequence[RunFolder]) -> Markup:
    """Draw curves of loss, validation loss, gradient norm and learning rate; several runs share a chart."""
    runs, series = [run, *others], []
    for each, colour, name in zip(runs, COLOURS_OF_RUNS, names_of(runs), strict=False):
        series.append(Series(name if others else "training", each.values("lm_loss"), colour=colour))
        if valid := each.values("valid_loss"):
            series.append(Series("" if others else "validation", valid, dots=True, colour=colour))
    marks = marks_of(run)
    told = ["nats per token"]
    told += ["dots: validation"] if any(one.dots and not one.name for one in series) else []
    told += ["red: restarts"] if marks.restarts else []
    shown = [
        curves("loss", "; ".join(told), series, marks=marks),
        curves("gradient norm", "before clipping", of_runs(runs, "grad_norm"), zero=True, marks=marks),
        curves("learning rate", "", of_runs(runs, "learning_rate"), zero=True, marks=marks),
    ]
    losses = run.values("lm_loss")
    bad = len(losses) - len(_finite(losses))
    text = f"The training loss of {bad:,} of {len(losses):,} records is NaN or infinite."
    note = html.paragraph(text, "bad") if bad else ""
    if not any(shown):
        return note or html.paragraph("The run has logged no loss.")
    keys = ("iteration", "lm_loss", "grad_norm", "learning_rate", "step_time")
    rows = [[_cell(record.get(key)) for key in keys] for record in run.records if "lm_loss" in record]
    last = html.details("The last records as a table", html.table("last records", keys, rows[-20:], range(len(keys))))
    return note + figures(shown) + last


def _cell(value: Any) -> str:
    """Format a value of a record; numbers have six digits."""
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def throughput(run: RunFolder, others: Sequence[RunFolder] = ()) -> Markup:
    """Draw tokens/s, FLOP/s and the step time; several runs share a chart."""
    marks = marks_of(run)
    shown = [
        curves(title, unit, of_runs([run, *others], key), text, zero=True, marks=marks)
        for title, unit, key, text in (
            ("tokens per second", "all ranks", "tokens_per_second", None),
            ("step time", "s", "step_time", None),
            ("TFLOP/s per device", "", "tflops_per_device", None),
            ("MFU", "", "mfu", "{:.1%}".format),
        )
    ]
    slow = [
        [int(record["iteration"]), phase, record.get(f"straggler_{phase}_rank"), f"x{ratio:.2f}"]
        for record in run.records
        for phase in ("data", "forward", "backward", "grad_sync", "optimizer")
        if (ratio := number(record.get(f"straggler_{phase}_ratio"))) is not None and ratio > 1.5
    ]
    heads, title = ("iteration", "phase", "rank", "times"), "ranks that took more than 1.5 times the median time"
    stragglers = html.table(title, heads, slow[-50:], (0, 2, 3))
    return (figures(shown) or html.paragraph("The run has logged no throughput.")) + stragglers


ON_CPU = (
    "On CPU, the peak is that of the whole process with torch's code and data; activations are not counted separately."
)


def memory(run: RunFolder, plan: Sequence[Mapping[str, int]] | None, why_no_plan: str) -> Markup:
    """Draw the peak memory over the run, and bars of planned and traced memory by rank and category."""
    peak = Series("peak", run.values("peak_memory_bytes"))
    chart = curves("peak memory so far", "of the rank with the most memory", [peak], byte_text, zero=True)
    bars, text = planned_bars(plan or []), Markup()
    if run.older_trace:
        why = f"The run was traced under another layout ({run.older_trace}): held memory is not drawn."
        text = html.paragraph(why, "soft")
    elif run.trace is not None:
        bars += measured_bars(run.trace["otherData"]["ranks"])
    if not plan:
        text += html.paragraph(f"There is no plan to compare with: {why_no_plan}.", "soft")
    if run.trace is None:
        text += html.paragraph("--trace records the held memory of each rank by category.", "soft")
    elif any("process" in (facts.get("memory") or {}) for facts in run.trace["otherData"]["ranks"]):
        text += html.paragraph(ON_CPU, "soft")
    drawn = wide_figures(partial(memory_picture, bars)) if bars else Markup()
    words = html.details("The bars in words", html.bullets([f"{bar.label}: {told(bar)}" for bar in in_order(bars)]))
    return (figures([chart]) or html.paragraph("The run has logged no memory.")) + drawn + words + text


def layout(run: RunFolder, gpus_per_node: int) -> Markup:
    """Draw the nodes and their ranks, and list the parallel groups that span several nodes."""
    found, source = None, ""
    if run.trace is not None and not run.older_trace:
        try:
            found, source = map_of_trace(run.trace), "The trace recorded the hosts."
        except (KeyError, TypeError, ValueError) as error:
            source = f"The trace has no layout: {error!r}."
    if found is None and (dims := run.dims()) is not None:
        found = planned_map(dims, gpus_per_node)
        source = f"Nodes of {gpus_per_node} consecutive ranks (--gpus-per-node); a trace records the hosts themselves."
    if found is None:
        return html.paragraph(source or "The layout is unknown: the configuration or the number of ranks is missing.")
    text = html.pre("\n".join(lines(found)))
    return html.paragraph(source, "soft") + wide_figures(partial(rank_picture, found)) + html.details("As text", text)


def timeline(run: RunFolder) -> Markup:
    """Draw the planned and the measured timeline of the traced step."""
    if run.trace is None and run.trace_path is not None:
        return html.paragraph(f"The trace {run.trace_path.name} could not be read; see the summary.")
    if run.trace is None:
        how = "--trace --trace-step-start 10 --trace-step-end 12 records two steps of all ranks."
        return html.paragraph(f"No trace: {how}")
    assert run.trace_path is not None
    try:
        steps = measured_steps(run.trace)
        step = chosen(run.trace)
        pictures = wide_figures(partial(timeline_picture, run.trace, step))
        pictures += wide_figures(partial(phases_picture, run.trace, step.iteration))
    except (KeyError, TypeError, ValueError) as error:
        return html.paragraph(f"The trace {run.trace_path.name} cannot be drawn: {error!r}.")
    rows = [
        [each.iteration, ", ".join(map(str, each.ranks)), time_text(each.makespan), f"{each.bubble:.1%}"]
        for each in steps[:MOST_ROWS]
    ]
    facts = [facts.get("clock", {}) for facts in run.trace["otherData"]["ranks"]]
    residual = max((number(clock.get("residual_us")) or 0.0 for clock in facts), default=0.0)
    clock = (
        f"The clocks of the hosts agree to within {time_text(residual)}."
        if residual
        else "All ranks share the clock of one host."
    )
    where = f"{run.trace_path} can be opened in Perfetto, which shows all ranks and collectives."
    older = f" The run was traced under a different layout than its last start: {run.older_trace}."
    all_steps = html.table("pipelines of all traced steps", ("iteration", "ranks", "time", "bubble"), rows, (0, 2, 3))
    return (
        html.paragraph(f"{step_told(run.trace, step)}. {clock}{older if run.older_trace else ''}")
        + pictures
        + html.paragraph(where, "soft")
        + html.details("All traced steps", all_steps)
    )


def goodput(run: RunFolder) -> Markup:
    """Show how the wall time of all starts of the run was used, together with the logged goodput."""
    from megatron.extensions.observe.goodput import accounts  # only needed for runs with --log-goodput

    found = accounts.last_account(run.events)
    if found is None:
        return html.paragraph("Not recorded: --log-goodput measures the ratio of useful step time to wall time.")
    iteration, seconds = found
    wall = sum(seconds.values())
    rows = [
        [name, f"{seconds[part]:.1f}", f"{seconds[part] / wall if wall else 0:.1%}"]
        for part, name in accounts.PARTS.items()
    ]
    head = "spent on", "seconds", "share"
    share = f"{accounts.goodput(seconds):.1%} of {wall:,.0f} s of wall time"
    text = f"{share}, up to iteration {iteration:,}, over all starts."
    chart = curves("goodput", "since the first start", of_runs([run], "goodput"), "{:.1%}".format, marks=marks_of(run))
    return html.paragraph(text) + figures([chart]) + html.table("wall time of all starts", head, rows, (1, 2))


def when(seconds: Any) -> str:
    """Format a time in UTC."""
    value = number(seconds)
    if value is None or not 0 <= value < 4e9:
        return ""
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")


def saves(run: RunFolder) -> Markup:
    """List existing checkpoints, and every save with its duration."""
    kept = []
    for one in run.checkpoints[-MOST_ROWS:]:
        name = f"{one['iteration']:,}" + (" (latest)" if one["latest"] else "")
        kept.append([name, byte_text(one["bytes"]), one["files"], one["state"], when(one["time"])])
    done = [event for event in run.events if event.get("event") == "save"]
    rows = [
        [
            when(event.get("time")),
            *(_cell(event.get(key)) for key in ("iteration", "seconds")),
            event.get("error", "saved"),
        ]
        for event in done[-MOST_ROWS:]
    ]
    text = html.table("checkpoints on disk", ("iteration", "size", "files", "state", "written (UTC)"), kept, (1, 2))
    head = "time (UTC)", "iteration", "seconds", "result"
    text += html.table("saves, with the time until each was on disk", head, rows[-IN_SIGHT:], (1, 2))
    text += html.details("Earlier saves", html.table("earlier saves", head, rows[:-IN_SIGHT], (1, 2)))
    left_out = max(len(done), len(run.checkpoints)) - MOST_ROWS
    more = html.paragraph(f"The last {MOST_ROWS} rows are shown; {left_out} earlier ones are left out.")
    return (text or html.paragraph("No checkpoint in this folder.")) + (more if left_out > 0 else "")


def faults(run: RunFolder) -> Markup:
    """List starts and ends, skipped or non-finite steps, pauses, alarms and stacks."""
    rows = starts_and_ends(run)
    text = html.table("starts and ends", ("time (UTC)", "event", "about"), rows[-MOST_ROWS:])
    starts, killed = (sum(row[1] == what for row in rows) for what in ("start", KILLED))
    if starts > 1:
        ends = f"; {killed} time{'s' if killed > 1 else ''} it recorded no end" if killed else ""
        text = html.paragraph(f"The run was started {starts} times{ends}.") + text
    text += recoveries(run)
    text += audits(run)
    if run.outcome:
        text += html.table("status for the script that started the run", ("key", "value"), list(run.outcome.items()))
    bad = [
        [int(record["iteration"]), *(_cell(record.get(f"{kind}_iterations")) for kind in ("skipped", "nan", "spike"))]
        for record in run.records
        if any((number(record.get(f"{kind}_iterations")) or 0) > 0 for kind in ("skipped", "nan", "spike"))
    ]
    heads = ("until iteration", "skipped", "not finite", "spikes")
    text += html.table("log intervals with unusual steps", heads, bad[-MOST_ROWS:], (0, 1, 2, 3))
    title = "pauses: time between log lines that step times do not explain"
    text += html.table(title, ("after iteration", "seconds"), pauses(run), (0, 1))
    told = [record["layer_alarms"] for record in run.records if isinstance(record.get("layer_alarms"), list)]
    alarms = [line for lines in told for line in lines if isinstance(line, str)]
    text += html.bullets(alarms[-MOST_ROWS:])
    for name, stack in list(run.stacks.items())[:16]:
        more = f"\n... {len(stack) - 20000:,} more characters" if len(stack) > 20000 else ""
        text += html.details(f"stacks/{name}", html.pre(stack[:20000] + more))
    if len(run.stacks) > 16:
        text += html.paragraph(f"stacks of {len(run.stacks) - 16} more ranks are in the folder `stacks`.")
    return text or html.paragraph("None recorded.")


RECOVERY = {
    "failed": "who",
    "how": "what",
    "detected after (s)": "detected_after",
    "next step after (s)": "recovered_after",
    "steps lost": "steps_lost",
    "by": "rung",
    "from": "source",
    "why": "why",
}
"""Dict from the heading of each column in the table of recoveries to the key of a `recovery` event."""


def recoveries(run: RunFolder) -> Markup:
    """Return a table of failures, with the recovery from each failure."""
    found = [event for event in run.events if event.get("event") == "recovery"][-MOST_ROWS:]
    rows = [[when(event.get("time")), *(_cell(event.get(key, "")) for key in RECOVERY.values())] for event in found]
    return html.table("recoveries", ("time (UTC)", *RECOVERY), rows, (3, 4, 5))


AUDIT = {
    "iteration": "iteration",
    "ranks": "ranks",
    "hosts": "hosts",
    "first": "first",
    "relative difference": "relative_difference",
    "times": "disagreements",
    "cause": "cause",
}
"""Dict from the heading of each column in the table of audits to the key of an `audit` event."""


def audits(run: RunFolder) -> Markup:
    """Return the number of audited steps and the ranks that disagreed."""
    found = [event for event in run.events if event.get("event") == "audit"]
    counted = [count for _, count in run.values("audits")]
    if not found and not any(counted):
        return Markup("")
    ends = [
        one for one, after in pairwise([*counted, 0.0]) if after < one
    ]  # The count restarts from 0 at each start of the run.
    steps, times = sum(ends), len(found)
    text = html.paragraph(f"{steps:,.0f} steps were audited; ranks disagreed in {times:,}.")
    rows = []
    for event in found[-MOST_ROWS:]:
        several = {key: ", ".join(map(str, value)) for key, value in event.items() if isinstance(value, list)}
        cells = (_cell((event | several).get(key, "")) for key in AUDIT.values())
        rows.append([when(event.get("time")), *cells])
    return text + html.table("audits in which ranks disagreed", ("time (UTC)", *AUDIT), rows, (1, 5, 6))


KILLED = "no end recorded"


def starts_and_ends(run: RunFolder) -> list[list[Any]]:
    """Return a row [time, event, details] for each start and end. If two starts follow each other without an end in
    between, the run was killed or its machine stopped."""
    rows: list[list[Any]] = []
    for event in run.events:
        time = when(event.get("time"))
        if event.get("event") == "start":
            if rows and rows[-1][1] == "start":
                rows.append(["", KILLED, "killed, or its machine has stopped"])
            ranks = event.get("world_size")
            about = f"at iteration {event.get('iteration')} on {ranks} rank{'' if ranks == 1 else 's'}"
            rows.append([time, "start", about])
        elif event.get("event") == "end":
            rows.append([time, f"end: {event.get('name', '')}", event.get("why", "")])
    return rows


def pauses(run: RunFolder, most: int = 10) -> list[list[Any]]:
    """Return [iteration, seconds] of the longest pauses between two log lines, such as evaluations, saves and restarts.
    The length of a pause is the time between two log lines minus the duration of the training steps in between."""
    timed = [(r["iteration"], number(r.get("time")), number(r.get("step_time"))) for r in run.records]
    known = [(at, time, step) for at, time, step in timed if time is not None and step is not None]
    found = []
    for (before, earlier, _), (at, time, step) in pairwise(known):
        extra = time - earlier - step * (at - before)
        if extra > max(5.0, 10 * step):
            found.append([before, round(extra, 1)])
    return sorted(found, key=lambda pause: -pause[1])[:most]


def configuration(run: RunFolder, others: Sequence[RunFolder]) -> Markup:
    """Return a table of all configuration values. If there are other runs, a table of differing values precedes it."""
    if not run.config:
        return html.paragraph(f"{CONFIG} is missing or cannot be read.")
    text = differences([run, *others]) if others else ""
    rows = [[key, _value(run.config, key)] for key in run.config]
    return text + html.details(f"All {len(rows)} values", html.table(CONFIG, ("flag", "value"), rows))


def differences(runs: Sequence[RunFolder]) -> Markup:
    """Return a table of the configuration values that differ between runs."""
    keys = sorted({key for each in runs for key in each.config})
    values = [[key, *(_value(each.config, key) for each in runs)] for key in keys]
    differ = [row for row in values if len(set(row[1:])) > 1]
    heads = ("flag", *names_of(runs))
    return html.table(f"{len(differ)} values that differ", heads, differ) or html.paragraph("No value differs.")


def _value(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key, "not set")
    return str(value).lower() if isinstance(value, bool) else str(value)

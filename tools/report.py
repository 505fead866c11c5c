"""Write an HTML page about a run: loss, throughput, goodput, memory, layout, timeline, saves, faults and configuration.

    python tools/report.py runs/a
    python tools/report.py runs/a --against runs/b runs/c --output a.html
    python tools/report.py runs/a runs/b runs/c --output all.html

RUN is a --save folder, or its URL, for which --output is needed. The page needs neither a network nor scripts. The page
shows the data that is available, so the tool also works for runs that crashed, are still running, or have damaged
files. --against adds the curves of other runs and the differing flags. If several runs are given, the page compares
them, in order of increasing loss. The page then shows losses over tokens, time and FLOPs, the throughput, and the
configuration values that differ. Code that a run names is not executed. To plan a run with custom parts, pass the code
with --extension.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import kind_of
from megatron.core.fsync import whole_file
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from megatron.training.extensions import ExtensionError

from .common import add_extension_flag, refuse, refuse_unwritable, run_tool, too_small, tool_parser
from .pictures import compared_runs
from .pictures import report_sections as sections
from .pictures.fetched_run import local_run
from .pictures.plot_memory import read_plan
from .pictures.run_folder import CONFIG, RunFolder, read_run


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    add_extension_flag(parser, argv)
    add = parser.add_argument
    text = "--save folder of a run, or its metrics.jsonl; give several runs to compare them"
    add("runs", type=located, nargs="+", metavar="RUN", help=text)
    add("--against", type=located, metavar="RUN", nargs="+", action="extend", default=[], help="runs to compare with")
    add("--output", type=Path, metavar="FILE.html", help="default: report.html in the folder of the run")
    add("--metrics-file", type=Path, help="default: metrics.jsonl in the folder of the run")
    add("--trace", type=Path, help="default: the newest in the folder trace of the run")
    add("--outcome", type=Path, help="status file of the run (OUTCOME_FILE); default: outcome in the run's folder")
    add("--plan", type=Path, help="file of --dry-run --json; default: computed, if the layout is known")
    add("--no-plan", action="store_true", help="do not compute a memory plan")
    add("--gpus-per-node", type=int, default=8, help="for the map of ranks without a trace (default: 8)")
    args = parser.parse_args(argv)
    refuse([*too_small(args, gpus_per_node=1), *_of_one_run(args)])
    args.run = args.runs[0]
    with ExitStack() as stack:
        run, *others = [stack.enter_context(local_run(path)) for path in (*args.runs, *args.against)]
        if len(args.runs) == 1:
            return _write(args, run, others)
        return _compare(args, dict(zip(map(str, args.runs), [run, *others], strict=True)))


def _of_one_run(args: argparse.Namespace) -> list[str]:
    """If several runs are given, return an error message for each flag that requires a single run, and for a missing
    --output."""
    if len(args.runs) == 1:
        return []
    given = {"--against": args.against, "--metrics-file": args.metrics_file, "--trace": args.trace}
    given |= {"--outcome": args.outcome, "--plan": args.plan, "--output": args.output is None}
    rule = {"--output": "is needed for several runs; give the file to write"}
    return [
        f"{name}: {rule.get(name, 'applies only to the page of one run; remove it')}" for name in given if given[name]
    ]


def _compare(args: argparse.Namespace, paths: Mapping[str, Path]) -> int:
    """Write a page that compares several runs, omitting runs that have no record yet. Raises ValueError if no run has a
    record."""
    refuse_unwritable("--output", args.output)
    found = []
    for name, path in paths.items():
        if kind_of(path) != "empty" and (run := read_run(path)).records:
            found.append(run)
        else:
            print(f"{name}: omitted, because it has no record yet")
    if not found:
        raise ValueError("none of the runs has a record; the first comes after --log-interval steps")
    runs, by = compared_runs.by_loss(found)
    names = ", ".join(str(run.path.resolve()) for run in runs)
    text = sections.html.page(
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}",
        sections.html.paragraph(names, "soft"),
        {
            "Ranking": compared_runs.ranking(runs, by),
            "Loss": compared_runs.losses(runs),
            "Throughput": sections.throughput(runs[0], runs[1:]),
            "Differences": sections.differences(runs),
        },
    )
    return _put(args.output, text)


def _write(args: argparse.Namespace, path: Path, against: Sequence[Path]) -> int:
    run = read_run(path, args.metrics_file, args.outcome, args.trace)
    others = [read_run(other) for other in against]
    plan, why = None, "--no-plan"
    if args.plan is not None:
        plan = read_plan(args.plan)
    elif not args.no_plan:
        plan, why = computed_plan(run)
    if args.output is None and not isinstance(args.run, Path):
        raise ValueError(f"--output is needed for {args.run}, whose folder is not on the local disk")
    output = args.output or run.path / "report.html"
    refuse_unwritable("--output", output)
    return _put(output, report(run, others, plan, why, args.gpus_per_node))


def _put(output: Path, text: str) -> int:
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(output) as file:
        file.write_text(text, encoding="utf-8")
    print(f"report: {output}")
    return 0


def report(
    run: RunFolder, others: Sequence[RunFolder] = (), plan: Any = None, why_no_plan: str = "", gpus_per_node: int = 8
) -> str:
    """Return the HTML report of a run."""
    last = next((record["time"] for record in reversed(run.records) if "time" in record), None)
    lead = sections.html.paragraph(
        f"{run.path.resolve()}" + (f"; last record {sections.when(last)} UTC" if last else ""), "soft"
    )
    if others:
        paths = ", ".join(str(other.path.resolve()) for other in others)
        lead += sections.html.paragraph(f"compared with {paths}", "soft")
    return sections.html.page(
        f"Run {run.name}",
        lead,
        {
            "Summary": sections.summary(run),
            "Loss": sections.loss(run, others),
            "Throughput": sections.throughput(run, others),
            "Goodput": sections.goodput(run),
            "Memory": sections.memory(run, plan, why_no_plan),
            "Layout": sections.layout(run, gpus_per_node),
            "Timeline": sections.timeline(run),
            "Saves": sections.saves(run),
            "Faults and restarts": sections.faults(run),
            "Configuration": sections.configuration(run, others),
        },
    )


def computed_plan(run: RunFolder) -> tuple[list[dict[str, int]] | None, str]:
    """Compute the memory plan of a run. Return the planned memory of each pipeline rank, or None if no plan can be
    computed. The second value is the reason why there is no plan, or an empty string if there is a plan."""
    path, world_size = run.path / CONFIG, run.world_size
    if not path.is_file() or world_size is None:
        return None, "the configuration or the number of ranks is unknown"
    try:
        given = parse_args(["--config", str(path)])
        from megatron.extensions.plan.planner.memory import memory_of_ranks
        from megatron.training.plan import plan_of

        # The vocabulary size is read from the file, where it is a derived value, because the tokenizer may no longer
        # exist.
        vocab_size = run.config.get("vocab-size") if given.model.vocab_size is None else None
        config = plan_of(resolve(given, world_size, vocab_size)).longest.config
        return [rank.record for rank in memory_of_ranks(config, world_size)], ""
    except ExtensionError as error:
        return None, str(error)
    except SystemExit:
        return None, f"{CONFIG} is not accepted by this version"
    except Exception as error:  # the report must not fail if there is no plan
        return None, f"it could not be computed ({type(error).__name__}: {error})"


if __name__ == "__main__":
    run_tool(main)

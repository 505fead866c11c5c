"""Trace files: gzipped JSON in Chrome's trace-event format, which Perfetto opens. This module does not import torch.

The format is the "Trace Event Format" of the Chromium project. Each rank is a process (`pid`), and its threads are
tracks. `ts` and `dur` are in microseconds. `ts` is the time since the start of the trace, on the clock of rank 0's
host. `otherData` contains properties of the run.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.json_text import parse_json
from megatron.core.fsync import whole_file

Event = dict[str, Any]
Trace = dict[str, Any]

PLANNED_TRACK = "planned"


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace atomically. If writing fails, for example on a full disk, no file remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as new, gzip.open(new, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(trace, file, separators=(",", ":"), allow_nan=False)


def read_trace(path: Path) -> Trace:
    """Read a trace, which may be gzipped. Raises ValueError if the trace is damaged or was not written by this
    program."""
    try:
        data = path.read_bytes()
        trace = parse_json(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a trace: {error}; --trace writes one") from error
    if why := why_unreadable(trace):
        raise ValueError(f"{path} is not a trace of this program, or damaged: {why}; --trace writes one")
    return trace


def process_events(rank: int, name: str, tracks: Iterable[str]) -> Iterator[Event]:
    """Yield events that name a rank and its tracks. The tracks are numbered from 0, in the given order."""
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    for number, track in enumerate(tracks):
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def slice_event(
    rank: int, track: int, name: str, category: str, start: float, stop: float, args: Mapping[str, object]
) -> Event:
    """Return the trace event that shows a span on a track. Times are in microseconds.

    Args:
        rank: Global rank.
        track: Number of the track.
        name: Name to display.
        category: Category of the span.
        start: Start of the span. The start and the end are rounded before the duration is computed, so adjacent spans
            do not overlap.
        stop: End of the span.
        args: Properties to display.
    """
    begin, end = round(start, 3), round(stop, 3)
    place = {"ph": "X", "pid": rank, "tid": track, "ts": begin, "dur": round(end - begin, 3)}
    return place | {"name": name, "cat": category, "args": args}


def async_events(
    rank: int, number: int, name: str, category: str, start: float, stop: float, args: Mapping[str, object]
) -> list[Event]:
    """Return the begin and end events of a span that may overlap other spans of its rank, such as a collective in
    flight. `number` distinguishes the span from the rank's other asynchronous spans. The other arguments have the same
    meaning as in `slice_event`.
    """
    common = {"pid": rank, "tid": 0, "id": f"{rank}.{number}", "name": name, "cat": category}
    begin = {"ph": "b", "ts": round(start, 3), "args": args} | common
    return [begin, {"ph": "e", "ts": round(stop, 3)} | common]


def flow_events(number: int, name: str, source: Event, target: Event) -> list[Event]:
    """Return the start and end events of an arrow from the slice that sends a message to the later slice that uses the
    message."""
    events = []
    for phase, at, more in (("s", source, {}), ("f", target, {"bp": "e"})):
        # the arrow ends within the target slice, and not before the send
        ts = max(at["ts"], source["ts"]) if phase == "f" else at["ts"]
        place = {"pid": at["pid"], "tid": at["tid"], "ts": ts}
        events.append({"ph": phase, "id": number, "name": name, "cat": "message"} | place | more)
    return events


FIELDS = {
    "X": {"pid", "tid", "ts", "dur", "name", "cat", "args"},
    "M": {"pid", "tid", "name", "args"},
    "b": {"pid", "ts", "id", "cat", "name"},
    "e": {"pid", "ts", "id", "cat", "name"},
    "s": {"pid", "tid", "ts", "id", "cat", "name"},
    "f": {"pid", "tid", "ts", "id", "cat", "name"},
}


MOST = 2.0**53
"""Largest number up to which a float64 represents every integer exactly."""

ACTION_CATEGORIES = ("pipeline", PLANNED_TRACK)


def why_unreadable(trace: object) -> str | None:
    """Return the reason why a trace is not valid; None if it is valid.

    This function checks the ranks in `otherData` and the fields of each event.
    """
    if not isinstance(trace, dict):
        return "otherData has no ranks"
    other = trace.get("otherData")
    if not isinstance(other, dict) or not isinstance(other.get("ranks"), list):
        return "otherData has no ranks"
    ranks, events = other["ranks"], trace.get("traceEvents")
    if not isinstance(other.get("device"), str) or not isinstance(events, list):
        return "it has no device or no events"
    if why := _wrong_layout(other, len(ranks)):
        return why
    for number, facts in enumerate(ranks):
        if not isinstance(facts, dict) or not isinstance(facts.get("host"), str):
            return f"otherData does not contain the host of rank {number}"
        for key in ("coords", "clock", "memory"):
            values = facts.get(key, {})
            if not isinstance(values, dict) or not all(map(_is_number, values.values())):
                return f"the {key} of rank {number} are not numbers"
    for number, event in enumerate(events):
        if why := malformed(number, event):
            return why
        if event["pid"] not in range(len(ranks)):
            return f"event {number} is of rank {event['pid']!r}, which is not there"
    return None


def _wrong_layout(other: Mapping[str, object], count: int) -> str | None:
    """Check that the parallel sizes and the pipelines in `otherData` fit a world of `count` ranks. Return the reason
    why the sizes or pipelines are invalid; None if they are valid."""
    layout, pipelines = other.get("layout"), other.get("pipelines")
    axes = ("tp", "cp", "dp", "pp", "ep", "expt_tp")
    if not isinstance(layout, dict) or not all(_is_number(layout.get(axis)) and layout[axis] >= 1 for axis in axes):
        return "otherData has no layout"
    tp, cp, dp, pp, ep, expt_tp = (layout[axis] for axis in axes)
    if tp * cp * dp * pp != count or (tp * cp * dp) % (ep * expt_tp):
        return f"the layout in otherData is not one of {count} ranks"
    members = [str(rank) for each in pipelines for rank in each] if isinstance(pipelines, list) else []
    if sorted(members) != sorted(map(str, range(count))):
        return "the pipelines in otherData do not contain each rank once"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST


def malformed(number: int, event: object) -> str | None:
    """Return the reason why a single event is invalid; None if the event is valid."""
    if not isinstance(event, dict):
        return f"event {number} is no object"
    phase = str(event.get("ph"))
    missing = FIELDS.get(phase, {"ph"}) - event.keys()
    if phase not in FIELDS or missing:
        return f"event {number}: phase {phase!r}, without {sorted(missing)}"
    times = [event[key] for key in ("ts", "dur") if key in event]
    if not all(_is_number(x) and x >= 0 for x in times):
        return f"event {number} ({event['name']}): times {times}"
    args = event.get("args", {})
    of_action = event.get("cat") in ACTION_CATEGORIES
    if not isinstance(args, dict) or (of_action and not args.keys() >= {"kind", "stage", "microbatch"}):
        return f"event {number} ({event['name']}): it does not specify its action"
    return None

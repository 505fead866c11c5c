"""The file of a trace: JSON in the trace-event format of Chrome, gzipped, which Perfetto opens. No torch.

Format: "Trace Event Format" of the Chromium project. Each rank is a process, `pid`; its threads are tracks. Times, `ts`
and `dur`, are microseconds since the beginning of the trace on the clock of rank 0's host. What is known of the run
stands in `otherData`.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Trace = dict[str, Any]

PLANNED_TRACK = "planned"


def write_trace(trace: Trace, path: Path) -> None:
    """Writes a trace, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(trace, file, separators=(",", ":"), allow_nan=False)
    os.replace(temporary, path)


def read_trace(path: Path) -> Trace:
    """Reads a trace, gzipped or not. Raises ValueError if it is not one of this program's."""
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a trace: {error}; --trace writes one") from error
    if not isinstance(trace, dict) or "ranks" not in trace.get("otherData", {}):
        raise ValueError(f"{path} is not a trace of this program: otherData has no ranks; --trace writes one")
    return trace


def process_events(rank: int, name: str, tracks: Iterable[str]) -> Iterator[Event]:
    """Names of a rank and its tracks, numbered from 0 in the order given."""
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    for number, track in enumerate(tracks):
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def slice_event(rank: int, track: int, name: str, category: str, start: float, stop: float, args: Event) -> Event:
    """A span of a track, in microseconds. Both ends are rounded, so that what touches does not overlap."""
    begin, end = round(start, 3), round(stop, 3)
    place = {"ph": "X", "pid": rank, "tid": track, "ts": begin, "dur": round(end - begin, 3)}
    return place | {"name": name, "cat": category, "args": args}


def async_events(
    rank: int, number: int, name: str, category: str, start: float, stop: float, args: Event
) -> list[Event]:
    """Both ends of a span that may overlap others of its rank, such as a collective in flight."""
    common = {"pid": rank, "tid": 0, "id": f"{rank}.{number}", "name": name, "cat": category}
    begin = {"ph": "b", "ts": round(start, 3), "args": args} | common
    return [begin, {"ph": "e", "ts": round(stop, 3)} | common]


def flow_events(number: int, name: str, source: Event, target: Event) -> list[Event]:
    """An arrow from one slice to a later one: a message and the action that uses it."""
    events = []
    for phase, at, more in (("s", source, {}), ("f", target, {"bp": "e"})):
        # Within the slice, and not before the message was sent.
        ts = max(at["ts"], source["ts"]) if phase == "f" else at["ts"]
        place = {"pid": at["pid"], "tid": at["tid"], "ts": ts}
        events.append({"ph": phase, "id": number, "name": name, "cat": "message"} | place | more)
    return events


FIELDS = {
    "X": {"pid", "tid", "ts", "dur", "name"},
    "M": {"pid", "tid", "name", "args"},
    "b": {"pid", "ts", "id", "cat", "name"},
    "e": {"pid", "ts", "id", "cat", "name"},
    "s": {"pid", "tid", "ts", "id", "cat", "name"},
    "f": {"pid", "tid", "ts", "id", "cat", "name"},
}


def problems(trace: Trace) -> list[str]:
    """What violates the format: fields, numbers, slices of a track that overlap without one lying in the other, ends
    without a beginning, and arrows that begin or end at no slice or point back in time."""
    found: list[str] = []
    tracks: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    pairs: dict[tuple[str, str, str], dict[str, Event]] = {}
    for number, event in enumerate(trace["traceEvents"]):
        phase = event.get("ph")
        missing = FIELDS.get(phase, {"ph"}) - event.keys()
        numbers = [event[key] for key in ("ts", "dur") if key in event]
        if phase not in FIELDS or missing:
            found.append(f"event {number}: phase {phase!r}, without {sorted(missing)}")
        elif not all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in numbers):
            found.append(f"event {number} ({event['name']}): times {numbers}")
        elif phase == "X":
            end = event["ts"] + event["dur"]
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -end, event["name"]))
        elif phase in "besf":
            kind = "async" if phase in "be" else "flow"
            key = (kind, event["cat"], str(event["id"]))
            if phase in pairs.setdefault(key, {}):
                found.append(f"event {number} ({event['name']}): a second {phase} of {key}")
            pairs[key][phase] = event
    for place, slices in tracks.items():
        found += _overlaps(place, slices)
    for key, ends in pairs.items():
        first, last = ("b", "e") if key[0] == "async" else ("s", "f")
        if ends.keys() != {first, last}:
            found.append(f"{key} has only {', '.join(ends)}")
        elif ends[last]["ts"] < ends[first]["ts"]:
            found.append(f"{key} ends before it begins")
        elif key[0] == "flow":
            for event in ends.values():
                spans = tracks.get((event["pid"], event["tid"]), [])
                if not any(start <= event["ts"] <= -end for start, end, _ in spans):
                    found.append(f"{key}: {event['ph']} lies in no slice")
    return found


def _overlaps(place: tuple[int, int], slices: list[tuple[float, float, str]]) -> Iterator[str]:
    open_slices: list[tuple[float, str]] = []
    for start, negative_end, name in sorted(slices):
        while open_slices and open_slices[-1][0] <= start + TOLERANCE:
            open_slices.pop()
        if open_slices and -negative_end > open_slices[-1][0] + TOLERANCE:
            yield f"rank {place[0]}, track {place[1]}: {name} begins in {open_slices[-1][1]} and ends after it"
        open_slices.append((-negative_end, name))


TOLERANCE = 2e-3
"""Microseconds: sums of rounded numbers."""
